"""A step's calls of the model: chunks in, tokens out, and what to do where a call fails."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from tidemill_contracts.models.contract import Phase
from tidemill_contracts.models.errors import KVCacheLost
from tidemill_contracts.models.sampling import SamplingKernels, Telling
from tidemill_contracts.wire import ErrorCode, JobError, TokenLogprobs
from tidemill_worker.engine import sampler
from tidemill_worker.engine.logprobs import tell, token_logprobs
from tidemill_worker.engine.memory import CallLimit, free_memory_of, is_out_of_memory
from tidemill_worker.engine.pages import BlockTables
from tidemill_worker.engine.row import FailedStep, Row
from tidemill_worker.engine.scheduler import Chunk, Scheduler, StepPlan

logger = logging.getLogger("tidemill.engine")

MAX_RESTARTS = 3
"""How often a row is computed anew after its backend lost the KV cache."""


class Runner(Protocol):
    """What the engine needs of a loaded model; all return float32 ``[…, vocabulary]`` logits."""

    @property
    def max_logit_rows(self) -> int:
        """Most places that one call of `score` may tell of."""

    @property
    def decodes_along(self) -> bool:
        """Whether decode rows are best run as chunks of one token where others are prefilled."""

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        """``None`` where tokens are chosen in torch."""

    def decode(self, rows: Sequence[Row], tables: BlockTables) -> Tensor:
        """Of each row's last known token."""

    def prefill(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Of each chunk's last token."""

    def score(self, chunks: Sequence[Chunk], tables: BlockTables) -> Tensor:
        """Of all places of each chunk whose logits are needed, chunk after chunk. Only called
        where these are more than the last ones."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started. Written by its thread, read by any."""

    steps: int = 0
    row_steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    """Tokens that were guessed and computed along with a row's last one."""
    accepted_draft_tokens: int = 0
    """Completion tokens that took no step of their own, because a guess was right."""
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache saved from being computed."""
    last_step_at: float = 0.0
    """Seconds since the Unix epoch."""


class Calls:
    """Runs what a step's plan says. A row that cannot be computed gets an error, and the others
    what they would have got without it."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        stats: EngineStats,
        clock: Callable[[], float],
    ) -> None:
        self.decode_limit = CallLimit()
        self.prefill_limit = CallLimit()
        self._runner = runner
        self._scheduler = scheduler
        self._stats = stats
        self._clock = clock
        self._troubled = False
        """Whether a call of the present step has raised."""

    @property
    def short_of_memory(self) -> bool:
        return bool(self.decode_limit.tokens or self.prefill_limit.tokens)

    def run(self, plan: StepPlan) -> bool:
        """False where a call has raised: then the time that the step took tells nothing."""
        self._troubled = False
        with torch.inference_mode():
            decode = [Chunk(row, 1, plan.drafts.get(row, ())) for row in plan.decode]
            if plan.drafts or (plan.prefill and self._runner.decodes_along):
                self._run_chunks([*decode, *plan.prefill])
            else:
                self._run_decode(decode)
                self._run_chunks(plan.prefill)
        if self._troubled:
            return False
        self.decode_limit.ease()
        self.prefill_limit.ease()
        return True

    def _run_decode(self, chunks: Sequence[Chunk]) -> None:
        for part in _parts(chunks, self.decode_limit):
            self._call("decode", part)

    def _run_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Runs chunks to their ends, in as few calls as memory lets it."""
        left = list(chunks)
        while left:
            part, left = self._tellable(left)
            self._run_prefill(part)
            # A row may have failed, or lost its K and V and gone back in line.
            left = [chunk for chunk in left if _runs(chunk.row)]

    def _tellable(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[Chunk]]:
        """As much of the chunks as tells of no more places than one call of score may, and what
        is left."""
        room = self._runner.max_logit_rows
        part: list[Chunk] = []
        left: list[Chunk] = []
        for chunk in chunks:
            over = max(0, len(chunk.told) - room)
            if chunk.length > over:
                part.append(replace(chunk, length=chunk.length - over))
                room -= len(part[-1].places) if _is_scored(part[-1]) else 0
            if over:
                left.append(Chunk(chunk.row, over))
        return part, left

    def _run_prefill(self, chunks: Sequence[Chunk]) -> None:
        for part in _parts(chunks, self.prefill_limit):
            # What an earlier part was to compute of the same row may have failed.
            left = [chunk for chunk in part if _runs(chunk.row)]
            plain = [chunk for chunk in left if not _is_scored(chunk)]
            scored = [chunk for chunk in left if _is_scored(chunk)]
            if scored and sum(len(chunk.places) for chunk in left) <= self._runner.max_logit_rows:
                plain, scored = [], left  # one pass over the weights
            self._call("prefill", plain)
            self._call("score", scored)

    def _call(self, phase: Phase, chunks: Sequence[Chunk]) -> None:
        """Computes the chunks, tells of their prompts where asked, and samples where that reaches
        the last known token. Nothing of a row changes before all of that has gone well."""
        if not chunks:
            return
        kernels = self._runner.sampling_kernels
        try:
            told: list[list[TokenLogprobs] | None] = [[] for _ in chunks]
            drafted: list[tuple[Chunk, Tensor]] = []
            if phase == "decode":
                logits = self._runner.decode([c.row for c in chunks], self._scheduler.tables)
            elif phase == "prefill":
                logits = self._runner.prefill(chunks, self._scheduler.tables)
            else:
                places = self._runner.score(chunks, self._scheduler.tables)
                ends = list(accumulate(len(chunk.places) for chunk in chunks))
                told = [
                    _tell(chunk, places[end - len(chunk.told) : end], kernels) if chunk.told else []
                    for chunk, end in zip(chunks, ends, strict=True)
                ]
                drafted = [
                    (chunk, places[end - len(chunk.drafts) : end])
                    for chunk, end in zip(chunks, ends, strict=True)
                    if chunk.drafts
                ]
                logits = places[
                    [end - 1 - len(c.drafts) for c, end in zip(chunks, ends, strict=True)]
                ]
            done = [
                i
                for i, chunk in enumerate(chunks)
                if chunk.row.remaining == chunk.length and told[i] is not None
            ]
            if len(done) < len(chunks):
                logits = logits[done]
            sampled = sampler.sample(logits, [chunks[i].row for i in done], kernels)
        except Exception as error:
            self._troubled = True
            self._split(phase, chunks, error)
            return
        chosen = {i: choice for i, choice in zip(done, sampled, strict=True) if choice is not None}
        spoilt = set(done) - set(chosen)
        for i, (chunk, entries) in enumerate(zip(chunks, told, strict=True)):
            if entries is None or i in spoilt:
                tokens = chunk.row.computed + chunk.length
                message = f"The model gave NaN or infinite logits after {tokens:,} tokens"
                self._blame(phase, chunk, ErrorCode.NONFINITE_LOGITS, message)
            chunk.row.prompt_logprobs += entries or []
            chunk.row.computed += chunk.length
        self._append([chunks[i].row for i in chosen], list(chosen.values()))
        self._verify(drafted)

    def _verify(self, drafted: Sequence[tuple[Chunk, Tensor]]) -> None:
        """Samples on while a row's latest token is the one that was guessed, from the logits
        ``[drafts, vocabulary]`` after each of its drafts.

        What goes wrong here goes wrong again, and is dealt with, where the next step computes the
        same without a guess.
        """
        for chunk, _ in drafted:
            chunk.row.draft_tokens += len(chunk.drafts)
            self._stats.draft_tokens += len(chunk.drafts)
        for place in range(max((len(chunk.drafts) for chunk, _ in drafted), default=0)):
            drafted = [
                (chunk, logits)
                for chunk, logits in drafted
                if place < len(chunk.drafts)
                and not chunk.row.ended
                and chunk.row.token_ids[-1] == chunk.drafts[place]
            ]
            if not drafted:
                return
            try:
                logits = torch.stack([logits[place] for _, logits in drafted])
                rows = [chunk.row for chunk, _ in drafted]
                sampled = sampler.sample(logits, rows, self._runner.sampling_kernels)
            except Exception as error:
                logger.warning("drafts are given up, they cannot be sampled", exc_info=error)
                return
            chosen = [choice for choice in sampled if choice is not None]
            drafted = [each for each, choice in zip(drafted, sampled, strict=True) if choice]
            for chunk, _ in drafted:
                chunk.row.computed += 1
                chunk.row.accepted_draft_tokens += 1
            self._stats.accepted_draft_tokens += len(drafted)
            self._append([chunk.row for chunk, _ in drafted], chosen)

    def _split(self, phase: Phase, chunks: Sequence[Chunk], error: Exception) -> None:
        """Runs the halves of a call that raised, until the bad row is alone.

        Running a row again is harmless: it writes the same K and V to the same slots.
        """
        run = self._run_decode if phase == "decode" else self._run_prefill
        tokens = sum(chunk.size for chunk in chunks)
        drafts = any(chunk.drafts for chunk in chunks)
        chunks = [replace(chunk, drafts=()) for chunk in chunks]
        if is_out_of_memory(error):
            free_memory_of(error)
            if tokens > 1:
                # No row is at fault, so even a chunk is halved.
                limit = self.decode_limit if phase == "decode" else self.prefill_limit
                limit.shrink(tokens)
                logger.warning(
                    "out of memory in a %s of %d tokens, at most %d a call from now on: %s",
                    phase, tokens, limit.tokens, error,
                )  # fmt: skip
                run(chunks)
                return
        elif drafts:
            # A guess may be at fault, and the step can do without.
            run(chunks)
            return
        elif len(chunks) > 1:
            half = len(chunks) // 2
            run(chunks[:half])
            run(chunks[half:])
            return
        (chunk,) = chunks
        row = chunk.row
        if isinstance(error, KVCacheLost) and row.restarts < MAX_RESTARTS:
            # Nothing is wrong with the row: its K and V are gone, its tokens are not.
            row.restarts += 1
            self._scheduler.preempt(row)
            return
        logger.error("row %s fails its step", row.id, exc_info=error)
        where = f"at {row.computed:,} of {row.known:,} tokens: {type(error).__name__}: {error}"
        if is_out_of_memory(error):
            code, what = ErrorCode.OUT_OF_MEMORY, "There is no memory to compute even one token"
        else:
            code, what = ErrorCode.ENGINE_ERROR, "The forward pass failed for this job alone"
        self._blame(phase, chunk, code, f"{what}, {where}")

    def _blame(self, phase: Phase, chunk: Chunk, code: ErrorCode, message: str) -> None:
        """Ends a row that a step cannot compute."""
        chunk.row.error = JobError.of(code, message)
        chunk.row.failed_step = FailedStep(phase, chunk.row.computed, chunk.length)

    def _append(self, rows: Sequence[Row], sampled: Sequence[sampler.Sampled]) -> None:
        now = self._clock()
        for row, choice in zip(rows, sampled, strict=True):
            if choice.token_id < 0:
                if row.grammar is not None and row.grammar.over:
                    row.end_with_grammar()
                    continue
                row.error = JobError.of(
                    ErrorCode.INVALID_JOB,
                    "The job's options bar every token - at `$.sampling`",
                )
                continue
            if choice.logprobs is not None:
                row.logprobs.append(choice.logprobs)
            row.append(choice.token_id, now)
            self._stats.completion_tokens += 1


def _parts(chunks: Sequence[Chunk], limit: CallLimit) -> Iterator[Sequence[Chunk]]:
    """The chunks in calls within the limit, which may change on the way; a chunk that does not
    fit goes on in the next call."""
    waiting = deque(chunks)
    tokens = sum(chunk.length for chunk in chunks)
    while waiting:
        if limit.tokens is None or tokens <= limit.tokens:
            yield list(waiting)
            return
        part: list[Chunk] = []
        room = limit.tokens
        while room:
            chunk = waiting.popleft()
            length = min(chunk.length, room)
            part.append(Chunk(chunk.row, length))
            if length < chunk.length:
                waiting.appendleft(Chunk(chunk.row, chunk.length - length))
            room -= length
        tokens -= limit.tokens
        yield part


def _runs(row: Row) -> bool:
    return row.table_index >= 0 and not row.ended


def _is_scored(chunk: Chunk) -> bool:
    """Whether more of its logits are needed than the last ones."""
    return bool(chunk.told or chunk.drafts)


def _tell(
    chunk: Chunk, logits: Tensor, kernels: SamplingKernels | None
) -> list[TokenLogprobs] | None:
    """The log probabilities of prompt tokens, from ``[places, vocabulary]`` logits of the places
    that the chunk tells of; ``None`` where they are not finite."""
    row, places = chunk.row, chunk.told
    # The last place of a prompt tells of no token of it, but of the first to be sampled.
    token_ids = row.token_ids[places.start + 1 : places.stop + 1]
    top, listed = row.sampling.prompt_logprobs or 0, row.sampling.logprob_token_ids
    if kernels is not None:
        asked = [Telling(line, token_id, top, listed) for line, token_id in enumerate(token_ids)]
        told = tell(kernels, logits, asked)
        sound = [entry for entry in told if entry is not None]
        return sound if len(sound) == len(told) else None
    if not all(sampler.finite_rows(logits)):
        return None
    return token_logprobs(logits[: len(token_ids)].log_softmax(dim=1), token_ids, top, listed)
