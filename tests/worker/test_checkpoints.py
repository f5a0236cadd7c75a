"""The progress of jobs in Redis: who may add to it, what is written when, and when it goes."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from tests.worker.conftest import Push
from tidemill_contracts import keys
from tidemill_contracts.wire import TokenLogprobs
from tidemill_contracts.wire.progress import decode_progress
from tidemill_worker.checkpoints import Checkpoints
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.progress import Recorder
from tidemill_worker.queue import Claim, Finished, JobQueue, Piece, Release

KEY = keys.progress_key("job")


async def _claim_one(queue: JobQueue) -> Claim:
    (claim,) = (await queue.claim(1)).claims
    return claim


async def _pieces(redis: Redis) -> list[bytes]:
    return list(await redis.lrange(KEY, 0, -1))


async def test_pieces_follow_each_other_and_come_with_the_next_claim(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push()
    claim = await _claim_one(queue)
    assert list(claim.progress) == []
    assert await queue.checkpoint([Piece(claim, 0, b"old")]) == [True]
    assert await queue.checkpoint([Piece(claim, 0, b"a"), Piece(claim, 1, b"b")]) == [True, True]
    assert await queue.checkpoint([Piece(claim, 1, b"again"), Piece(claim, 3, b"gap")]) == [
        False,
        False,
    ]
    assert 0 < await redis.pttl(KEY) <= keys.PROGRESS_TTL_MS
    await queue.release([Release(claim, piece=Piece(claim, 2, b"c"))])
    assert list((await _claim_one(queue)).progress) == [b"a", b"b", b"c"]


async def test_who_lost_its_lease_adds_nothing(queue: JobQueue, push: Push, redis: Redis) -> None:
    await push()
    zombie = await _claim_one(queue)
    await queue.checkpoint([Piece(zombie, 0, b"a")])
    await asyncio.sleep(queue.lease_ms / 1000 + 0.05)
    claim = await _claim_one(queue)
    assert list(claim.progress) == [b"a"]
    assert await queue.checkpoint([Piece(zombie, 0, b"x"), Piece(zombie, 1, b"x")]) == [
        False,
        False,
    ]
    assert await queue.release([Release(zombie, piece=Piece(zombie, 0, b"x"))]) == 0
    assert await _pieces(redis) == [b"a"]
    assert await queue.checkpoint([Piece(claim, 1, b"b")]) == [True]


async def test_a_release_without_a_piece_leaves_what_there_is_and_one_that_does_not_fit_too(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await push()
    for piece in (Piece, None):
        claim = await _claim_one(queue)
        await queue.checkpoint([Piece(claim, 0, b"a")])
        await queue.release([Release(claim, piece=piece and piece(claim, 2, b"c"))])
        assert await _pieces(redis) == [b"a"]


async def test_progress_goes_with_its_job(queue: JobQueue, push: Push, redis: Redis) -> None:
    await push()
    claim = await _claim_one(queue)
    await queue.checkpoint([Piece(claim, 0, b"a")])
    await queue.finish([Finished(claim, b"result", None)])
    assert not await redis.exists(KEY)
    assert await queue.checkpoint([Piece(claim, 0, b"a")]) == [False]
    assert not await redis.exists(KEY), "nor does it come back"


async def test_a_key_of_another_type_does_not_hold_the_queue_up(
    queue: JobQueue, push: Push, redis: Redis
) -> None:
    await redis.set(KEY, "something else")
    await push()
    claim = await _claim_one(queue)
    assert list(claim.progress) == []
    assert await queue.checkpoint([Piece(claim, 0, b"a")]) == [True]


class Job:
    """A claimed job whose tokens the test adds."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        sampling = RowSampling(temperature=0, top_p=1, top_k=0, seed=1, logprobs=1)
        self.row = Row("job", [1, 2, 3], max_len=1_000_000, sampling=sampling)
        self.recorder = Recorder([self.row], lambda: "basis")

    def gain(self, tokens: int, logprob_entries: int = 1) -> None:
        for _ in range(tokens):
            entry = TokenLogprobs(logprob=-1.0, top=dict.fromkeys(range(logprob_entries), -1.0))
            self.row.logprobs.append(entry)
            self.row.append(self.row.generated, 1.0)


@pytest.fixture
async def job(queue: JobQueue, push: Push) -> Job:
    await push()
    return Job(await _claim_one(queue))


def _checkpoints(
    queue: JobQueue, job: Job, tokens: int = 10, seconds: float = 1_000
) -> Checkpoints:
    return Checkpoints(queue, lambda _: job.recorder, tokens=tokens, seconds=seconds)


async def test_a_job_is_written_when_it_is_due_and_only_what_is_new(
    queue: JobQueue, redis: Redis, job: Job
) -> None:
    checkpoints = _checkpoints(queue, job)
    claims = {"job": job.claim}
    for gained, pieces in ((9, 0), (1, 1), (0, 1), (9, 1), (30, 2)):
        job.gain(gained)
        await checkpoints.write(claims)
        assert len(await _pieces(redis)) == pieces
    sizes = [len(decode_progress([piece]).outputs[0].token_ids) for piece in await _pieces(redis)]
    assert sizes == [10, 39]
    assert decode_progress(await _pieces(redis)).outputs[0].token_ids == list(range(49))


async def test_a_job_is_written_after_some_time_too_if_anything_is_new(
    queue: JobQueue, redis: Redis, job: Job
) -> None:
    checkpoints = _checkpoints(queue, job, tokens=1_000, seconds=0.05)
    for gained, pieces in ((1, 1), (0, 1), (2, 2)):
        job.gain(gained)
        await checkpoints.write({"job": job.claim})
        await asyncio.sleep(0.06)
        await checkpoints.write({"job": job.claim})
        assert len(await _pieces(redis)) == pieces
    assert decode_progress(await _pieces(redis)).outputs[0].token_ids == [0, 1, 2]


async def test_an_answer_that_is_lost_makes_the_next_piece_a_whole(
    queue: JobQueue, redis: Redis, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = _checkpoints(queue, job)
    job.gain(10)
    await checkpoints.write({"job": job.claim})
    script = queue._checkpoint

    async def lost(**arguments: object) -> None:
        await script(**arguments)  # type: ignore[arg-type]
        raise RedisConnectionError("planted")

    monkeypatch.setattr(queue, "_checkpoint", lost)
    job.gain(10)
    with pytest.raises(RedisConnectionError):
        await checkpoints.write({"job": job.claim})
    monkeypatch.setattr(queue, "_checkpoint", script)
    assert len(await _pieces(redis)) == 2
    piece = checkpoints.last(job.claim)
    assert piece is not None
    assert piece.after == 0
    await queue.release([Release(job.claim, piece=piece)])
    assert decode_progress(await _pieces(redis)).outputs[0].token_ids == list(range(20))


async def test_a_checkpoint_stays_within_its_size_and_what_it_has_stays_good(
    queue: JobQueue, redis: Redis, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill_worker.checkpoints.MAX_PROGRESS_BYTES", 10_000)
    checkpoints = _checkpoints(queue, job)
    for _ in range(20):
        job.gain(10, logprob_entries=20)
        await checkpoints.write({"job": job.claim})
    assert checkpoints.last(job.claim) is None
    pieces = await _pieces(redis)
    assert 5_000 < sum(map(len, pieces)) <= 10_000
    tokens = decode_progress(pieces).outputs[0].token_ids
    assert all(after == before + 1 for before, after in pairwise(tokens))
