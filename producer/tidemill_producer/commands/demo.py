"""`tidemill demo`: the bundled prompts through a bundled model, without any set-up."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from tidemill_producer.batch.config import BatchConfig
from tidemill_producer.commands.batch import given_worker_options, worker_options
from tidemill_producer.errors import BatchError

PROMPTS = "demo.jsonl"
DEFAULT_OUTPUT = "out/demo.results.jsonl"


@click.command(
    short_help="See it all at work: server, worker, 240 prompts.",
    epilog="""\b
Examples:
  tidemill demo
  tidemill demo results.jsonl --max-rows 64
""",
)
@click.argument("output", metavar="[OUTPUT]", default=DEFAULT_OUTPUT, required=False)
@worker_options
@click.pass_context
def demo(ctx: click.Context, /, output: str, **values: object) -> None:
    """Run the demo: a Redis server, a worker with a small model, and 240 prompts.

    Results go to OUTPUT (out/demo.results.jsonl), which is replaced. The prompts have known
    answers, so the summary also says how many are right.
    """
    from tidemill_producer.batch.session import run_batch

    options = given_worker_options(values)
    with resources.as_file(resources.files("tidemill_producer").joinpath(PROMPTS)) as prompts:
        if not prompts.is_file():
            raise BatchError(f"{prompts} is missing: this installation has no demo prompts")
        _make_folder(Path(output).parent)
        status = run_batch(
            BatchConfig(
                input=str(prompts),
                output=output,
                embedded="demo",
                worker_options=options,
                overwrite=True,
            )
        )
    if status < 128:
        click.echo(_next_steps(output, prompts), err=True)
    ctx.exit(status)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BatchError(f"Cannot make the folder {folder}: {error.strerror}") from error


def _next_steps(output: str, prompts: Path) -> str:
    # From a checkout, the path that a person would type.
    prompts = prompts.resolve()
    if prompts.is_relative_to(Path.cwd()):
        prompts = prompts.relative_to(Path.cwd())
    return f"""
What to try next:
  the answers                 head -3 {output}
  a model of yours            tidemill batch {prompts} out.jsonl --embedded MODEL_DIR
  a worker for other services tidemill worker --model demo --redis redis://127.0.0.1:6379/0"""
