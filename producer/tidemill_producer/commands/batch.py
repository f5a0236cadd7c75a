"""`tidemill batch`: a file of prompts in, a file of results out."""

from __future__ import annotations

import click
from click.core import ParameterSource

from tidemill_producer.batch.config import DEFAULT_WINDOW, BatchConfig
from tidemill_producer.commands.options import Command, queue_option, redis_option

WORKER_OPTIONS = (
    "dtype", "quantization", "device", "max_model_len", "page_size", "max_rows", "kv_pages",
)  # fmt: skip


def worker_options(command: Command) -> Command:
    """The options that are passed on to an embedded worker."""
    for option in reversed(
        (
            click.option(
                "--dtype",
                type=click.Choice(["bfloat16", "float32"]),
                help="Of the embedded worker's weights and cache.",
            ),
            click.option(
                "--quantization",
                type=click.Choice(["int8"]),
                help="Rounds its weights; for dense models on the CPU.",
            ),
            click.option("--device", metavar="DEVICE", help="Its device: cpu, cuda, npu, …"),
            click.option("--max-model-len", type=click.IntRange(1), help="Its longest context."),
            click.option("--page-size", type=click.IntRange(1), help="Its tokens per KV page."),
            click.option("--max-rows", type=click.IntRange(1), help="Its rows of a full batch."),
            click.option("--kv-pages", type=click.IntRange(1), help="Its KV pages in all."),
        )
    ):
        command = option(command)
    return command


def given_worker_options(values: dict[str, object]) -> dict[str, str | int]:
    """Takes those options out of a command's values; keeps the ones that were given."""
    given: dict[str, str | int] = {}
    for name in WORKER_OPTIONS:
        value = values.pop(name)
        if isinstance(value, str | int):
            given[name.replace("_", "-")] = value
    return given


def _refuse_swallowed_argument(
    ctx: click.Context, parameter: click.Parameter, value: str | None
) -> str | None:
    if value is not None and value.endswith(".jsonl"):
        raise click.BadParameter(
            f"took {value} for the model: write --embedded last, or --embedded=demo"
        )
    return value


@click.command(
    short_help="Run a file of prompts.",
    epilog="""\b
Examples:
  tidemill batch in.jsonl out.jsonl --embedded                   the demo model, no set-up
  tidemill batch in.jsonl out.jsonl --embedded ./Qwen3-0.6B --max-rows 64
  tidemill batch in.jsonl out.jsonl --redis redis://queue:6379/0  workers run elsewhere
  cat in.jsonl | tidemill batch - - --embedded --quiet > out.jsonl

\b
A row of the input, and what comes of it:
  {"custom_id": "r1", "prompt": "The sea is", "sampling": {"max_tokens": 32}}
  {"custom_id": "r1", "result": {"text": "…", "usage": {…}, …}, "error": null}
Instead of "prompt": "messages" or "prompt_token_ids". Also "model", "priority", "tenant",
"deadline" and "metadata"; with metadata {"expected": "…"} the summary counts right answers.

A file for the OpenAI Batch API runs too; its "model" must be the one served. See docs/batch.md.

A bad line becomes one error row and stops nothing. Exit status: 0 all rows ok, 3 some failed,
1 could not run, 130 interrupted (finished rows are in OUTPUT).
""",
)
@click.argument("input", metavar="INPUT.jsonl")
@click.argument("output", metavar="OUTPUT.jsonl")
@redis_option("Use the workers of this server")
@click.option(
    "--embedded",
    is_flag=False,
    flag_value="demo",
    metavar="[MODEL_DIR]",
    callback=_refuse_swallowed_argument,
    help="Start a server and a worker for this run; without a value, with the demo model.",
)
@queue_option
@worker_options
@click.option(
    "--window",
    type=click.IntRange(1),
    default=DEFAULT_WINDOW,
    show_default=True,
    envvar="TIDEMILL_WINDOW",
    show_envvar=True,
    help="Most jobs in flight.",
)
@click.option(
    "--format",
    type=click.Choice(["auto", "tidemill", "openai"]),
    default="auto",
    show_default=True,
    help="Of the rows; auto goes by the first row that tells.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT if it exists.")
@click.option("--quiet", is_flag=True, help="No progress and no summary.")
@click.pass_context
def batch(ctx: click.Context, /, **values: object) -> None:
    """Run every row of INPUT.jsonl and write its result to OUTPUT.jsonl as it finishes.

    Say where to run: --embedded starts everything here, --redis uses workers that run already.
    """
    from tidemill_producer.batch.session import run_batch

    options = given_worker_options(values)
    redis_source = ctx.get_parameter_source("redis_url")
    if values["embedded"] is not None and redis_source is not ParameterSource.COMMANDLINE:
        values["redis_url"] = None  # what was asked for aloud goes before the environment
    ctx.exit(run_batch(BatchConfig(worker_options=options, **values)))  # type: ignore[arg-type]
