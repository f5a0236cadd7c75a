"""`ModelHooks` over a child process: everything but the steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CacheSpec,
    KVCache,
    LoadedKernelModules,
    Phase,
    RuntimeConfig,
    StaticArgs,
    TensorExporter,
    WeightSource,
)
from tidemill_contracts.models.errors import ContractIdentity, ContractMismatch, ModelError
from tidemill_contracts.models.pypto.arena import ArenaSize, map_arena
from tidemill_contracts.models.pypto.checks import Features, check_description, identity
from tidemill_contracts.models.pypto.messages import (
    AllocateCache,
    Compile,
    Describe,
    Description,
    Done,
    ModelView,
    Prepared,
    PrepareWeights,
    RuntimeView,
    Validate,
)
from tidemill_contracts.models.pypto.provenance import read_provenance
from tidemill_contracts.models.pypto.session import RequestFailed, Session
from tidemill_contracts.models.pypto.steps import Steps

RMS_NORM_EPS = 1e-6
"""Compiled into pypto-lib's Qwen3 kernels."""


@dataclass(frozen=True, slots=True)
class RemoteWeights:
    """`StaticArgs` of weights that live in the child."""

    nbytes: int

    def named(self) -> Mapping[str, Tensor]:
        return {}


class PyptoBackend:
    """`ModelHooks` over a session; also what the stages call."""

    def __init__(self, session: Session) -> None:
        self.session = session
        options = session.options
        self.provenance = read_provenance(options.lib_root)
        self.variant = f"pypto-{options.variant}"
        request = Describe(options.family, options.variant)
        try:
            self.description = session.ask(request, Description, "describe")
        except RequestFailed as error:
            raise ModelError(
                f"{self.provenance} cannot be loaded: {error.failed.error}: {error.failed.message}"
            ) from error
        self.identity: ContractIdentity = identity(self.description, self.variant)
        self.features: Features = check_description(self.description, self.identity)
        limits = self.description.limits
        self.limits = {name: value for name, value in limits.items() if isinstance(value, int)}
        self.steps = Steps(session, self.identity, self.limits)

    def details(self) -> dict[str, object]:
        """What `contracts show` prints of the checkout; plain values only."""
        description: dict[str, object] = msgspec.to_builtins(self.description)
        return {
            "checkout": {**asdict(self.provenance), "on_branch": self.provenance.on_branch},
            "found": {
                "first_prefill_arg": self.features.first_prefill_arg,
                "embedding": "host" if self.features.host_embedding else "device",
                "device_sampling": list(self.features.device_sampling),
            },
            "options": self.session.options.shown(),
            "pypto_lib": description,
        }

    def load_kernels(self) -> LoadedKernelModules:
        """Functions that run a step in the child; the kernels themselves never come here."""
        return LoadedKernelModules(
            functions={"prefill": self.steps.prefill, "decode": self.steps.decode},
            constants=dict(self.description.constants),
        )

    def bind(self, loaded: LoadedKernelModules) -> None:
        """Nothing: the child bound its kernels when it validated them."""

    def validate_kernels(
        self, loaded: LoadedKernelModules, config: ModelConfig, runtime: RuntimeConfig
    ) -> None:
        """Checks what pypto-lib's validator leaves out, then runs that validator in the child.

        Raises `ContractMismatch` and `BackendError`.
        """
        self._check_model(config)
        self._check_runtime(runtime)
        batch, longest = self.limits["batch"], self.limits["max_seq"]
        size = ArenaSize(
            rows=-(-runtime.max_batch_size // batch) * batch,
            tokens=runtime.max_step_tokens,
            pages=-(-longest // runtime.page_size),
            vocab=self.limits["vocab"],
        )
        request = Validate(
            model=ModelView.of(config),
            runtime=RuntimeView(
                max_batch_size=batch,
                max_seq_len=longest,
                page_size=runtime.page_size,
                vocab_pad_multiple=self.limits["vocab_pad_multiple"],
                total_kv_pages=runtime.total_kv_pages,
            ),
            arena=size,
            options=self.session.options,
        )
        # The next child must be the same checkout before it is handed a model.
        ask = Describe(self.session.options.family, self.session.options.variant)
        if self.session.begin(ask, Description, "describe") != self.description:
            raise ModelError(
                f"The checkout {self.session.options.lib_root} has changed since this process"
                " loaded it. Restart the worker."
            )
        with self._as_mismatch("validate_kernels", "kernels that fit the model and the run"):
            self.session.set_up(request, Done, "validate_kernels")
        self.steps.begin(map_arena(self.session.arena_fd, size))

    def compile(self, phase: Phase) -> None:
        """Raises `ContractMismatch` where the stage does not compile."""
        (stage,) = self.description.execution[phase]
        public_name = next(s.public_name for s in self.description.stages if s.key == stage)
        # By what the kernels are, not by their name alone: an old artefact must not be taken.
        commit = (self.provenance.commit or "unknown")[:12]
        dirty = "-dirty" if self.provenance.dirty else ""
        folder = f"{self.description.fingerprint[:12]}-{commit}{dirty}"
        with self._as_mismatch(f"{public_name} compile", "a stage that compiles"):
            self.session.set_up(
                Compile(phase, f"{folder}/{public_name}"), Done, f"compile of {public_name}"
            )

    def cache_spec(self, config: ModelConfig, runtime: RuntimeConfig) -> CacheSpec:
        elements = (
            config.num_hidden_layers
            * runtime.page_size
            * config.num_key_value_heads
            * config.head_dim
        )

        def allocate(pages: int) -> KVCache:
            """The pools are the child's; what comes back holds no memory."""
            with self._as_mismatch("KV cache", f"room for {pages} pages"):
                self.session.set_up(AllocateCache(pages), Done, "allocation of the KV cache")
            self.steps.use_cache(pages)
            shape = (pages * elements // config.head_dim, config.head_dim)
            k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(2))
            return KVCache(k=k, v=v)

        return CacheSpec(
            page_size=runtime.page_size,
            bytes_per_page=2 * elements * torch.bfloat16.itemsize,
            allocate=allocate,
        )

    def logits_width(self, config: ModelConfig) -> int:
        multiple = self.limits["vocab_pad_multiple"]
        return -(-config.vocab_size // multiple) * multiple

    def weight_bytes(self, config: ModelConfig, runtime: RuntimeConfig) -> int:
        hidden, head, inner = config.hidden_size, config.head_dim, config.intermediate_size
        heads = config.num_attention_heads + config.num_key_value_heads
        matrices = config.num_hidden_layers * hidden * (2 * heads * head + 3 * inner)
        norms = config.num_hidden_layers * 2 * (hidden + head) + hidden
        # Head and embedding are padded, and two even where the model ties them.
        vocabulary = 2 * self.limits["vocab"] * hidden
        tables = 2 * self.limits["max_seq"] * head
        return 2 * (matrices + vocabulary) + 4 * (norms + tables)

    def prepare_weights(
        self,
        source: WeightSource,
        config: ModelConfig,
        runtime: RuntimeConfig,
        exporter: TensorExporter,
    ) -> StaticArgs:
        """The child reads the checkpoint itself: `source` only says where, and gives nothing.

        Raises `CheckpointError`.
        """
        directory = _directory(source)
        with self._as_mismatch("prepare_weights", "weights that the checkout can lay out"):
            prepared = self.session.set_up(
                PrepareWeights(str(directory.resolve())), Prepared, "prepare_weights"
            )
        return RemoteWeights(prepared.nbytes)

    @contextmanager
    def _as_mismatch(self, what: str, expected: str) -> Iterator[None]:
        """Turns what the child raised while a model is set up into a mismatch of this contract."""
        try:
            yield
        except RequestFailed as error:
            failed = error.failed
            if failed.field is None:
                raise ContractMismatch(
                    self.identity,
                    what,
                    found=f"{failed.error}: {failed.message}",
                    expected=expected,
                ) from error
            raise ContractMismatch(
                self.identity,
                failed.field,
                found=failed.found,
                expected=failed.expected,
                hint=failed.hint,
            ) from error

    def _check_model(self, config: ModelConfig) -> None:
        """What the checkout's matcher does not look at and its kernels would compute wrongly."""
        for name, found, expected in (
            ("quantization_config", config.quantization, None),
            ("rope_type", config.rope_type, "default"),
            ("rms_norm_eps", config.rms_norm_eps, RMS_NORM_EPS),
            ("attention_bias", config.attention_bias, False),
            ("hidden_act", config.hidden_act, "silu"),
            ("sliding_window", config.sliding_window, None),
            ("num_experts", config.num_experts, 0),
        ):
            if found != expected:
                raise ContractMismatch(
                    self.identity,
                    name,
                    found=repr(found),
                    expected=repr(expected),
                    hint=f"pypto-lib's kernels cannot serve {config.describe()}.",
                )

    def _check_runtime(self, runtime: RuntimeConfig) -> None:
        if runtime.dtype is not torch.bfloat16:
            raise ContractMismatch(
                self.identity,
                "dtype",
                found=runtime.dtype,
                expected=torch.bfloat16,
                hint="Start the worker with --dtype bfloat16.",
            )
        if runtime.device.type != "cpu":
            raise ContractMismatch(
                self.identity,
                "device",
                found=runtime.device,
                expected="cpu",
                hint="The step's inputs and logits lie in host memory; TIDEMILL_PYPTO_DEVICE_ID"
                " picks the NPU.",
            )


def _directory(source: WeightSource) -> Path:
    directory = getattr(source, "directory", None)
    if not isinstance(directory, Path):
        raise ModelError(
            f"The PyPTO backend reads a checkpoint from its directory; {type(source).__name__}"
            " does not say which."
        )
    return directory
