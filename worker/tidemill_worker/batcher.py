"""Between asyncio and the engine's thread: jobs in, results out.

Tokenises off the event loop where a prompt is large, hands the job's rows to the engine and waits
for them. The engine gathers the rows into batches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch

from tidemill_contracts.models.config import load_config
from tidemill_contracts.models.fingerprint import hash_weights
from tidemill_contracts.models.hub import resolve_model_dir
from tidemill_contracts.models.runtime import RuntimeOptions
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
)
from tidemill_contracts.wire.progress import Progress, UnfitProgress
from tidemill_worker.engine.calls import EngineStats
from tidemill_worker.engine.engine import Engine
from tidemill_worker.engine.pages import PagePool
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.runner import ModelRunner
from tidemill_worker.engine.scheduler import Scheduler
from tidemill_worker.generator import EngineCrashed, Figures
from tidemill_worker.outputs import make_receipt, make_result, make_rows, thinking_room
from tidemill_worker.progress import Recorder, basis_of, hash_model, read_progress, resume
from tidemill_worker.settings import WorkerConfig
from tidemill_worker.structured import Grammars
from tidemill_worker.text import Prompt, TextModel

logger = logging.getLogger("tidemill.worker")

DEMO_MODEL = "demo"
_INLINE_CHARACTERS = 16_384
"""Tokenising a prompt of up to this many characters takes less than a thread switch is worth."""


class Batcher:
    """A loaded model that generates for any number of callers at once."""

    def __init__(
        self,
        config: WorkerConfig,
        clock: Callable[[], float],
        runner: ModelRunner,
        text: TextModel,
        model_hash: str,
    ) -> None:
        self.config = config
        self.runner = runner
        self.text = text
        self._clock = clock
        self._model_hash = model_hash
        self.model_name = config.served_model_name or served_name(config.model)
        self.crashed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Never done, unless the engine crashes: then it raises."""
        self._grammars = Grammars(text, config.threads)
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._weights: asyncio.Task[str] | None = None
        self._waiting: dict[Row, asyncio.Future[Row]] = {}
        self._recorders: dict[str, Recorder] = {}
        self._scheduler = Scheduler(
            PagePool(runner.runtime.total_kv_pages, runner.runtime.page_size),
            max_rows=config.max_rows,
            max_step_tokens=config.max_step_tokens,
            max_model_len=runner.runtime.max_seq_len,
            prefix_caching=config.prefix_caching,
            target_tpot_s=None if config.target_tpot_ms is None else config.target_tpot_ms / 1000,
            max_drafts=_max_drafts(config, runner),
            max_logit_rows=runner.max_logit_rows,
        )
        self._engine = Engine(
            runner,
            self._scheduler,
            self._deliver_from_engine,
            max_wait_ms=config.max_wait_ms,
            clock=clock,
            initialise=self._initialise_engine,
            on_crash=self._crash_from_engine,
        )

    @classmethod
    async def start(cls, config: WorkerConfig, clock: Callable[[], float] = time.time) -> Batcher:
        """Loads the model and starts the engine. `clock` gives seconds since the Unix epoch, by
        which deadlines are judged. Raises `ModelError` where it cannot."""
        batcher = cls(config, clock, *await asyncio.to_thread(_load, config))
        batcher._engine.start()
        await asyncio.wait({batcher._ready, batcher.crashed}, return_when=asyncio.FIRST_COMPLETED)
        if batcher.crashed.done():
            await batcher.crashed
        return batcher

    async def close(self) -> None:
        """Stops the engine after the step that runs."""
        await asyncio.to_thread(self._engine.stop)
        await asyncio.to_thread(self._grammars.close)
        for future in self._waiting.values():
            future.cancel()
        self.crashed.cancel()

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats

    @property
    def rows_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def rows_waiting(self) -> int:
        return max(0, len(self._waiting) - self.rows_running)

    @property
    def pages_held(self) -> int:
        return self._scheduler.pool.used

    @property
    def eta_s(self) -> float | None:
        """Seconds until every row is done, if none comes; ``None`` while that is not known."""
        return self._engine.eta_s

    @property
    def figures(self) -> Figures:
        runtime, contract, stats = self.runner.runtime, self.runner.contract, self.stats
        return Figures(
            model=self.model_name,
            contract=f"{contract.model} {contract.abi_fingerprint()[:12]}",
            device=str(runtime.device),
            dtype=str(runtime.dtype).removeprefix("torch."),
            rows_running=self.rows_running,
            rows_waiting=self.rows_waiting,
            pages_held=self.pages_held,
            eta_s=self.eta_s,
            steps=stats.steps,
            row_steps=stats.row_steps,
            prompt_tokens=stats.prompt_tokens,
            completion_tokens=stats.completion_tokens,
            cached_tokens=stats.cached_tokens,
            draft_tokens=stats.draft_tokens,
            accepted_draft_tokens=stats.accepted_draft_tokens,
        )

    def recorder(self, job_id: str) -> Recorder | None:
        """Tells of the progress of a job that runs; ``None`` while it is being tokenised."""
        return self._recorders.get(job_id)

    async def generate(
        self,
        job: GenerationJob,
        job_id: str,
        enqueued_at: float,
        checkpoint: Sequence[bytes] = (),
    ) -> GenerationResult:
        """Runs one job to its end, from where its checkpoint says that it has come to.

        `enqueued_at` is in seconds since the Unix epoch, `checkpoint` what a `Recorder` has told
        of the same job, here or elsewhere; one that does not fit is ignored. Raises `JobFailed`,
        and `EngineCrashed`, whereupon nothing will run here any more. When the caller is
        cancelled the row leaves the batch at the next step border and its pages are free.
        """
        if job.model is not None and job.model != self.model_name:
            raise JobFailed.of(
                ErrorCode.MODEL_NOT_FOUND,
                f"This worker serves {self.model_name!r}, not {job.model!r} - at `$.model`",
            )
        if job.deadline is not None and job.deadline <= self._clock():
            raise JobFailed.of(ErrorCode.EXPIRED, "The deadline passed before the job was started")
        if job.sampling.prompt_logprobs is not None and self.runner.lacks("score"):
            raise JobFailed.of(
                ErrorCode.NOT_SUPPORTED,
                f"The contract {self.runner.contract.model} of this worker lacks the capability"
                " `prompt_logits` - at `$.sampling.prompt_logprobs`",
            )
        prompt = await self._encode(job)
        rows = await self._make_rows(job, job_id, prompt, enqueued_at)
        basis = partial(basis_of, self._model_hash, job, rows[0])
        if checkpoint:
            try:
                progress = read_progress(
                    checkpoint, basis=basis(), outputs=len(rows), vocab_size=self.text.vocab_size
                )
                rows = await self._resume(job, job_id, prompt, enqueued_at, progress)
            except UnfitProgress as error:
                logger.warning("%s starts anew, its checkpoint does not fit: %s", job_id, error)
        weights = self._hash_weights() if job.receipt else None
        recorder = self._recorders[job_id] = Recorder(rows, basis)
        try:
            await self._run([row for row in rows if not row.ended])
        finally:
            if self._recorders.get(job_id) is recorder:
                del self._recorders[job_id]
        result = make_result(job, job_id, self.model_name, prompt, rows)
        if weights is None:
            return result
        # Others may wait for the same hash: one caller that is cancelled does not end it.
        hashed = await asyncio.shield(weights)
        receipt = make_receipt(job, prompt, rows, self.text, self.runner.model, hashed)
        return msgspec.structs.replace(result, receipt=receipt)

    def _hash_weights(self) -> asyncio.Task[str]:
        """The hash of the weights, computed beside the engine when the first receipt is asked
        for, and again only where that has failed."""
        task = self._weights
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(asyncio.to_thread(hash_weights, self.text.model_dir))
            self._weights = task
        return task

    async def _run(self, rows: list[Row]) -> None:
        """Runs rows to their end; where the caller is cancelled, all of them leave. Raises
        `EngineCrashed`."""
        if self.crashed.done():
            await self.crashed
        for row in rows:
            self._waiting[row] = self._loop.create_future()
            self._engine.submit(row)
        try:
            await asyncio.gather(*(self._waiting[row] for row in rows))
        except asyncio.CancelledError:
            for row in rows:
                self._engine.abort(row)
            raise
        finally:
            for row in rows:
                self._waiting.pop(row, None)

    async def _make_rows(
        self,
        job: GenerationJob,
        job_id: str,
        prompt: Prompt,
        enqueued_at: float,
        seed: int | None = None,
    ) -> list[Row]:
        max_tokens = self._max_tokens(job, prompt)
        return make_rows(
            job,
            job_id,
            prompt,
            self.text,
            grammars=await self._grammars.for_rows(job, prompt),
            max_tokens=max_tokens,
            # A clock that is ahead must not put its jobs behind all others.
            enqueued_at=min(enqueued_at, self._clock()),
            seed=seed,
        )

    async def _resume(
        self,
        job: GenerationJob,
        job_id: str,
        prompt: Prompt,
        enqueued_at: float,
        progress: Progress,
    ) -> list[Row]:
        """The job's rows, as far as another worker had brought them. Raises `UnfitProgress`."""
        rows = await self._make_rows(job, job_id, prompt, enqueued_at, progress.seed)
        await asyncio.to_thread(resume, rows, progress, self._clock())
        tokens = sum(row.resumed for row in rows)
        logger.info("↪ %s goes on after %d tokens", job_id, tokens)
        return rows

    async def _encode(self, job: GenerationJob) -> Prompt:
        if _characters(job) > _INLINE_CHARACTERS:
            return await asyncio.to_thread(self.text.encode, job)
        return self.text.encode(job)

    def _max_tokens(self, job: GenerationJob, prompt: Prompt) -> int:
        """Tokens to generate at most. Raises `JobFailed` where that can never fit."""
        prompt_len = len(prompt.token_ids)
        max_tokens = job.sampling.max_tokens
        if max_tokens is None:
            # The job did not ask for a length, so it gets as much as there is room for.
            room = self._scheduler.capacity - prompt_len
            wanted = self.config.default_max_tokens + thinking_room(job, prompt, self.text)
            max_tokens = max(1, min(wanted, room))
        refusal = self._scheduler.refusal(prompt_len, max_tokens)
        if refusal is not None:
            raise JobFailed(refusal)
        return max_tokens

    def _initialise_engine(self) -> None:
        # OpenMP's thread count belongs to the calling thread, so the engine's own must set it.
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        self.runner.warm_up()
        self._loop.call_soon_threadsafe(self._ready.set_result, None)

    def _deliver_from_engine(self, rows: list[Row]) -> None:
        self._loop.call_soon_threadsafe(self._deliver, rows)

    def _deliver(self, rows: list[Row]) -> None:
        for row in rows:
            future = self._waiting.get(row)
            if future is not None and not future.done():
                future.set_result(row)

    def _crash_from_engine(self, error: Exception) -> None:
        def crash() -> None:
            if not self.crashed.done():
                crashed = EngineCrashed(f"The engine has crashed: {type(error).__name__}: {error}")
                crashed.__cause__ = error
                self.crashed.set_exception(crashed)
                for future in self._waiting.values():
                    if not future.done():
                        future.set_exception(crashed)

        self._loop.call_soon_threadsafe(crash)


