"""A double of the worker, against a real server; it finishes jobs as the real one promises to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from tidemill_contracts import keys
from tidemill_contracts.wire import (
    GenerationJob,
    GenerationResult,
    JobError,
    Timings,
    Usage,
    decode_job,
)
from tidemill_contracts.wire.arq_format import (
    JobRecord,
    decode_job_record,
    encode_result_record,
)
from tidemill_producer import Producer

Answer = Callable[[GenerationJob], GenerationResult | JobError]

# KEYS queue; ARGV id, result record, reply stream or "", whether to tell the waiters
FINISH = f"""
local id = ARGV[1]
local streams = redis.call('SMEMBERS', '{keys.WAITERS_PREFIX}' .. id)
if ARGV[3] ~= '' then streams[#streams + 1] = ARGV[3] end
redis.call('SET', '{keys.RESULT_PREFIX}' .. id, ARGV[2], 'PX', {keys.RESULT_TTL_MS})
redis.call('ZREM', KEYS[1], id)
redis.call('DEL', '{keys.JOB_PREFIX}' .. id, '{keys.IN_PROGRESS_PREFIX}' .. id,
           '{keys.RETRY_PREFIX}' .. id, '{keys.WAITERS_PREFIX}' .. id)
if ARGV[4] == '1' then
  for _, stream in ipairs(streams) do
    redis.call('XADD', stream, '*', 'id', id)
    redis.call('PEXPIRE', stream, {keys.REPLY_TTL_MS})
  end
end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('DEL', KEYS[1] .. ':load', KEYS[1] .. ':tenants')
end
"""


def echo(job: GenerationJob) -> GenerationResult:
    """The prompt in capitals."""
    text = (job.prompt or "").upper()
    return GenerationResult(
        id=job.id or "",
        model="double",
        text=text,
        token_ids=[1, 2, 3],
        finish_reason="stop",
        usage=Usage(prompt_tokens=len(job.prompt or ""), completion_tokens=3),
        timings=Timings(queued_ms=1.0, first_token_ms=2.0, total_ms=3.0),
    )


class WorkerDouble:
    """Takes jobs off the queue in order; `answer` makes each result."""

    def __init__(self, redis: Redis, queue: str = keys.DEFAULT_QUEUE) -> None:
        self.redis = redis
        self.queue = queue
        self.answer: Answer = echo
        self.tells = True
        """Whether finishing writes to the reply streams."""
        self.ran: list[str] = []
        self._finish = redis.register_script(FINISH)

    async def claim(self) -> tuple[GenerationJob, JobRecord] | None:
        """The first job of the queue, marked as running."""
        due = await self.redis.zpopmin(self.queue)
        if not due:
            return None
        job_id = due[0][0].decode()
        raw = await self.redis.get(keys.job_key(job_id))
        if raw is None:
            return None
        await self.redis.set(keys.in_progress_key(job_id), "double", px=60_000)
        record = decode_job_record(raw)
        return decode_job(bytes(record.args[0])), record

    async def finish(self, job: GenerationJob, record: JobRecord) -> None:
        assert job.id is not None
        value = self.answer(job)
        raw = encode_result_record(
            value,
            success=isinstance(value, GenerationResult),
            job_id=job.id,
            queue_name=self.queue,
            content=record.content,
        )
        await self._finish(
            keys=[self.queue], args=[job.id, raw, record.reply_to or "", int(self.tells)]
        )
        self.ran.append(job.id)

    async def run_one(self) -> str | None:
        claimed = await self.claim()
        if claimed is None:
            return None
        await self.finish(*claimed)
        return claimed[0].id

    async def run_all(self) -> int:
        """Until the queue is empty; returns how many ran."""
        count = 0
        while await self.run_one() is not None:
            count += 1
        return count

    async def serve(self) -> None:
        """For ever; waits on the doorbell."""
        while True:
            await self.run_all()
            await self.redis.blpop([keys.doorbell_key(self.queue)], timeout=0.05)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[WorkerDouble]:
        task = asyncio.create_task(self.serve())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@pytest.fixture
async def worker(redis: Redis) -> WorkerDouble:
    """A worker double that does nothing by itself."""
    return WorkerDouble(redis)


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Producer]:
    async with Producer(redis_url) as producer:
        yield producer
