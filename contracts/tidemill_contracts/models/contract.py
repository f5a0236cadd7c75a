"""The model serving contract: the boundary between serving and kernels.

A contract says which stages a model has, what each takes and in which order, how its KV cache is
laid out and how its weights are prepared. The worker plans steps in logical terms (`StageInputs`)
and never learns a kernel's argument order, a weight's layout or a kernel's file name. A contract
in turn knows no scheduler and no Redis. The words are those of pypto-lib's external contract.

Semantics that every backend honours:

* slot = page_id · page_size + position mod page_size; a negative slot means "do not write".
* Unused block-table entries are −1 and are never read.
* prefill: tokens are packed; ``seq_lens[b]`` is the row's length *after* this chunk,
  ``chunk_offsets[b]`` its first packed token; logits are those of each chunk's last token.
  A chunk has at least one token.
* decode: ``seq_lens[b]`` counts the current token.
* score, which a contract need not have: as prefill, but the logits are those of the packed tokens
  that ``logit_rows`` names, in its order. A contract that has it says so by the capability
  ``prompt_logits``.
* K is stored after the q/k norm and RoPE; pages start zeroed.
* The logits' width is the padded vocabulary; entries past the real one are finite garbage, so a
  sampler slices to the real vocabulary first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.errors import ContractIdentity, ContractMismatch

CONTRACT_SCHEMA_VERSION = "1"

Phase = Literal["prefill", "decode", "score"]

Kernels = Literal["auto", "torch"]
"""The fastest kernels that the machine runs, or plain torch, which runs everywhere."""

Quantization = Literal["int8"]
"""What the matrices of a checkpoint are rounded to while it loads."""

OPTIONAL_PHASES: Mapping[str, Phase] = MappingProxyType({"prompt_logits": "score"})
"""Phases that a contract need not have, by the capability that says that it has one."""

DETERMINISTIC = "deterministic"
"""The capability of a contract that honours ``RuntimeConfig.deterministic``."""


@dataclass(frozen=True, slots=True)
class ModelId:
    """Which model a contract serves, e.g. ``("qwen3", "dense")``."""

    family: str
    variant: str
    size: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        quant = None if self.variant.endswith(f"-{self.quant}") else self.quant
        return "/".join(part for part in (self.family, self.variant, self.size, quant) if part)


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """What the worker has decided about this run; builders and validators read it."""

    device: torch.device
    dtype: torch.dtype
    """Of weights, less those that the contract quantises, and of the KV cache."""
    max_batch_size: int
    """Most rows in one step."""
    max_seq_len: int
    """Longest row, prompt and output together, in tokens."""
    max_step_tokens: int
    """Most prompt tokens in one prefill call."""
    page_size: int
    """Tokens per KV page."""
    total_kv_pages: int
    kernels: Kernels = "auto"
    max_logit_rows: int = 64
    """Most tokens whose logits one score call gives: each takes a row of the whole vocabulary."""
    deterministic: bool = False
    """A row's logits are the same to the bit whatever is computed with it; only for contracts
    with the capability `DETERMINISTIC`."""


@dataclass(frozen=True, slots=True)
class StageInputs:
    """The logical inputs of one call of a stage, B rows and T packed tokens.

    In decode T == B: row b's token is ``input_ids[b]``, and the chunk fields are ``None``.
    """

    input_ids: Tensor
    """int32 [T]."""
    seq_lens: Tensor
    """int32 [B], the length after this step, the current tokens included."""
    block_table: Tensor
    """int32 [B, pages]; −1 where unused."""
    slot_mapping: Tensor
    """int32 [T]; negative where K and V must not be written."""
    logits: Tensor
    """float32 [B, padded vocabulary], of R rows in score; written by the stage."""
    chunk_lens: Tensor | None = None
    """int32 [B], prefill and score."""
    chunk_offsets: Tensor | None = None
    """int32 [B], prefill and score."""
    logit_rows: Tensor | None = None
    """int32 [R], score only: the packed tokens whose logits are asked for."""

    def named(self) -> Mapping[str, Tensor | None]:
        """The tensors by name."""
        return {field: getattr(self, field) for field in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True)
class KVCache:
    """The K and V pools of one worker, laid out as the contract's kernels like."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """How large a page is and how to make P of them; the worker deals in page ids only."""

    page_size: int
    bytes_per_page: int
    """Of K and V together, over all layers."""
    allocate: Callable[[int], KVCache]
    """``allocate(pages)`` returns zeroed pools for that many pages."""


class StaticArgs(Protocol):
    """Prepared weights and tables; only the contract that made them looks inside."""

    @property
    def nbytes(self) -> int:
        """Bytes of distinct storage."""

    def named(self) -> Mapping[str, Tensor]:
        """The tensors by the names of the arguments that they are passed as."""


class CompiledStage(Protocol):
    """Runs one stage: takes the ABI tuple, writes into its out and inout tensors.

    Prefill and score may have a true attribute ``decodes_along``: decode rows cost no more as
    chunks of one token beside others than in a decode step, and any chunk gives the same bits. Then
    a step that has both is one call, which reads the weights once.
    """

    def __call__(self, *args: Tensor) -> None: ...


class HostJitFn(Protocol):
    """A stage's kernel before compilation."""

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage: ...


DYNAMIC_SYMBOLS = frozenset({"T", "B", "PAGES"})
"""Packed tokens, rows, columns of the block table. In score R, the rows of logits, is one too."""