def served_name(model: str) -> str:
    """The name that jobs may ask for: a directory's own, or the Hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.is_dir() else model


def _load(config: WorkerConfig) -> tuple[ModelRunner, TextModel, str]:
    if config.model == DEMO_MODEL:
        model_dir = Path(__file__).parent / "demo_model"
    else:
        model_dir = resolve_model_dir(config.model)
    options = RuntimeOptions(
        device=config.device,
        dtype=config.dtype,
        quantization=config.quantization,
        max_model_len=config.max_model_len,
        page_size=config.page_size,
        kv_pages=config.kv_pages,
        kernels=config.kernels,
        max_rows=config.max_rows,
        max_step_tokens=config.max_step_tokens,
        deterministic=config.deterministic,
    )
    # A tokenizer takes a second, most of it beside the reading and packing of weights.
    with ThreadPoolExecutor(1) as other:
        loading = other.submit(TextModel, model_dir, load_config(model_dir))
        runner = ModelRunner.load(model_dir, options)
        text = loading.result()
    return runner, text, hash_model(runner.model, text)


def _max_drafts(config: WorkerConfig, runner: ModelRunner) -> int:
    """Most tokens to guess ahead of a row in a step."""
    if config.speculate and runner.lacks("score"):
        logger.warning(
            "no speculation: the contract %s lacks the capability `prompt_logits`",
            runner.contract.model,
        )
        return 0
    if config.speculate and not runner.same_in_chunks:
        logger.info("speculation: in bfloat16 these kernels may decide near ties otherwise with it")
    return config.speculate


def _characters(job: GenerationJob) -> int:
    """About how many characters its prompt will have, without the template's own."""
    if job.messages is None:
        return len(job.prompt or "")
    texts = [text for m in job.messages for text in (m.content, m.reasoning_content) if text]
    # Tools and calls are written as JSON: of any depth, so that encoding is the way to count.
    described = [tool.function for tool in job.chat.tools]
    calls = [call.function for message in job.messages for call in message.tool_calls]
    return sum(map(len, texts)) + len(msgspec.json.encode([described, calls]))
