"""Child side: one model on one device, from the checkout's hooks to windows of kernel calls.

Logical rows come through the arena in any number; the kernels take windows of `batch` rows whose
shapes never change, apart from the packed tokens of prefill. A window that is not full is padded
as pypto-serving pads it: in decode by row 0 again, so that the extra write is the same write; in
prefill by rows of no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tidemill_contracts.models.args import ArgChecker, TensorArgSpec
from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.errors import ContractIdentity, ModelError
from tidemill_contracts.models.pypto.arena import map_arena, shared_zeros
from tidemill_contracts.models.pypto.checkout import Checkout, LibStage, keyword_parameters
from tidemill_contracts.models.pypto.device import (
    Device,
    HostDevice,
    WorkerDevice,
    run_config,
    runs_on_worker,
)
from tidemill_contracts.models.pypto.messages import Compile, Run, Validate
from tidemill_contracts.models.pypto.weights import read_model, rope_tables

DYNAMIC_SYMBOLS = frozenset({"PREFILL_TOKENS", "KV_CACHE_ROWS"})
"""Sizes that differ between compilation and a call; all others are the window's."""

WEIGHTS = {
    "input_rms_weight": "decode_input_rms_weight",
    "wq": "decode_wq",
    "wk": "decode_wk",
    "wv": "decode_wv",
    "q_norm_weight": "decode_q_norm_weight",
    "k_norm_weight": "decode_k_norm_weight",
    "wo": "decode_wo",
    "post_rms_weight": "decode_post_rms_weight",
    "w_gate": "decode_w_gate",
    "w_up": "decode_w_up",
    "w_down": "decode_w_down",
}
"""Stage arguments by the names that ``prepare_weights`` gives the stacked weights."""


@dataclass(frozen=True, slots=True)
class Window:
    """The host buffers of one kernel call, shared with the device worker; reused for every call."""

    token_ids: Tensor
    """int32 [tokens], prefill."""
    hidden: Tensor
    """bf16 [tokens, hidden]; of no tokens where prefill takes ids."""
    slot_mapping: Tensor
    """int32 [tokens]."""
    seq_lens: Tensor
    """int32 [batch]."""
    chunk_lens: Tensor
    """int32 [batch]."""
    chunk_offsets: Tensor
    """int32 [batch]."""
    block_table: Tensor
    """int32 [batch, stride], passed flat."""
    sampled_ids_in: Tensor
    """int32 [batch, sampled_ids_pad]: column 0 is the row's token."""
    sampled_ids: Tensor
    """int32 [batch, sampled_ids_pad], written by the device and not read."""
    next_hidden: Tensor
    """bf16 [batch, hidden], written by the device and not read."""


