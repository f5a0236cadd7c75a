"""Records that arq itself reads and writes, held against the real arq."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from arq import jobs as arq_jobs

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobError,
    JobFailed,
    Timings,
    Usage,
)
from tidemill_contracts.wire.arq_format import (
    GENERATE,
    UndecodableRecord,
    decode_job_record,
    decode_outcome,
    deserializer,
    encode_job_record,
    encode_result_record,
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


def test_the_reply_stream_ends_the_record() -> None:
    # The enqueue script tells a job's own producer from another one by this.
    raw = encode_job_record(GenerationJob(prompt="x"), enqueue_time_ms=0, reply_to="stream-name")
    assert raw.endswith(b"stream-name")


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