CompileArgsBuilder = Callable[[ModelConfig, RuntimeConfig], tuple[Tensor, ...]]
RuntimeArgsBuilder = Callable[[StageInputs, StaticArgs, KVCache], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One stage: its arguments in order, its kernel, and who builds the argument tuples."""

    name: str
    public_name: str
    """Unique over all models: what compiled artefacts and log lines are filed under."""
    args: tuple[TensorArgSpec, ...]
    host_jit_fn: HostJitFn
    compile_args_builder: CompileArgsBuilder
    runtime_args_builder: RuntimeArgsBuilder
    dynamic_symbols: frozenset[str] = DYNAMIC_SYMBOLS
    """The shape symbols that differ from call to call."""


@dataclass(frozen=True, slots=True)
class LoadedKernelModules:
    """Kernel functions by name and the constants that they were built with."""

    functions: Mapping[str, Callable[..., None]]
    """By the name of the stage that runs them; their parameters are the stage's arguments."""
    constants: Mapping[str, int]


class WeightSource(Protocol):
    """A checkpoint: each tensor is taken once, in Hugging Face's names and [out, in] layout."""

    def names(self) -> Sequence[str]:
        """The tensors that have not been taken yet."""

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor, checked against `shape`. Raises `CheckpointError`."""

    def finish(self) -> None:
        """Raises `CheckpointError` where tensors are left over."""


class TensorExporter(Protocol):
    """Moves one finished tensor to where the kernels read it; called once per final tensor."""

    def __call__(self, tensor: Tensor, /) -> Tensor: ...


class ModelHooks(Protocol):
    """The part of a contract that is code rather than description.

    Hooks may also have a method ``sampling_kernels(runtime)``: see `SamplingKernels`.
    """

    def load_kernels(self) -> LoadedKernelModules:
        """Imports the kernels and the constants that they were built with."""

    def bind(self, loaded: LoadedKernelModules) -> None:
        """Makes the loaded kernels the ones that the stages' host functions call."""

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        """Raises `ContractMismatch` where kernels, model and runtime disagree."""

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec: ...

    def logits_width(self, config: ModelConfig) -> int:
        """The padded vocabulary: the width of the logits that the stages write."""

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        """Bytes that the prepared weights will take, told from the configuration alone."""

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        """Takes every tensor it needs from `source`, lays it out and exports it.

        Raises `CheckpointError` where tensors are missing, misshapen or left over.
        """


@dataclass(frozen=True, eq=False)
class ModelContract:
    """Everything that the worker may know about a model's kernels. Immutable; compared and
    hashed by its fingerprint."""

    model: ModelId
    capabilities: frozenset[str]
    limits: Mapping[str, int]
    execution: Mapping[Phase, tuple[str, ...]]
    """The stages that each phase runs, in order."""
    kernels: Mapping[str, KernelSpec]
    hooks: ModelHooks
    schema_version: str = CONTRACT_SCHEMA_VERSION

    def __post_init__(self) -> None:
        for name in ("limits", "execution", "kernels"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "_fingerprint", self._compute_fingerprint())

    def abi_fingerprint(self) -> str:
        """sha256 over the public ABI: what changes it changes what a worker may assume."""
        fingerprint: str = self._fingerprint  # type: ignore[attr-defined]
        return fingerprint

    def abi(self) -> dict[str, object]:
        """The public ABI as plain values: everything that the fingerprint covers."""
        return {
            "schema_version": self.schema_version,
            "model": {
                "family": self.model.family,
                "variant": self.model.variant,
                "size": self.model.size,
                "quant": self.model.quant,
            },
            "capabilities": sorted(self.capabilities),
            "limits": dict(self.limits),
            "execution": {phase: list(stages) for phase, stages in self.execution.items()},
            "kernels": {
                name: {
                    "public_name": kernel.public_name,
                    "args": [
                        {
                            "name": arg.name,
                            "dtype": arg.dtype,
                            "shape": list(arg.shape),
                            "direction": arg.direction,
                        }
                        for arg in kernel.args
                    ],
                    "dynamic_symbols": sorted(kernel.dynamic_symbols),
                }
                for name, kernel in self.kernels.items()
            },
        }

    def _compute_fingerprint(self) -> str:
        canonical = json.dumps(self.abi(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @property
    def identity(self) -> ContractIdentity:
        """For errors and logs: which contract this is."""
        return ContractIdentity(
            family=self.model.family,
            variant=self.model.variant,
            schema_version=self.schema_version,
            fingerprint=self.abi_fingerprint(),
        )

    def mismatch(
        self, field: str, *, found: object, expected: object, hint: str = ""
    ) -> ContractMismatch:
        """The error that says that something does not fit this contract."""
        return ContractMismatch(self.identity, field, found=found, expected=expected, hint=hint)

    def stage(self, phase: Phase) -> KernelSpec:
        """The one stage that runs `phase`."""
        (name,) = self.execution[phase]
        return self.kernels[name]

    def __hash__(self) -> int:
        return hash(self.abi_fingerprint())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ModelContract) and self.abi_fingerprint() == other.abi_fingerprint()
        )


@dataclass(frozen=True, slots=True)
class ContractRegistration:
    """How the registry finds a contract."""

    family: str
    variant: str
    model_types: frozenset[str]
    """Values of ``model_type`` that this contract may serve; `matcher` decides."""
    factory: Callable[[], ModelContract] | None
    """``None`` for a contract that is planned only."""
    matcher: Callable[[ModelConfig], bool] = lambda config: True
    quantization: Quantization | None = None
    """The one that has to be asked for to get this contract."""

    @property
    def implemented(self) -> bool:
        return self.factory is not None
