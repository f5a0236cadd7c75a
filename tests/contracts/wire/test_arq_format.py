"""Records that arq itself reads and writes, held against the real arq."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import msgspec
import pytest
from arq import jobs as arq_jobs

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobError,
    JobFailed,
    SamplingParams,
    Timings,
    Usage,
)
from tidemill_contracts.wire.arq_format import (
    GENERATE,
    MAX_RESULT_BYTES,
    UndecodableRecord,
    content_hash,
    decode_job_record,
    decode_outcome,
    decode_result_record,
    deserializer,
    encode_job_record,
    encode_result_record,
    enqueue_time_of,
    error_of,
    serializer,
)

RESULT = GenerationResult(
    id="job",
    model="m",
    text="žluťoučký 🐎",
    token_ids=[1, 2],
    finish_reason="stop",
    usage=Usage(prompt_tokens=1, completion_tokens=2),
    timings=Timings(queued_ms=1.5, first_token_ms=2.5, total_ms=3.5),
)


def test_arq_reads_our_job_record() -> None:
    job = GenerationJob(id="job", prompt="hello")
    raw = encode_job_record(job, enqueue_time_ms=1_700_000_000_123, reply_to="tidemill:reply:x")
    read = arq_jobs.deserialize_job(raw, deserializer=deserializer)
    assert read.function == GENERATE
    assert msgspec.convert(read.args[0], GenerationJob) == job
    assert read.enqueue_time.timestamp() == 1_700_000_000.123
    assert decode_job_record(raw).reply_to == "tidemill:reply:x"


def test_we_read_arqs_job_record() -> None:
    raw = arq_jobs.serialize_job(
        GENERATE, ({"prompt": "hello"},), {}, None, 5, serializer=serializer
    )
    record = decode_job_record(raw)
    assert record.function == GENERATE
    assert msgspec.msgpack.decode(record.args[0]) == {"prompt": "hello"}
    assert (record.enqueue_time_ms, record.reply_to) == (5, None)


def test_a_record_begins_and_ends_with_what_the_scripts_read() -> None:
    job = GenerationJob(prompt="x")
    raw = encode_job_record(job, enqueue_time_ms=1_764_561_234_567, reply_to="stream-name")
    assert raw.endswith(b"\xa8reply_to\xabstream-name\xa1h\xd9 " + content_hash(job).encode())
    assert enqueue_time_of(raw[:16], raw[-12:]) == 1_764_561_234_567
    stock = serializer({"t": None, "f": "generate", "a": (), "k": {}, "et": 1_764_561_234_567})
    assert enqueue_time_of(stock[:16], stock[-12:]) == 1_764_561_234_567
    result = encode_result_record(
        JobError(code="x", message="y"),
        success=False,
        job_id="a",
        queue_name="q",
        content=content_hash(job),
    )
    assert result.endswith(b"\xa1h\xd9 " + content_hash(job).encode())


def test_the_content_is_all_but_the_id_and_the_urgency() -> None:
    job = GenerationJob(id="a", prompt="x")
    hashed = content_hash(job)
    urgent = msgspec.structs.replace(job, id="b", priority=5, deadline=9.0)
    assert content_hash(urgent) == hashed
    for change in ({"prompt": "y"}, {"tenant": "t"}, {"sampling": SamplingParams(seed=1)}):
        assert content_hash(msgspec.structs.replace(job, **change)) != hashed


def _record_of(value: object, **options: Any) -> bytes:
    return encode_result_record(value, success=True, job_id="a", queue_name="q", **options)


def test_a_large_result_is_compressed_and_reads_the_same() -> None:
    value = {"text": "tide " * 100_000}
    raw = _record_of(value)
    assert len(raw) < 10_000
    assert deserializer(raw)["r"] == value
    assert msgspec.msgpack.decode(decode_result_record(raw).result) == value
    small = msgspec.msgpack.decode(_record_of({"text": "tide"}))
    assert "z" not in small
    assert small["r"] == {"text": "tide"}


def test_a_result_over_the_limit_is_a_failure_of_its_job() -> None:
    outcome = decode_outcome(_record_of("x" * (MAX_RESULT_BYTES + 1)), "a")
    assert outcome.error is not None
    assert outcome.error.code == ErrorCode.RESULT_TOO_LARGE


@pytest.mark.parametrize(
    "damage",
    [
        {"z": "lzma"},
        {"r": b"not zlib"},
        {"r": "text"},
        {"r": zlib.compress(bytes(MAX_RESULT_BYTES + 1))},
    ],
    ids=["unknown-compression", "garbage", "no-bytes", "bomb"],
)
def test_a_damaged_compressed_result_is_refused(damage: dict[str, object]) -> None:
    record = {**msgspec.msgpack.decode(_record_of("tide " * 100_000)), **damage}
    with pytest.raises(UndecodableRecord):
        decode_outcome(msgspec.msgpack.encode(record), "a")


def test_arq_hears_of_a_cancelled_job_as_it_expects() -> None:
    error = JobError.of(ErrorCode.CANCELLED, "The job was cancelled")
    raw = encode_result_record(error, success=False, job_id="a", queue_name="q")
    raised = deserializer(raw)["r"]
    assert isinstance(raised, asyncio.CancelledError)
    assert isinstance(raised, JobFailed)
    assert raised.error == error


def test_arq_reads_our_result_record() -> None:
    raw = encode_result_record(
        RESULT, success=True, job_id="job", queue_name="q", job_try=2, start_ms=10, finish_ms=20
    )
    read = arq_jobs.deserialize_result(raw, deserializer=deserializer)
    assert read.success
    assert msgspec.convert(read.result, GenerationResult) == RESULT
    assert (read.job_id, read.queue_name, read.job_try, list(read.args)) == ("job", "q", 2, [])
    assert decode_outcome(raw, "job").unwrap() == RESULT


def test_an_error_keeps_its_code_through_arq() -> None:
    error = JobError.of(ErrorCode.PROMPT_TOO_LONG, "too long")
    raw = encode_result_record(error, success=False, job_id="job", queue_name="q")
    read = arq_jobs.deserialize_result(raw, deserializer=deserializer)
    assert not read.success
    assert isinstance(read.result, JobFailed)
    assert read.result.error == error
    with pytest.raises(JobFailed, match="prompt_too_long: too long"):
        decode_outcome(raw, "job").unwrap()


def test_an_exception_that_stock_arq_stores_comes_back_as_an_error() -> None:
    raw = arq_jobs.serialize_result(
        GENERATE, (), {}, 1, 0, False, ValueError("boom"), 0, 0, "ref", "q", "job",
        serializer=serializer,
    )  # fmt: skip
    error = decode_outcome(raw, "job").error
    assert error == JobError(code="internal", message="ValueError: boom", retryable=True)


def test_a_result_that_cannot_be_encoded_is_a_failure_of_that_job() -> None:
    raw = encode_result_record(object(), success=True, job_id="job", queue_name="q")
    error = decode_outcome(raw, "job").error
    assert error is not None
    assert error.code == ErrorCode.RESULT_NOT_ENCODABLE


@pytest.mark.parametrize("raw", [b"", b"\x80\x04K\x01.", b"\xc1", b"\x81\xa1f\x01", b"\x93"])
def test_other_bytes_are_undecodable(raw: bytes) -> None:
    with pytest.raises(UndecodableRecord):
        decode_job_record(raw)
    with pytest.raises(UndecodableRecord):
        decode_outcome(raw, "job")


def test_a_result_with_fields_of_a_later_version_is_read() -> None:
    record = msgspec.msgpack.decode(
        encode_result_record(RESULT, success=True, job_id="job", queue_name="q")
    )
    record["r"]["energy_joules"] = 0.5
    record["new"] = 1
    assert decode_outcome(msgspec.msgpack.encode(record), "job").unwrap() == RESULT


def test_cancellation_is_an_error_of_its_own() -> None:
    assert error_of(asyncio.CancelledError()).code == ErrorCode.CANCELLED
