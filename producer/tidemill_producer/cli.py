"""The one `tidemill` command.

Each part registers its subcommands under the entry point group ``tidemill.commands``, as
``name = "module:attribute [extra]"``; this module knows none of them and loads one only when it
is used or listed. A command whose extra is not installed answers with the line that installs it.
"""

from __future__ import annotations

import re
import traceback
from importlib import metadata

import click

from tidemill_contracts.wire import TidemillError

COMMAND_GROUP = "tidemill.commands"
DISTRIBUTION = "tidemill"

EPILOG = """\b
Examples:
  tidemill demo                                        everything at once, no set-up
  tidemill worker --model ./Qwen3-0.6B                 serve a model from the queue
  tidemill batch in.jsonl out.jsonl --redis redis://127.0.0.1:6379/0
  tidemill batch in.jsonl out.jsonl --embedded ./Qwen3-0.6B
  tidemill dead list                                   jobs that were given up

`tidemill COMMAND --help` explains one command.
"""


class CommandNotLoadable(TidemillError):
    """A subcommand is registered but cannot run here."""


class LazyCommands(click.Group):
    """Subcommands from entry points, and errors as one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_entry_points()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry_point = _entry_points().get(cmd_name)
        return None if entry_point is None else _load(entry_point)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except TidemillError as error:
            return _fail(ctx, error)
        except ModuleNotFoundError as error:
            # A command may import what it needs only when it runs.
            entry_point = _entry_points().get(ctx.invoked_subcommand or "")
            if entry_point is None or _is_ours(error):
                raise
            return _fail(ctx, CommandNotLoadable(_how_to_install(entry_point, error)))


def _entry_points() -> dict[str, metadata.EntryPoint]:
    return {found.name: found for found in metadata.entry_points(group=COMMAND_GROUP)}


def _load(entry_point: metadata.EntryPoint) -> click.Command:
    missing = _missing_requirement(entry_point)
    if missing is not None:
        return _stand_in(entry_point, _how_to_install(entry_point, missing))
    try:
        command = entry_point.load()
    except ModuleNotFoundError as error:
        if not _is_ours(error):
            return _stand_in(entry_point, _how_to_install(entry_point, error))
        return _stand_in(entry_point, f"`tidemill {entry_point.name}` cannot be loaded: {error}")
    except ImportError as error:
        return _stand_in(entry_point, f"`tidemill {entry_point.name}` cannot be loaded: {error}")
    if not isinstance(command, click.Command):
        return _stand_in(entry_point, f"{entry_point.value} is not a click command")
    return command


def _missing_requirement(entry_point: metadata.EntryPoint) -> str | None:
    """The first distribution of the entry point's extra that is not installed."""
    for requirement in (entry_point.dist.requires if entry_point.dist else None) or []:
        name, _, marker = requirement.partition(";")
        if not any(
            re.search(rf"extra == ['\"]{extra}['\"]", marker) for extra in entry_point.extras
        ):
            continue
        distribution = re.split(r"[^A-Za-z0-9._-]", name.strip(), maxsplit=1)[0]
        try:
            metadata.distribution(distribution)
        except metadata.PackageNotFoundError:
            return distribution
    return None


def _is_ours(error: ModuleNotFoundError) -> bool:
    return (error.name or "").startswith("tidemill_")


def _how_to_install(entry_point: metadata.EntryPoint, missing: str | ModuleNotFoundError) -> str:
    module = missing if isinstance(missing, str) else missing.name
    extras = f"[{','.join(entry_point.extras)}]" if entry_point.extras else ""
    return (
        f"`tidemill {entry_point.name}` needs {module}, which is not installed:"
        f" pip install '{DISTRIBUTION}{extras}'"
    )


def _stand_in(entry_point: metadata.EntryPoint, message: str) -> click.Command:
    """A command that only says why the real one cannot run, whatever its arguments."""

    def refuse(**_: object) -> None:
        raise CommandNotLoadable(message)

    _, _, remedy = message.rpartition(": ")
    return click.Command(
        entry_point.name,
        callback=refuse,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not available here: {remedy})",
    )


def _fail(ctx: click.Context, error: TidemillError) -> object:
    if ctx.params.get("debug"):
        traceback.print_exception(error)
    click.echo(f"tidemill: error: {' '.join(str(error).split())}", err=True)
    return ctx.exit(1)


@click.group(cls=LazyCommands, epilog=EPILOG, context_settings={"max_content_width": 100})
@click.option(
    "--debug", is_flag=True, envvar="TIDEMILL_DEBUG", help="Show the traceback of an error."
)
@click.version_option(package_name=DISTRIBUTION, message="%(prog)s %(version)s")
def tidemill(debug: bool) -> None:
    """Batch generation for Qwen3 language models.

    Jobs go into a Redis queue, a worker runs them in full batches, and each gets one result.
    """


def main() -> None:
    """Run the command line; exits with its status."""
    tidemill.main(prog_name="tidemill")


if __name__ == "__main__":
    main()
