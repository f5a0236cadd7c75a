"""`python -m tidemill_contracts.models.conformance`: the kit from the command line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click
import torch

from tidemill_contracts.models.conformance.case import (
    ConformanceCase,
    ConformanceOptions,
    directory_case,
    named_case,
    qwen3_case,
)
from tidemill_contracts.models.conformance.session import Session
from tidemill_contracts.models.conformance.suite import CHECKS, CheckResult, Outcome, run_checks
from tidemill_contracts.models.contract import ModelContract
from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.registry import get_contract

MARKS: dict[Outcome, str] = {"passed": "✓", "failed": "✗", "skipped": "–"}
WIDTH = max(len(check.name) for check in CHECKS)


def _list_checks(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        for check in CHECKS:
            click.echo(f"{check.name:<{WIDTH}}  {check.proves}")
        context.exit()


@click.command(
    epilog="""\b
Examples:
  python -m tidemill_contracts.models.conformance qwen3 dense
  python -m tidemill_contracts.models.conformance qwen3 dense --dtype bfloat16 --page-size 128
  python -m tidemill_contracts.models.conformance qwen3 dense --model ./Qwen3-0.6B --device cuda
  python -m tidemill_contracts.models.conformance mine small --case my_package.case:CASE
"""
)
@click.argument("family")
@click.argument("variant")
@click.option(
    "--case",
    "case_name",
    metavar="MODULE:NAME",
    help="The ConformanceCase to test with; a seeded Qwen3 model as small as the contract's"
    " limits allow.",
)
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A model directory to test with, in place of a case.",
)
@click.option("--device", default="cpu", show_default=True, help="Where the model runs.")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Of weights and cache; float32 where the contract accepts it. float32 finds more.",
)
@click.option("--page-size", type=click.IntRange(min=1), help="Tokens per KV page.")
@click.option(
    "--only",
    multiple=True,
    metavar="CHECK",
    type=click.Choice([check.name for check in CHECKS]),
    help="Run this check (and start-up); may be given several times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_checks,
    help="List the checks and what each proves.",
)
def main(
    family: str,
    variant: str,
    case_name: str | None,
    model_dir: Path | None,
    device: str,
    dtype: str | None,
    page_size: int | None,
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    """Hold the contract FAMILY/VARIANT to everything that the worker relies on.

    Prints one line for each check (✓ passed, ✗ failed, – could not be made on this contract) and
    ends with exit code 1 where one failed. What was skipped has not passed.
    """
    if case_name is not None and model_dir is not None:
        raise click.UsageError("--case and --model both name a model; give one of them.")
    try:
        contract = get_contract(family, variant)
        case = _case(contract, case_name, model_dir)
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    options = ConformanceOptions(
        device=device,
        dtype=None if dtype is None else getattr(torch, dtype),
        page_size=page_size,
    )
    session = Session(contract, case, options)
    results = []
    if not as_json:
        click.echo(f"{contract.model}  {contract.abi_fingerprint()[:12]}  {case.config.model_id}")
    for result in run_checks(session, only):
        results.append(result)
        if not as_json:
            _print(result)
    counts = Counter(result.outcome for result in results)
    if as_json:
        report = {
            "contract": str(contract.model),
            "fingerprint": contract.abi_fingerprint(),
            "counts": {outcome: counts[outcome] for outcome in MARKS},
            "checks": [asdict(result) for result in results],
        }
        click.echo(json.dumps(report, indent=2))
    else:
        click.echo(", ".join(f"{counts[outcome]} {outcome}" for outcome in MARKS))
    if counts["failed"]:
        raise SystemExit(1)


def _case(
    contract: ModelContract, case_name: str | None, model_dir: Path | None
) -> ConformanceCase:
    if case_name is not None:
        return named_case(contract, case_name)
    if model_dir is not None:
        return directory_case(model_dir)
    return qwen3_case(contract)


def _print(result: CheckResult) -> None:
    seconds = f"{result.seconds:.2f} s"
    click.echo(f"{MARKS[result.outcome]} {result.name:<{WIDTH}}  {seconds:>8}")
    if result.message:
        click.echo(click.wrap_text(result.message, 100, " " * 4, " " * 4, True))


if __name__ == "__main__":
    main(prog_name="python -m tidemill_contracts.models.conformance")
