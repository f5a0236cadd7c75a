"""What `tidemill contracts` tells: contracts in plain values, what differs between two, and
whether a model directory can be served here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import ModelContract, RuntimeConfig, WeightSource
from tidemill_contracts.models.errors import CheckpointError, ModelError
from tidemill_contracts.models.registry import open_model, registrations, source_of
from tidemill_contracts.models.runtime import RuntimeOptions, free_memory, plan_runtime
from tidemill_contracts.models.startup import problems

LENGTHS = (512, 2_048, 8_192, 32_768)
"""Row lengths, in tokens, that `ModelReport.rows_that_fit` speaks of."""


def list_contracts() -> list[dict[str, object]]:
    """One object for each registered contract."""
    return [
        {
            "family": entry.family,
            "variant": entry.variant,
            "implemented": entry.implemented,
            "source": source_of(entry),
        }
        for entry in registrations()
    ]


def describe_contract(contract: ModelContract) -> dict[str, object]:
    """The public ABI, its fingerprint, and what the contract says of its backend."""
    details = getattr(contract.hooks, "details", None)
    return {
        "fingerprint": contract.abi_fingerprint(),
        **contract.abi(),
        "backend": dict(details()) if details is not None else {},
    }


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """What changed between two descriptions, a line each; empty where the ABI is the same."""
    ignored = {"fingerprint", "backend"}
    old = {name: value for name, value in old.items() if name not in ignored}
    new = {name: value for name, value in new.items() if name not in ignored}
    return list(_differences("", old, new))


def _differences(path: str, old: object, new: object) -> Iterator[str]:
    if old == new:
        return
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            where = f"{path}.{name}" if path else str(name)
            if name not in old:
                yield f"+ {where}: {new[name]}"
            elif name not in new:
                yield f"- {where}: {old[name]}"
            else:
                yield from _differences(where, old[name], new[name])
    elif _named(old) and _named(new):
        yield from _argument_differences(path, old, new)  # type: ignore[arg-type]
    else:
        yield f"~ {path}: {old} → {new}"


def _named(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, Mapping) and "name" in v for v in value)


def _argument_differences(
    path: str, old: Sequence[Mapping[str, object]], new: Sequence[Mapping[str, object]]
) -> Iterator[str]:
    """Arguments are compared by name, then by order."""
    before = {str(arg["name"]): arg for arg in old}
    after = {str(arg["name"]): arg for arg in new}
    for name in dict.fromkeys([*before, *after]):
        if name not in before:
            yield f"+ {path}[{list(after).index(name)}]: {name}"
        elif name not in after:
            yield f"- {path}[{list(before).index(name)}]: {name}"
        else:
            yield from _differences(f"{path}.{name}", before[name], after[name])
    kept_before = [name for name in before if name in after]
    kept_after = [name for name in after if name in before]
    if kept_before != kept_after:
        yield f"~ {path} order: {', '.join(kept_before)} → {', '.join(kept_after)}"


@dataclass(slots=True)
class ModelReport:
    """Whether a model directory can be served here, and how much of it fits."""

    model: str
    problems: list[str] = field(default_factory=list)
    contract: str | None = None
    why: str | None = None
    limits: dict[str, int] = field(default_factory=dict)
    dtype: str | None = None
    max_model_len: int | None = None
    page_size: int | None = None
    weight_bytes: int | None = None
    bytes_per_page: int | None = None
    memory_bytes: int | None = None
    """Given, or free on the device now."""
    rows_that_fit: dict[int, int] = field(default_factory=dict)
    """Row length in tokens → rows of that length that the KV cache holds at once."""


def inspect_model(
    model_dir: Path, options: RuntimeOptions, memory_bytes: int | None = None
) -> ModelReport:
    """Looks at everything that can be told without loading the weights; never raises `ModelError`:
    every problem is in the report."""
    report = ModelReport(model=str(model_dir))
    try:
        config, contract = open_model(model_dir, options.quantization)
    except ModelError as error:
        report.problems.append(str(error))
        return report
    report.contract = f"{contract.model} {contract.abi_fingerprint()}"
    report.why = (
        f"model_type {config.model_type!r}, architecture {', '.join(config.architectures)},"
        f" {config.num_hidden_layers} layers of {config.hidden_size},"
        f" {config.num_attention_heads} query and {config.num_key_value_heads} K/V heads"
        f" of {config.head_dim}"
    )
    report.limits = dict(contract.limits)
    try:
        runtime = plan_runtime(config, contract, options)
    except ModelError as error:
        report.problems.append(str(error))
        return report
    report.problems += [str(problem) for problem in problems(contract, config, runtime)]
    report.problems += _weight_problems(model_dir, config, contract, runtime)
    _measure(report, config, contract, runtime, memory_bytes)
    return report


def _measure(
    report: ModelReport,
    config: ModelConfig,
    contract: ModelContract,
    runtime: RuntimeConfig,
    memory_bytes: int | None,
) -> None:
    spec = contract.hooks.cache_spec(config, runtime)
    report.dtype = str(runtime.dtype).removeprefix("torch.")
    report.max_model_len = runtime.max_seq_len
    report.page_size = spec.page_size
    report.weight_bytes = contract.hooks.weight_bytes(config, runtime)
    report.bytes_per_page = spec.bytes_per_page
    report.memory_bytes = free_memory(runtime.device) if memory_bytes is None else memory_bytes
    left = report.memory_bytes - report.weight_bytes
    if left < spec.bytes_per_page:
        report.problems.append(
            f"The weights take {report.weight_bytes:,} bytes: no page of the KV cache fits in"
            f" {report.memory_bytes:,} bytes beside them."
        )
        return
    pages = left // spec.bytes_per_page
    for length in (*(n for n in LENGTHS if n < runtime.max_seq_len), runtime.max_seq_len):
        report.rows_that_fit[length] = pages // -(-length // spec.page_size)


class _Collector:
    """A checkpoint whose tensors are looked at, not read; notes what is wrong with each."""

    def __init__(self, source: WeightSource, found: list[str]) -> None:
        self._source = source
        self._found = found

    def names(self) -> Sequence[str]:
        return self._source.names()

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        try:
            self._source.take(name, shape)
        except CheckpointError as error:
            self._found.append(str(error))
        return torch.empty(shape, device="meta")

    def finish(self) -> None:
        try:
            self._source.finish()
        except CheckpointError as error:
            self._found.append(str(error))


def _weight_problems(
    model_dir: Path, config: ModelConfig, contract: ModelContract, runtime: RuntimeConfig
) -> list[str]:
    """Prepares the weights on the meta device: every tensor is looked for, none is copied."""
    found: list[str] = []
    try:
        with torch.device("meta"):
            contract.hooks.prepare_weights(
                _Collector(Checkpoint(model_dir), found), config, runtime, lambda tensor: tensor
            )
    except ModelError as error:
        found.append(str(error))
    return found