class ServedModel:
    """What `Validate` began; the requests after it complete it step by step."""

    def __init__(self, checkout: Checkout, request: Validate, arena_fd: int) -> None:
        """Runs the checkout's own validator and binds its kernels.

        The validator is a field of the contract, not a method: it is handed the contract too.
        """
        self._contract = contract = checkout.contract
        self._model, self._runtime = request.model, request.runtime
        self._options = request.options
        self._identity = ContractIdentity(
            contract.model.family,
            contract.model.variant,
            contract.schema_version,
            contract.abi_fingerprint(),
        )
        view = SimpleNamespace(config=self._model, runtime=self._runtime)
        contract.validate_kernels(contract, checkout.kernels, view)
        contract.kernel_binder(**checkout.kernels.functions)
        self._stages: dict[str, LibStage] = {
            phase: contract.kernels[stages[0]]
            for phase, stages in contract.execution.items()
            if phase in ("prefill", "decode")
        }
        first = self._stages["prefill"].args[0].name
        self._host_embedding = first == "hidden_states"
        self._buffers = {
            phase: keyword_parameters(stage.runtime_args_builder)
            for phase, stage in self._stages.items()
        }
        self._arena = map_arena(arena_fd, request.arena)
        self._window = self._make_window(request)
        self._programs: dict[str, Any] = {}
        self._checkers: dict[str, ArgChecker] = {}
        self._prepared: SimpleNamespace | None = None
        self._device: Device | None = None
        self._dump_slot = 0
        self._run: dict[str, Callable[[Run], None]] = {
            "prefill": self._run_prefill,
            "decode": self._run_decode,
        }

    def compile(self, request: Compile) -> None:
        """Compiles a phase's stage, after holding its dummies to the declared arguments."""
        stage = self._stages[request.phase]
        dummies = stage.compile_args_builder(self._model, self._runtime)
        specs = [TensorArgSpec(a.name, a.dtype, tuple(a.shape), a.direction) for a in stage.args]  # type: ignore[arg-type]
        checker = ArgChecker(
            self._identity,
            stage.public_name,
            specs,
            DYNAMIC_SYMBOLS,
            dummies,
            torch.bfloat16,
        )
        self._checkers[request.phase] = checker
        config = run_config(self._options, request.artefacts)
        self._programs[request.phase] = stage.host_jit_fn.compile(*dummies, config=config)

    def prepare_weights(self, model_dir: str) -> int:
        """Returns the bytes of weights and tables. Raises `CheckpointError`."""
        on_worker = any(runs_on_worker(program) for program in self._programs.values())
        source = Checkpoint(model_dir)
        model = read_model(source, self._model)

        def export(tensor: Tensor) -> Tensor:
            return (
                shared_zeros(tuple(tensor.shape), tensor.dtype).copy_(tensor)
                if on_worker
                else tensor
            )

        prepared = self._contract.prepare_weights(
            model, export, padded_vocab=int(self._contract.limits["vocab"])
        )
        source.finish()
        cos, sin = rope_tables(self._model, self._runtime.max_seq_len)
        self._prepared = SimpleNamespace(
            decode_weights=dict(prepared.decode_weights),
            final_norm_weight=prepared.final_norm_weight,
            padded_lm_head_weight=prepared.padded_lm_head_weight,
            padded_embed_weight=prepared.padded_embed_weight,
            rope_cos=export(cos),
            rope_sin=export(sin),
        )
        self._embedding: Tensor = prepared.padded_embed_weight
        return sum(tensor.nbytes for tensor in _tensors(self._prepared).values())

    def allocate_cache(self, pages: int) -> None:
        """Makes the device, uploads the weights, and allocates zeroed pools of `pages` + 1 pages.

        The page that the worker does not know of is where a negative slot's K and V go: not every
        kernel leaves them out (hw-native-sys/pypto-lib#806).
        """
        if self._prepared is None or self._programs.keys() != self._stages.keys():
            raise ModelError("both stages and the weights come before the cache")
        model, page_size = self._model, self._runtime.page_size
        self._check_builders(pages + 1)
        if any(runs_on_worker(program) for program in self._programs.values()):
            self._device = WorkerDevice(self._programs)
        else:
            self._device = HostDevice()
        upload = self._device.static
        host = self._prepared
        self._static = SimpleNamespace(
            **{name: upload(t) for name, t in vars(host).items() if isinstance(t, Tensor)},
            decode_weights={name: upload(t) for name, t in host.decode_weights.items()},
        )
        shape = (self._cache_rows(pages + 1), model.head_dim)
        self._k_cache = self._device.zeros(shape, torch.bfloat16)
        self._v_cache = self._device.zeros(shape, torch.bfloat16)
        self._dump_slot = pages * page_size

    def run(self, request: Run) -> None:
        """Runs a phase over the rows in the arena, window by window."""
        self._run[request.phase](request)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None

    def _run_prefill(self, request: Run) -> None:
        arena, window = self._arena, self._window
        for start, stop in self._windows(request.rows):
            rows = stop - start
            lengths = arena.chunk_lens[start:stop]
            window.seq_lens.zero_()[:rows] = arena.seq_lens[start:stop]
            window.chunk_lens.zero_()[:rows] = lengths
            offsets = torch.cumsum(lengths, 0, dtype=torch.int32) - lengths
            window.chunk_offsets.zero_()[:rows] = offsets
            window.block_table.fill_(-1)[:rows, : request.pages] = arena.block_table[
                start:stop, : request.pages
            ]
            # Rows need not be packed in order, nor without gaps.
            for source, target, length in zip(
                arena.chunk_offsets[start:stop].tolist(),
                offsets.tolist(),
                lengths.tolist(),
                strict=True,
            ):
                here, there = slice(source, source + length), slice(target, target + length)
                window.token_ids[there] = arena.input_ids[here]
                window.slot_mapping[there] = arena.slot_mapping[here]
            tokens = int(lengths.sum())
            self._redirect_negative_slots(window.slot_mapping[:tokens])
            if self._host_embedding:
                torch.index_select(
                    self._embedding, 0, window.token_ids[:tokens], out=window.hidden[:tokens]
                )
            self._dispatch("prefill", self._prefill_inputs(tokens, self._logits(start)))

    def _run_decode(self, request: Run) -> None:
        arena, window = self._arena, self._window
        for start, stop in self._windows(request.rows):
            rows = stop - start
            window.block_table.fill_(-1)
            for target, source in (
                (window.seq_lens, arena.seq_lens),
                (window.slot_mapping[: len(window.seq_lens)], arena.slot_mapping),
                (window.sampled_ids_in[:, 0], arena.input_ids),
                (window.block_table[:, : request.pages], arena.block_table[:, : request.pages]),
            ):
                target[:rows] = source[start:stop]
                target[rows:] = source[start]
            self._redirect_negative_slots(window.slot_mapping[: len(window.seq_lens)])
            self._dispatch("decode", self._decode_inputs(self._logits(start)))

    def _windows(self, rows: int) -> list[tuple[int, int]]:
        batch = self._runtime.max_batch_size
        return [(start, min(start + batch, rows)) for start in range(0, rows, batch)]

    def _logits(self, start: int) -> Tensor:
        """The arena's own rows: the kernel writes where the parent reads."""
        return self._arena.logits[start : start + self._runtime.max_batch_size]

    def _redirect_negative_slots(self, slots: Tensor) -> None:
        slots.masked_fill_(slots < 0, self._dump_slot)

    def _prefill_inputs(self, tokens: int, logits: Tensor) -> SimpleNamespace:
        window = self._window
        ids, hidden = window.token_ids[:tokens], window.hidden[:tokens]
        return SimpleNamespace(
            token_ids=ids,
            input_ids=ids,
            hidden=hidden,
            hidden_states=hidden,
            seq_lens=window.seq_lens,
            chunk_lens=window.chunk_lens,
            chunk_offsets=window.chunk_offsets,
            block_table=window.block_table.view(-1),
            slot_mapping=window.slot_mapping[:tokens],
            logits=logits,
        )

    def _decode_inputs(self, logits: Tensor) -> SimpleNamespace:
        window = self._window
        return SimpleNamespace(
            token_ids=window.sampled_ids_in,
            seq_lens=window.seq_lens,
            block_table=window.block_table.view(-1),
            slot_mapping=window.slot_mapping[: len(window.seq_lens)],
            logits=logits,
        )

    def _dispatch(self, phase: str, inputs: SimpleNamespace) -> None:
        if self._device is None:
            raise ModelError("the cache comes before a step")
        args = self._build(phase, inputs, self._static, self._k_cache, self._v_cache)
        self._device.run(self._programs[phase], *args)

    def _build(
        self, phase: str, inputs: SimpleNamespace, static: SimpleNamespace, k: Any, v: Any
    ) -> tuple[Any, ...]:
        available = {
            "k_cache": k,
            "v_cache": v,
            "logits": inputs.logits,
            "sampled_ids_buffer": self._window.sampled_ids,
            "next_hidden_buffer": self._window.next_hidden,
        }
        builder = self._stages[phase].runtime_args_builder
        return builder(inputs, static, **{name: available[name] for name in self._buffers[phase]})

    def _check_builders(self, pages: int) -> None:
        """Builds both argument tuples from host tensors: each must be what its name says, in the
        declared order and shape. Raises `ContractMismatch`."""
        assert self._prepared is not None
        rows = self._cache_rows(pages)
        k, v = (
            torch.empty((rows, self._model.head_dim), dtype=torch.bfloat16, device="meta")
            for _ in range(2)
        )
        window, tokens = self._window, len(self._window.token_ids)
        for phase, inputs in (
            ("prefill", self._prefill_inputs(tokens, self._logits(0))),
            ("decode", self._decode_inputs(self._logits(0))),
        ):
            args = self._build(phase, inputs, self._prepared, k, v)
            checker = self._checkers[phase]
            # The pool's size is the worker's choice, and the only one that may exceed the dummies'.
            checker.sizes = {**checker.sizes, "KV_CACHE_ROWS": rows}
            checker.check(args)
            named = {**vars(inputs), **_tensors(self._prepared), "k_cache": k, "v_cache": v}
            checker.check_sources(
                args,
                {
                    **{name: named[key] for name, key in WEIGHTS.items()},
                    **{name: t for name, t in named.items() if isinstance(t, Tensor)},
                    "out": inputs.logits,
                    "lm_head_weight": named["padded_lm_head_weight"],
                    "embed_weight": named["padded_embed_weight"],
                    "sampled_ids_in": window.sampled_ids_in,
                    "sampled_ids": window.sampled_ids,
                    "next_hidden": window.next_hidden,
                },
            )

    def _cache_rows(self, pages: int) -> int:
        model = self._model
        per_page = model.num_hidden_layers * model.num_key_value_heads * self._runtime.page_size
        return pages * per_page

    def _make_window(self, request: Validate) -> Window:
        batch, hidden = request.runtime.max_batch_size, request.model.hidden_size
        longest = batch * request.runtime.max_seq_len
        tokens, stride = min(max(request.arena.tokens, batch), longest), request.arena.pages
        sampled = (batch, int(self._contract.limits["sampled_ids_pad"]))

        def shared(shape: tuple[int, ...], dtype: torch.dtype = torch.int32) -> Tensor:
            return shared_zeros(shape, dtype)

        return Window(
            token_ids=shared((tokens,)),
            hidden=shared((tokens if self._host_embedding else 0, hidden), torch.bfloat16),
            slot_mapping=shared((tokens,)),
            seq_lens=shared((batch,)),
            chunk_lens=shared((batch,)),
            chunk_offsets=shared((batch,)),
            block_table=shared((batch, stride)),
            sampled_ids_in=shared(sampled),
            sampled_ids=shared(sampled),
            next_hidden=shared((batch, hidden), torch.bfloat16),
        )


def _tensors(prepared: SimpleNamespace) -> Mapping[str, Tensor]:
    """All prepared tensors by name."""
    named: dict[str, Tensor] = dict(prepared.decode_weights)
    named |= {name: t for name, t in vars(prepared).items() if isinstance(t, Tensor)}
    return named
