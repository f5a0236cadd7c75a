"""The contract ``qwen3/pypto-…``: a pypto-lib checkout behind Tidemill's own contract.

The stages take the logical inputs; the checkout's argument lists, weights and KV pools stay in the
child process.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tidemill_contracts.models.args import TensorArgSpec
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import (
    CompileArgsBuilder,
    CompiledStage,
    KernelSpec,
    KVCache,
    ModelContract,
    ModelId,
    Phase,
    RuntimeArgsBuilder,
    RuntimeConfig,
    StageInputs,
    StaticArgs,
)
from tidemill_contracts.models.errors import ModelError
from tidemill_contracts.models.pypto.backend import PyptoBackend
from tidemill_contracts.models.pypto.checks import PHASES
from tidemill_contracts.models.pypto.messages import Match, Matched, ModelView
from tidemill_contracts.models.pypto.options import PyptoOptions
from tidemill_contracts.models.pypto.provenance import read_provenance
from tidemill_contracts.models.pypto.session import RequestFailed, Session

logger = logging.getLogger("tidemill.contract")

# Shape symbols as in the in-tree contract: T packed tokens, B rows, PAGES columns of the block
# table, V padded vocabulary.
PREFILL_ARGS = (
    TensorArgSpec("input_ids", "int32", ("T",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
    TensorArgSpec("chunk_lens", "int32", ("B",)),
    TensorArgSpec("chunk_offsets", "int32", ("B",)),
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("T",)),
    TensorArgSpec("logits", "fp32", ("B", "V"), "out"),
)
DECODE_ARGS = (
    TensorArgSpec("input_ids", "int32", ("B",)),
    TensorArgSpec("seq_lens", "int32", ("B",)),
    TensorArgSpec("block_table", "int32", ("B", "PAGES")),
    TensorArgSpec("slot_mapping", "int32", ("B",)),
    TensorArgSpec("logits", "fp32", ("B", "V"), "out"),
)


@dataclass(frozen=True, slots=True)
class RemoteHostFn:
    """`HostJitFn` of a phase: compiles in the child, runs there."""

    backend: PyptoBackend
    phase: Phase

    def compile(self, *args: Tensor, config: RuntimeConfig) -> CompiledStage:
        self.backend.compile(self.phase)
        return self.backend.steps.stage(self.phase)


def make_contract(backend: PyptoBackend) -> ModelContract:
    """Our contract over a checkout that passed its checks."""
    description = backend.description
    stages = {stage.key: stage for stage in description.stages}
    build: dict[Phase, RuntimeArgsBuilder] = {"prefill": _prefill_args, "decode": _decode_args}
    specs: dict[Phase, tuple[TensorArgSpec, ...]] = {"prefill": PREFILL_ARGS, "decode": DECODE_ARGS}

    def compile_args(phase: Phase) -> CompileArgsBuilder:
        def builder(config: ModelConfig, runtime: RuntimeConfig) -> tuple[Tensor, ...]:
            sizes = {
                "T": runtime.max_step_tokens,
                "B": runtime.max_batch_size,
                "PAGES": -(-runtime.max_seq_len // runtime.page_size),
                "V": backend.logits_width(config),
            }
            return tuple(
                torch.empty(
                    tuple(sizes[symbol] for symbol in map(str, spec.shape)),
                    dtype=spec.torch_dtype(runtime.dtype),
                    device="meta",
                )
                for spec in specs[phase]
            )

        return builder

    return ModelContract(
        model=ModelId(
            description.family, backend.variant, size=description.size, quant=description.quant
        ),
        capabilities=frozenset(description.capabilities),
        # pypto-lib's validator wants a page for each row of a window.
        limits={**backend.limits, "min_kv_pages": backend.limits["batch"]},
        execution={phase: (phase,) for phase in PHASES},
        kernels={
            phase: KernelSpec(
                name=phase,
                public_name=stages[description.execution[phase][0]].public_name,
                args=specs[phase],
                host_jit_fn=RemoteHostFn(backend, phase),
                compile_args_builder=compile_args(phase),
                runtime_args_builder=build[phase],
            )
            for phase in PHASES
        },
        hooks=backend,
        schema_version=description.schema_version,
    )


def _prefill_args(inputs: StageInputs, static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    if inputs.chunk_lens is None or inputs.chunk_offsets is None:
        raise ModelError("prefill needs chunk_lens and chunk_offsets.")
    return (
        inputs.input_ids,
        inputs.seq_lens,
        inputs.chunk_lens,
        inputs.chunk_offsets,
        inputs.block_table,
        inputs.slot_mapping,
        inputs.logits,
    )


def _decode_args(inputs: StageInputs, static: StaticArgs, cache: KVCache) -> tuple[Tensor, ...]:
    return (
        inputs.input_ids,
        inputs.seq_lens,
        inputs.block_table,
        inputs.slot_mapping,
        inputs.logits,
    )


@cache
def session_of(options: PyptoOptions) -> Session:
    """The one session of this process with a checkout."""
    return Session(options)


@cache
def contract_of(options: PyptoOptions) -> ModelContract:
    """Starts the child where none runs, loads the checkout and checks it.

    Raises `ContractMismatch` where contract and kernels of the checkout disagree, `ModelError`
    where it cannot be imported, `BackendError` where the child died.
    """
    session = session_of(options)
    try:
        backend = PyptoBackend(session)
        contract = make_contract(backend)
    except BaseException:
        session.release()
        raise
    log_contract(contract, backend)
    return contract


def log_contract(contract: ModelContract, backend: PyptoBackend) -> None:
    provenance = backend.provenance
    logger.info(
        "contract %s from pypto-lib %s, its fingerprint %s; prefill takes %s; options %s",
        contract.model,
        provenance,
        backend.description.fingerprint,
        backend.features.first_prefill_arg,
        backend.session.options.shown(),
    )
    if provenance.commit is not None and not provenance.on_branch:
        logger.warning(
            "the checkout's commit %s is on no branch: a fresh clone will not have it",
            provenance.commit,
        )
    if provenance.dirty:
        logger.warning("the checkout %s has changes that its commit does not say", provenance.root)


def matches(session: Session, config: ModelConfig) -> bool:
    """Whether the checkout's own matcher picks the configured contract for this model.

    Ends the child again where it does not. Raises `ModelError` where the checkout cannot be asked:
    whoever names a checkout wants it, so it is never passed over silently.
    """
    try:
        found = session.ask(Match(ModelView.of(config)), Matched, "match")
    except RequestFailed as error:
        failed = error.failed
        raise ModelError(
            f"{read_provenance(session.options.lib_root)} cannot be loaded:"
            f" {failed.error}: {failed.message}"
        ) from error
    matched = (found.family, found.variant) == (session.options.family, session.options.variant)
    if not matched:
        session.release()
    return matched
