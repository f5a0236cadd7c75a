"""What the two processes say to each other: msgspec structs, one tagged union each way.

Tensors never travel in a message: the step's inputs and its logits lie in shared memory (`arena`),
weights and KV cache belong to the child alone.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.pypto.arena import ArenaSize
from tidemill_contracts.models.pypto.options import PyptoOptions


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """The model's configuration under the names that pypto-lib's hooks read."""

    model_id: str
    architecture: str | None
    architectures: tuple[str, ...]
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    torch_dtype: str

    @classmethod
    def of(cls, config: ModelConfig) -> ModelView:
        names = (name for name in cls.__struct_fields__ if name != "architecture")
        return cls(
            architecture=next(iter(config.architectures), None),
            **{name: getattr(config, name) for name in names},
        )


class RuntimeView(msgspec.Struct, frozen=True, kw_only=True):
    """The run's configuration under the names that pypto-lib's hooks read.

    Batch and length are the kernels' own, not the worker's: every dispatch has the full window and
    the full block table, so kernels of fixed and of dynamic batch are served alike.
    """

    max_batch_size: int
    """Rows of one window."""
    max_seq_len: int
    """Tokens; also the length of the RoPE tables."""
    page_size: int
    vocab_pad_multiple: int
    total_kv_pages: int


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Load the contract ``family/variant`` and its kernels, and say what they are."""

    family: str
    variant: str


class Match(msgspec.Struct, frozen=True, tag=True):
    """Which of the checkout's contracts serves this model?"""

    model: ModelView


class Validate(msgspec.Struct, frozen=True, tag=True):
    """Run the checkout's own checks, bind its kernels, map the arena. Starts a model afresh."""

    model: ModelView
    runtime: RuntimeView
    arena: ArenaSize
    options: PyptoOptions


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Compile the stage that runs a phase."""

    phase: str
    artefacts: str
    """Where below the kernel cache its output goes."""


class PrepareWeights(msgspec.Struct, frozen=True, tag=True):
    model_dir: str


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    """Make zeroed KV pools, and check the argument builders against the declared arguments."""

    pages: int
    """That the worker may use; the child adds one."""


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run one stage on what lies in the arena; its logits are there when `Done` comes back."""

    phase: str
    rows: int
    tokens: int
    """Packed tokens, 0 in decode."""
    pages: int
    """Columns of the block table."""


class Close(msgspec.Struct, frozen=True, tag=True):
    """Release the device and exit."""


Request: TypeAlias = (
    Describe | Match | Validate | Compile | PrepareWeights | AllocateCache | Run | Close
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first thing that a child says."""

    python: str
    torch: str


class ArgDescription(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[str | int, ...]
    direction: str


class StageDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One stage as the checkout declares it, and the parameters that its code really has."""

    key: str
    name: str
    public_name: str
    args: tuple[ArgDescription, ...]
    kernel: str | None
    """The loaded function that runs the stage; ``None`` where no name fits."""
    kernel_params: tuple[str, ...]
    host_params: tuple[str, ...] | None
    """Of the host wrapper; ``None`` where it has no signature."""
    buffers: tuple[str, ...]
    """Keyword-only parameters of the runtime argument builder."""


class Description(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A contract of the checkout."""

    contract_type: str
    """``ModelContract``, or ``ModelServingContract`` as it was called first."""
    registry_file: str
    schema_version: str
    family: str
    variant: str
    size: str | None
    quant: str | None
    capabilities: tuple[str, ...]
    limits: dict[str, int | str]
    execution: dict[str, tuple[str, ...]]
    stages: tuple[StageDescription, ...]
    functions: tuple[str, ...]
    constants: dict[str, int]
    fingerprint: str
    pypto: str | None
    """Version of the PyPTO compiler that the child imports."""


class Matched(msgspec.Struct, frozen=True, tag=True):
    """Family and variant of the contract that matches, ``None`` where none does."""

    family: str | None
    variant: str | None


class Prepared(msgspec.Struct, frozen=True, tag=True):
    nbytes: int
    """Of the prepared weights and tables."""


class Done(msgspec.Struct, frozen=True, tag=True):
    pass


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The request raised; the child goes on."""

    error: str
    """The exception's type."""
    message: str
    checkpoint: bool = False
    """It was a `CheckpointError`: the message stands by itself."""
    field: str | None = None
    """With `found`, `expected` and `hint`, where it was a `ContractMismatch`."""
    found: str = ""
    expected: str = ""
    hint: str = ""


Answer: TypeAlias = Hello | Description | Matched | Prepared | Done | Failed
