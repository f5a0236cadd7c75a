"""Runs the contract's stages: loads the model once, then turns each plan into logits.

The only module of the worker that meets a contract. It deals in logical inputs (token
ids, lengths, block tables, slots); the contract's own builder turns those into the kernel's
arguments.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill_contracts.models.checkpoint import Checkpoint
from tidemill_contracts.models.contract import Phase, StageInputs
from tidemill_contracts.models.registry import open_model
from tidemill_contracts.models.runtime import RuntimeOptions, plan_runtime
from tidemill_contracts.models.startup import ServedModel, load_model
from tidemill_worker.engine.pages import BlockTables
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Chunk

logger = logging.getLogger("tidemill.engine")


class ModelRunner:
    """A loaded model: weights, KV cache and compiled stages. Used by one thread."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.config = model.config
        self.contract = model.contract
        self.runtime = model.runtime
        self.max_logit_rows = model.runtime.max_logit_rows
        self.decodes_along = model.stages["prefill"].decodes_along
        self.sampling_kernels = model.sampling_kernels
        score = model.stages.get("score")
        self.same_in_chunks = model.runtime.deterministic or (
            score is not None and score.decodes_along
        )
        """Whether a row's bits are the same in a decode step and in a chunk of any length."""
        self._width = model.contract.hooks.logits_width(model.config)
        rows = model.runtime.max_batch_size
        self._logits = torch.zeros((rows, self._width), device=model.runtime.device)

    @classmethod
    def load(cls, model_dir: Path, options: RuntimeOptions) -> ModelRunner:
        """Finds the contract, checks it, loads weights and allocates the KV cache.

        Raises `ModelError` where the directory, the contract and the options disagree, before
        anything is loaded where that can be told.
        """
        started = time.perf_counter()
        config, contract = open_model(model_dir, options.quantization)
        runtime = plan_runtime(config, contract, options)
        model = load_model(
            contract,
            config,
            runtime,
            lambda: Checkpoint(model_dir),
            exporter=lambda tensor: tensor.to(runtime.device),
        )
        spec = contract.hooks.cache_spec(config, runtime)
        logger.info(
            "loaded %s in %.1fs: %s%s on %s, weights %.2f GiB,"
            " KV cache %d pages of %d tokens (%.2f GiB)",
            model_dir,
            time.perf_counter() - started,
            str(runtime.dtype).removeprefix("torch."),
            f" with matrices in {contract.model.quant}" if contract.model.quant else "",
            runtime.device,
            model.static.nbytes / 2**30,
            runtime.total_kv_pages,
            runtime.page_size,
            runtime.total_kv_pages * spec.bytes_per_page / 2**30,
        )
        return cls(model)

    def lacks(self, phase: Phase) -> bool:
        """Whether the contract has no such phase, which it need not have."""
        return phase not in self.model.stages

    def warm_up(self) -> None:
        """Runs every stage once without writing to the cache, so that the first job does not
        pay for what a first call sets up."""
        one = np.zeros(1, np.int32)
        table = np.full((1, 1), -1, np.int32)
        for phase in self.model.stages:
            self._run(
                phase,
                input_ids=one,
                seq_lens=one + 1,
                block_table=table * 0,
                slot_mapping=one - 1,
                logits=self._logits[:1],
                chunk_lens=None if phase == "decode" else one + 1,
                logit_rows=one if phase == "score" else None,
            )

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        """Computes each row's last known token.

        Returns float32 ``[rows, real vocabulary]``, valid until the next call.
        """
        seq_lens = np.fromiter((row.known for row in rows), np.int32, len(rows))
        block_table = self._block_table(rows, tables, int(seq_lens.max()))
        positions = seq_lens - 1
        size = self.runtime.page_size
        pages = block_table[np.arange(len(rows)), positions // size]
        return self._run(
            "decode",
            input_ids=np.fromiter((row.token_ids[-1] for row in rows), np.int32, len(rows)),
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=pages * size + positions % size,
            logits=self._logits[: len(rows)],
        )

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Computes the next tokens of each chunk's row.

        Returns float32 ``[chunks, real vocabulary]`` for the last token of each chunk, valid
        until the next call.
        """
        return self._run(
            "prefill", **self._pack(chunks, tables), logits=self._logits[: len(chunks)]
        )

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Computes the same; returns float32 ``[places, real vocabulary]`` for the places of each
        chunk whose logits are needed, chunk after chunk, valid until the next call."""
        places = []
        offset = 0
        for chunk in chunks:
            start = offset - chunk.row.computed
            places.append(np.arange(start + chunk.places.start, start + chunk.places.stop))
            offset += chunk.size
        logit_rows = np.concatenate(places).astype(np.int32)
        if len(logit_rows) > len(self._logits):
            # Kept from now on: steps with drafts would touch new memory each time.
            self._logits = self._logits.new_zeros((self.max_logit_rows, self._width))
        return self._run(
            "score",
            **self._pack(chunks, tables),
            logits=self._logits[: len(logit_rows)],
            logit_rows=logit_rows,
        )

    def _pack(
        self, chunks: Sequence[Chunk], tables: BlockTables
    ) -> dict[str, npt.NDArray[np.int32]]:
        """The tokens of all chunks one after another, and where they belong."""
        rows = [chunk.row for chunk in chunks]
        starts = np.fromiter((row.computed for row in rows), np.int32, len(rows))
        lengths = np.fromiter((chunk.size for chunk in chunks), np.int32, len(rows))
        seq_lens = starts + lengths
        block_table = self._block_table(rows, tables, int(seq_lens.max()))
        size = self.runtime.page_size
        input_ids = np.empty(int(lengths.sum()), np.int32)
        slots = np.empty_like(input_ids)
        offset = 0
        for index, (chunk, start, end) in enumerate(zip(chunks, starts, seq_lens, strict=True)):
            here = slice(offset, offset + end - start)
            input_ids[here] = chunk.token_ids
            positions = np.arange(start, end, dtype=np.int32)
            slots[here] = block_table[index, positions // size] * size + positions % size
            offset = here.stop
        return {
            "input_ids": input_ids,
            "seq_lens": seq_lens,
            "block_table": block_table,
            "slot_mapping": slots,
            "chunk_lens": lengths,
        }

    def _block_table(
        self, rows: Sequence[Row], tables: BlockTables, longest: int
    ) -> npt.NDArray[np.int32]:
        pages = -(-longest // self.runtime.page_size)
        lines = np.fromiter((row.table_index for row in rows), np.intp, len(rows))
        return tables.array[lines, :pages]

    def _run(
        self,
        phase: Phase,
        *,
        input_ids: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        slot_mapping: npt.NDArray[np.int32],
        logits: Tensor,
        chunk_lens: npt.NDArray[np.int32] | None = None,
        logit_rows: npt.NDArray[np.int32] | None = None,
    ) -> Tensor:
        def tensor(array: npt.NDArray[np.int32]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.runtime.device)

        chunk_offsets = None
        if chunk_lens is not None:
            chunk_offsets = np.cumsum(chunk_lens, dtype=np.int32) - chunk_lens
        inputs = StageInputs(
            input_ids=tensor(input_ids),
            seq_lens=tensor(seq_lens),
            block_table=tensor(block_table),
            slot_mapping=tensor(slot_mapping),
            logits=logits,
            chunk_lens=None if chunk_lens is None else tensor(chunk_lens),
            chunk_offsets=None if chunk_offsets is None else tensor(chunk_offsets),
            logit_rows=None if logit_rows is None else tensor(logit_rows),
        )
        self.model.stages[phase](inputs)
        return logits[:, : self.config.vocab_size]
