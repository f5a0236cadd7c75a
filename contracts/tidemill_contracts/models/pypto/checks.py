"""Refuses a checkout that cannot be served, from what its child says of it.

pypto-lib's own validator compares constants; it never compares a stage's declared arguments with
the kernel that gets them. A contract of 24 arguments over a kernel of 25 passes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill_contracts.models.args import DTYPES
from tidemill_contracts.models.contract import CONTRACT_SCHEMA_VERSION, Phase
from tidemill_contracts.models.errors import ContractIdentity, ContractMismatch
from tidemill_contracts.models.pypto.messages import Description, StageDescription

PHASES: tuple[Phase, ...] = ("prefill", "decode")

FIRST_PREFILL_ARGS = {"hidden_states": "bf16", "input_ids": "int32"}
"""What prefill may start with, and the dtype that goes with it."""

LIMITS = (
    "batch",
    "max_seq",
    "page_size",
    "vocab",
    "real_vocab",
    "num_layers",
    "sampled_ids_pad",
    "vocab_pad_multiple",
)

CACHE = {"k_cache": ("bf16", "inout"), "v_cache": ("bf16", "inout")}

STEP_ARGS: dict[Phase, tuple[str, ...]] = {
    "prefill": ("seq_lens", "chunk_lens", "chunk_offsets", "block_table", "slot_mapping", "out"),
    "decode": ("seq_lens", "block_table", "slot_mapping", "sampled_ids_in", "out"),
}
"""The arguments that are written anew for every step."""

BUFFERS = frozenset({"k_cache", "v_cache", "logits", "sampled_ids_buffer", "next_hidden_buffer"})
"""Keyword arguments that the runtime builders may ask for."""


@dataclass(frozen=True, slots=True)
class Features:
    """What was found rather than declared."""

    first_prefill_arg: str
    """A key of `FIRST_PREFILL_ARGS`."""
    device_sampling: tuple[str, ...]
    """Stages that sample on the device, unused: Tidemill samples on logits."""

    @property
    def host_embedding(self) -> bool:
        """Whether prefill wants embeddings, which the child then looks up."""
        return self.first_prefill_arg == "hidden_states"


def identity(description: Description, variant: str) -> ContractIdentity:
    return ContractIdentity(
        family=description.family,
        variant=variant,
        schema_version=description.schema_version,
        fingerprint=description.fingerprint,
    )


def check_description(description: Description, contract: ContractIdentity) -> Features:
    """Everything that can be told before a model is known. Raises `ContractMismatch`."""
    if description.schema_version != CONTRACT_SCHEMA_VERSION:
        raise ContractMismatch(
            contract,
            "schema_version",
            found=description.schema_version,
            expected=CONTRACT_SCHEMA_VERSION,
            hint="Use a Tidemill release that speaks this pypto-lib's schema.",
        )
    _check_limits(description, contract)
    stages = {stage.key: stage for stage in description.stages}
    executed = {phase: _stage_of(phase, description, stages, contract) for phase in PHASES}
    for stage in description.stages:
        _check_stage(stage, stage in executed.values(), description, contract)
    for phase, stage in executed.items():
        _check_step_args(phase, stage, contract)
    return Features(
        first_prefill_arg=_first_prefill_arg(executed["prefill"], contract),
        device_sampling=tuple(stage.key for stage in description.stages if "sampl" in stage.key)
        + tuple(stage.key for stage in description.stages if "topk" in stage.key),
    )


def _check_limits(description: Description, contract: ContractIdentity) -> None:
    limits = description.limits
    for name in LIMITS:
        value = limits.get(name)
        if not isinstance(value, int) or value < 1:
            raise ContractMismatch(
                contract, f"limits[{name}]", found=value, expected="a positive integer"
            )
    vocab, real, multiple = (
        int(limits[name]) for name in ("vocab", "real_vocab", "vocab_pad_multiple")
    )
    if vocab != -(-real // multiple) * multiple:
        raise ContractMismatch(
            contract,
            "limits[vocab]",
            found=vocab,
            expected=f"real_vocab {real} rounded up to a multiple of {multiple}",
        )


def _stage_of(
    phase: Phase,
    description: Description,
    stages: dict[str, StageDescription],
    contract: ContractIdentity,
) -> StageDescription:
    names = description.execution.get(phase, ())
    if len(names) != 1 or names[0] not in stages:
        raise ContractMismatch(
            contract,
            f"execution[{phase}]",
            found=list(names),
            expected=f"exactly one of the stages {sorted(stages)}",
        )
    return stages[names[0]]


def _check_stage(
    stage: StageDescription, executed: bool, description: Description, contract: ContractIdentity
) -> None:
    if stage.name != stage.key:
        raise ContractMismatch(
            contract, f"kernels[{stage.key}].name", found=stage.name, expected=stage.key
        )
    declared = [arg.name for arg in stage.args]
    for arg in stage.args:
        if arg.dtype not in DTYPES or arg.direction not in ("in", "out", "inout"):
            raise ContractMismatch(
                contract,
                f"{stage.public_name}.{arg.name}",
                found=f"{arg.dtype}, {arg.direction}",
                expected=f"one of {', '.join(DTYPES)}; in, out or inout",
            )
    if stage.kernel is None:
        if not executed:
            return
        raise ContractMismatch(
            contract,
            f"kernels[{stage.key}]",
            found=f"functions {sorted(description.functions)}",
            expected=f"a function {stage.key}_fwd or {stage.key}",
            hint="load_kernels() and the contract come from different versions.",
        )
    takers = [(f"kernel {stage.kernel}", stage.kernel_params)]
    if stage.host_params is not None:
        takers.append(("host wrapper", stage.host_params))
    for taker, params in takers:
        if len(params) != len(declared):
            raise ContractMismatch(
                contract,
                f"stage {stage.key} ({stage.public_name})",
                found=f"{len(declared)} declared arguments, but its {taker} takes {len(params)}",
                expected="as many",
                hint=f"{difference(declared, params)}. The contract and the kernels of this"
                " checkout come from different versions: use a commit where they agree.",
            )


def difference(declared: Sequence[str], params: Sequence[str]) -> str:
    """Which names only one side has, for a person."""
    said = [
        f"only {whose} has {', '.join(name for name in ours if name not in theirs)}"
        for whose, ours, theirs in (
            ("the kernel", params, declared),
            ("the contract", declared, params),
        )
        if set(ours) - set(theirs)
    ]
    text = "; ".join(said) or "the names are the same"
    return text[0].upper() + text[1:]


def _check_step_args(phase: Phase, stage: StageDescription, contract: ContractIdentity) -> None:
    declared = {arg.name: arg for arg in stage.args}
    missing = [name for name in (*STEP_ARGS[phase], *CACHE) if name not in declared]
    if missing:
        raise ContractMismatch(
            contract,
            f"{stage.public_name} arguments",
            found=f"no {', '.join(missing)}",
            expected="the arguments that a step is written into",
        )
    for name, (dtype, direction) in CACHE.items():
        arg = declared[name]
        if (arg.dtype, arg.direction) != (dtype, direction):
            raise ContractMismatch(
                contract,
                f"{stage.public_name}.{name}",
                found=f"{arg.dtype}, {arg.direction}",
                expected=f"{dtype}, {direction}",
            )
    unknown = [name for name in stage.buffers if name not in BUFFERS]
    if unknown:
        raise ContractMismatch(
            contract,
            f"{stage.public_name} runtime arguments",
            found=f"a builder that asks for {', '.join(unknown)}",
            expected=f"only {', '.join(sorted(BUFFERS))}",
            hint="This pypto-lib is newer than the adapter.",
        )


def _first_prefill_arg(stage: StageDescription, contract: ContractIdentity) -> str:
    first = stage.args[0]
    if FIRST_PREFILL_ARGS.get(first.name) != first.dtype:
        raise ContractMismatch(
            contract,
            f"{stage.public_name} argument 0",
            found=f"{first.name} ({first.dtype})",
            expected=" or ".join(f"{name} ({dtype})" for name, dtype in FIRST_PREFILL_ARGS.items()),
        )
    # Equal counts can hide this one: tokens read as embeddings give fluent nonsense.
    if stage.kernel_params[0] in FIRST_PREFILL_ARGS and stage.kernel_params[0] != first.name:
        raise ContractMismatch(
            contract,
            f"{stage.public_name} argument 0",
            found=f"{first.name} declared, {stage.kernel_params[0]} in the kernel",
            expected="the same",
        )
    return first.name
