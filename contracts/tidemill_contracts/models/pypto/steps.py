"""What a step says before it reaches the kernels: checked, written into the arena, run.

Kernels on a device check nothing: a token id, page or slot out of range reads or writes somebody
else's memory there. And after a child was lost, its KV pools are gone: a row may go on only if it
reads nothing of what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tidemill_contracts.models.contract import CompiledStage, Phase
from tidemill_contracts.models.errors import (
    BackendError,
    ContractIdentity,
    ContractMismatch,
    KVCacheLost,
    ModelError,
)
from tidemill_contracts.models.pypto.arena import Arena
from tidemill_contracts.models.pypto.messages import Done, Run
from tidemill_contracts.models.pypto.session import RequestFailed, Session

Ints = npt.NDArray[np.int32]


class LostPages:
    """Which pages hold what the child that runs now has written."""

    def __init__(self, pages: int, generation: int) -> None:
        self._written = np.full(pages, generation, np.int64)
        """The generation that wrote a page's first slot; zeroed pages count as written."""

    def rows_lost(
        self,
        starts: Ints,
        block_table: Ints,
        page_size: int,
        generation: int,
    ) -> npt.NDArray[np.bool_]:
        """bool [rows]: true where a row reads, before position `starts`, a page that was lost."""
        read = np.arange(block_table.shape[1]) < -(-starts[:, None] // page_size)
        lost: npt.NDArray[np.bool_] = (
            (self._written[np.where(read, block_table, 0)] != generation) & read
        ).any(axis=1)
        return lost

    def write(self, slots: Ints, page_size: int, generation: int) -> None:
        """A page is written from its first slot on: what lies behind it follows."""
        self._written[slots[(slots >= 0) & (slots % page_size == 0)] // page_size] = generation


class Steps:
    """The two stages, once `begin` and `use_cache` have said what there is."""

    def __init__(
        self, session: Session, contract: ContractIdentity, limits: Mapping[str, int]
    ) -> None:
        self._session = session
        self._contract = contract
        self._page_size = limits["page_size"]
        self._max_seq = limits["max_seq"]
        self._vocab = limits["real_vocab"]
        self._begun = 0
        self._arena: Arena | None = None
        self._pages = 0
        self._lost = LostPages(0, 0)

    def begin(self, arena: Arena) -> None:
        """A model is being set up, whose steps travel in `arena`."""
        self._arena = arena
        self._pages = 0
        self._begun += 1

    def use_cache(self, pages: int) -> None:
        """The pools have been allocated, zeroed."""
        self._pages = pages
        self._lost = LostPages(pages, self._session.generation)

    def stage(self, phase: Phase) -> CompiledStage:
        """The stage of the model that is being set up; raises `ModelError` once another one is,
        for the child has room for one."""
        run: Callable[..., None] = self.prefill if phase == "prefill" else self.decode
        begun = self._begun

        def stage(*args: Tensor) -> None:
            if self._begun != begun:
                raise ModelError("The PyPTO backend has loaded another model since this one.")
            run(*args)

        return stage

    def prefill(
        self,
        input_ids: Tensor,
        seq_lens: Tensor,
        chunk_lens: Tensor,
        chunk_offsets: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        logits: Tensor,
    ) -> None:
        """One chunk of each row. Raises `BackendError`, or `KVCacheLost` where a chunk before this
        one was computed in a child that is gone."""
        arena = self._write("prefill", input_ids, seq_lens, block_table, slot_mapping)
        rows, tokens = len(seq_lens), len(input_ids)
        lengths, offsets, ends = chunk_lens.numpy(), chunk_offsets.numpy(), seq_lens.numpy()
        if int(lengths.min()) < 1 or int(lengths.sum()) != tokens:
            raise self._mismatch("prefill.chunk_lens", lengths.tolist(), f"{tokens} tokens in all")
        if int(offsets.min()) < 0 or int((offsets + lengths).max()) > tokens:
            raise self._mismatch("prefill.chunk_offsets", offsets.tolist(), f"within {tokens}")
        self._check_rows("prefill", ends - lengths, ends, block_table.numpy())
        arena.chunk_lens[:rows] = chunk_lens
        arena.chunk_offsets[:rows] = chunk_offsets
        request = Run("prefill", rows, tokens, block_table.shape[1])
        self._run(request, arena, slot_mapping, logits)

    def decode(
        self,
        input_ids: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
        logits: Tensor,
    ) -> None:
        """One token of each row. Raises as `prefill` does."""
        arena = self._write("decode", input_ids, seq_lens, block_table, slot_mapping)
        ends = seq_lens.numpy()
        self._check_rows("decode", ends - 1, ends, block_table.numpy())
        self._run(Run("decode", len(ends), 0, block_table.shape[1]), arena, slot_mapping, logits)

    def _run(self, request: Run, arena: Arena, slot_mapping: Tensor, logits: Tensor) -> None:
        try:
            self._session.step(request, Done, request.phase)
        except RequestFailed as error:
            raise BackendError(str(error)) from error
        self._lost.write(slot_mapping.numpy(), self._page_size, self._session.generation)
        logits.copy_(arena.logits[: request.rows])

    def _write(
        self,
        phase: Phase,
        input_ids: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        slot_mapping: Tensor,
    ) -> Arena:
        """Writes what both phases have into the arena, sizes, ids and slots checked."""
        arena = self._arena
        if arena is None or not self._pages:
            raise ModelError(
                "A step before the model was loaded: validate_kernels and"
                " cache_spec(…).allocate come first."
            )
        rows, tokens, columns = len(seq_lens), len(input_ids), block_table.shape[1]
        for name, found, most in (
            ("rows", rows, len(arena.seq_lens)),
            ("tokens", tokens, len(arena.input_ids)),
            ("block_table columns", columns, arena.block_table.shape[1]),
        ):
            if not 0 < found <= most:
                raise self._mismatch(f"{phase} {name}", found, f"1 to {most}")
        ids, last_slot = input_ids.numpy(), self._pages * self._page_size - 1
        if int(ids.min()) < 0 or int(ids.max()) >= self._vocab:
            raise self._mismatch(
                f"{phase}.input_ids", f"{ids.min()} to {ids.max()}", f"0 to {self._vocab - 1}"
            )
        if (slot := int(slot_mapping.numpy().max())) > last_slot:
            raise self._mismatch(f"{phase}.slot_mapping", slot, f"at most {last_slot}")
        arena.input_ids[:tokens] = input_ids
        arena.slot_mapping[:tokens] = slot_mapping
        arena.seq_lens[:rows] = seq_lens
        arena.block_table[:rows, :columns] = block_table
        return arena

    def _check_rows(self, phase: Phase, starts: Ints, ends: Ints, table: Ints) -> None:
        """Every page that a row reads exists, and none of them was lost with a child.

        `starts` and `ends` are the positions that the step computes, per row.
        """
        columns = table.shape[1]
        most = min(self._max_seq, columns * self._page_size)
        if int(starts.min()) < 0 or int(ends.max()) > most:
            raise self._mismatch(f"{phase}.seq_lens", ends.tolist(), f"a chunk's length to {most}")
        pages = np.where(np.arange(columns) < -(-ends[:, None] // self._page_size), table, 0)
        if int(pages.min()) < 0 or int(pages.max()) >= self._pages:
            raise self._mismatch(
                f"{phase}.block_table",
                f"pages {pages.min()} to {pages.max()}",
                f"0 to {self._pages - 1}",
            )
        lost = self._lost.rows_lost(starts, table, self._page_size, self._session.generation)
        if lost.any():
            raise KVCacheLost(
                f"The PyPTO backend was restarted, and with it the KV cache of {int(lost.sum())} of"
                f" the {len(lost)} rows of this {phase} step was lost: they have to be computed"
                " from their first token."
            )

    def _mismatch(self, what: str, found: object, expected: object) -> ContractMismatch:
        return ContractMismatch(self._contract, what, found=found, expected=expected)
