"""`tidemill contracts`: which contracts there are, what each says, and which model fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tidemill_contracts.wire.errors import TidemillError

if TYPE_CHECKING:
    from tidemill_contracts.models.contract import ModelContract
    from tidemill_contracts.models.inspection import ModelReport

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class _Bytes(click.ParamType[int]):
    """A number of bytes, such as ``24GiB``, ``800M`` or ``1073741824``."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        text = value.strip().lower().removesuffix("b").removesuffix("i")
        number, unit = (text[:-1], text[-1:]) if text[-1:] in _UNITS else (text, "")
        try:
            return int(float(number) * _UNITS[unit])
        except ValueError:
            self.fail(f"{value!r} is no size; try 24GiB", param, ctx)


@click.group(
    epilog="""\b
Examples:
  tidemill contracts list
  tidemill contracts show qwen3 dense --json > before.json
  tidemill contracts diff before.json qwen3/dense
  tidemill contracts check ./Qwen3-0.6B --memory 16GiB
"""
)
def contracts() -> None:
    """Look at the model serving contracts: the boundary between the worker and its kernels."""


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contracts.command("list")
@as_json
def list_command(as_json: bool) -> None:
    """List every contract, planned ones included."""
    from tidemill_contracts.models.inspection import list_contracts

    entries = list_contracts()
    if as_json:
        click.echo(json.dumps(entries, indent=2))
        return
    width = max(len(f"{e['family']}/{e['variant']}") for e in entries)
    for entry in entries:
        name = f"{entry['family']}/{entry['variant']}"
        state = "implemented" if entry["implemented"] else "planned"
        click.echo(f"{name:<{width}}  {state:<11}  {entry['source']}")


@contracts.command("show")
@click.argument("family")
@click.argument("variant")
@as_json
def show_command(family: str, variant: str, as_json: bool) -> None:
    """Show one contract: limits, capabilities, stages and their arguments, fingerprint."""
    from tidemill_contracts.models.inspection import describe_contract
    from tidemill_contracts.models.registry import get_contract

    contract = get_contract(family, variant)
    description = describe_contract(contract)
    if as_json:
        click.echo(json.dumps(description, indent=2))
        return
    click.echo(f"{contract.model}  schema {contract.schema_version}")
    click.echo(f"fingerprint   {contract.abi_fingerprint()}")
    click.echo(f"capabilities  {', '.join(sorted(contract.capabilities))}")
    for name, value in contract.limits.items():
        click.echo(f"limit         {name} = {value}")
    _show_values("backend", description["backend"])
    _show_stages(contract)


def _show_values(name: str, value: object) -> None:
    """Nested plain values, a line each, by their path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _show_values(f"{name}.{key}", inner)
    else:
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        click.echo(f"{name:<13} {shown}")


def _show_stages(contract: ModelContract) -> None:
    for phase, stages in contract.execution.items():
        click.echo(f"\n{phase} runs {', '.join(stages)}")
        for stage in stages:
            kernel = contract.kernels[stage]
            dynamic = ", ".join(sorted(kernel.dynamic_symbols))
            click.echo(f"  {kernel.public_name}  (dynamic: {dynamic})")
            for position, arg in enumerate(kernel.args):
                shape = ", ".join(map(str, arg.shape))
                click.echo(
                    f"  {position:>3}  {arg.name:<16} {arg.dtype:<6} {arg.direction:<6} [{shape}]"
                )


@contracts.command("check")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--device", default="cpu", show_default=True, help="Where the model would run.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Of weights and cache.")
@click.option("--quantization", type=click.Choice(["int8"]), help="Of the matrices, on the CPU.")
@click.option("--max-model-len", type=int, help="Longest job in tokens.")
@click.option("--max-rows", type=int, default=32, show_default=True, help="Rows in one step.")
@click.option("--page-size", type=int, help="Tokens per KV page.")
@click.option("--deterministic", is_flag=True, help="A job's bits do not depend on its batch.")
@click.option("--memory", type=_Bytes(), help="Memory to plan for, e.g. 16GiB; what is free now.")
@as_json
def check_command(model_dir: Path, memory: int | None, as_json: bool, **options: Any) -> None:
    """Tell whether MODEL_DIR can be served: which contract matches, what binds, what fits.

    Reports every problem at once, without loading the weights. Exit code 1 where there is one.
    """
    from dataclasses import asdict

    from tidemill_contracts.models.inspection import inspect_model
    from tidemill_contracts.models.runtime import RuntimeOptions

    report = inspect_model(model_dir, RuntimeOptions(**options), memory)
    if as_json:
        click.echo(json.dumps(asdict(report), indent=2))
    else:
        _print_report(report)
    if report.problems:
        raise SystemExit(1)


def _print_report(report: ModelReport) -> None:
    click.echo(report.model)
    if report.contract is not None:
        click.echo(f"contract      {report.contract}")
        click.echo(f"why           {report.why}")
        for name, value in report.limits.items():
            click.echo(f"limit         {name} = {value}")
    if report.weight_bytes is not None and report.bytes_per_page is not None:
        click.echo(f"runs in       {report.dtype}, rows of up to {report.max_model_len:,} tokens")
        click.echo(f"weights       {_gib(report.weight_bytes)}")
        click.echo(
            f"KV page       {report.bytes_per_page:,} bytes for {report.page_size} tokens"
            f" ({report.bytes_per_page // (report.page_size or 1):,} a token)"
        )
    for length, rows in report.rows_that_fit.items():
        click.echo(
            f"fits          {rows:,} rows of {length:,} tokens in {_gib(report.memory_bytes or 0)}"
        )
    if not report.problems:
        click.echo("no problems found")
    for problem in report.problems:
        click.echo(f"problem       {problem}")


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


@contracts.command("diff")
@click.argument("old")
@click.argument("new")
def diff_command(old: str, new: str) -> None:
    """Show what changed between two contracts' ABIs.

    OLD and NEW are FAMILY/VARIANT, or files that `tidemill contracts show … --json` wrote. Exit
    code 1 where they differ.
    """
    from tidemill_contracts.models.inspection import differences

    before, after = _description(old), _description(new)
    lines = differences(before, after)
    click.echo(f"--- {old} {str(before.get('fingerprint'))[:12]}")
    click.echo(f"+++ {new} {str(after.get('fingerprint'))[:12]}")
    for line in lines:
        click.echo(line)
    if lines:
        raise SystemExit(1)
    click.echo("the same ABI")


def _description(name: str) -> dict[str, object]:
    from tidemill_contracts.models.inspection import describe_contract
    from tidemill_contracts.models.registry import get_contract

    path = Path(name)
    if path.is_file():
        try:
            value = json.loads(path.read_text())
        except ValueError as error:
            raise TidemillError(f"{name} is not JSON: {error}") from error
        if not isinstance(value, dict) or "kernels" not in value:
            raise TidemillError(f"{name} is not what `tidemill contracts show --json` writes")
        return value
    family, slash, variant = name.partition("/")
    if not slash:
        raise TidemillError(f"{name!r} is neither a file nor FAMILY/VARIANT")
    return describe_contract(get_contract(family, variant))
