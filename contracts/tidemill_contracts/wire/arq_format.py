"""arq's own job and result records, in msgpack.

Tidemill's jobs stay arq jobs: any arq client that is given `serializer` and `deserializer` can
enqueue one and read its result. This module writes those records without arq, so that a
producer needs no arq (arq 0.28 keeps redis-py below 6). Field names are arq's: ``t`` try, ``f``
function, ``a`` args, ``k`` kwargs, ``et``/``st``/``ft`` enqueue, start and finish time in ms,
``s`` success, ``r`` result, ``q`` queue, ``id`` job id.
"""

from __future__ import annotations

import asyncio

import msgspec

from tidemill_contracts.wire.codec import encode_job
from tidemill_contracts.wire.errors import ErrorCode, JobError, JobFailed, TidemillError
from tidemill_contracts.wire.job import GenerationJob
from tidemill_contracts.wire.result import GenerationResult, Outcome

GENERATE = "generate"
"""The name of the arq function that runs a generation job."""


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `arq:job:<id>` holds."""

    function: str = msgspec.field(name="f")
    args: list[msgspec.Raw] = msgspec.field(name="a")
    kwargs: dict[str, msgspec.Raw] = msgspec.field(name="k")
    job_try: int | None = msgspec.field(name="t", default=None)
    enqueue_time_ms: int = msgspec.field(name="et")
    reply_to: str | None = msgspec.field(name="reply_to", default=None)
    """The stream that hears of the result. Ours alone: arq ignores it. It ends the record, by
    which the scripts tell a job's own producer from another one."""


class ResultRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `arq:result:<id>` holds. The args are left empty: the result need not repeat them."""

    success: bool = msgspec.field(name="s")
    result: msgspec.Raw = msgspec.field(name="r")
    function: str = msgspec.field(name="f", default=GENERATE)
    args: list[msgspec.Raw] = msgspec.field(name="a", default=[])
    kwargs: dict[str, msgspec.Raw] = msgspec.field(name="k", default={})
    job_try: int = msgspec.field(name="t", default=1)
    enqueue_time_ms: int = msgspec.field(name="et", default=0)
    start_ms: int = msgspec.field(name="st", default=0)
    finish_ms: int = msgspec.field(name="ft", default=0)
    queue_name: str = msgspec.field(name="q", default="")
    id: str = ""


_encoder = msgspec.msgpack.Encoder()
_job_record_decoder = msgspec.msgpack.Decoder(JobRecord)
_result_record_decoder = msgspec.msgpack.Decoder(ResultRecord)
_result_decoder = msgspec.msgpack.Decoder(GenerationResult)
_error_decoder = msgspec.msgpack.Decoder(JobError)
_any_decoder = msgspec.msgpack.Decoder()


class UndecodableRecord(TidemillError):
    """Bytes in Redis are not the record that the key promises."""


def encode_job_record(
    job: GenerationJob, *, enqueue_time_ms: int, reply_to: str | None = None
) -> bytes:
    """The job as an arq record. Raises `InvalidMessage` where the job is not valid."""
    return _encoder.encode(
        JobRecord(
            function=GENERATE,
            args=[msgspec.Raw(encode_job(job))],
            kwargs={},
            enqueue_time_ms=enqueue_time_ms,
            reply_to=reply_to,
        )
    )


def decode_job_record(raw: bytes) -> JobRecord:
    """Raises `UndecodableRecord`."""
    try:
        return _job_record_decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableRecord(f"not a job record: {error}") from error


def encode_result_record(
    value: object,
    *,
    success: bool,
    job_id: str,
    queue_name: str,
    function: str = GENERATE,
    job_try: int = 1,
    enqueue_time_ms: int = 0,
    start_ms: int = 0,
    finish_ms: int = 0,
) -> bytes:
    """A result as an arq record.

    `value` is a `GenerationResult`, a `JobError`, or what another arq function returned. Where
    it cannot be encoded the record says so as a failure of this job: nothing else is disturbed.
    """
    try:
        result = _encoder.encode(value)
    except Exception as error:
        success = False
        result = _encoder.encode(
            JobError.of(
                ErrorCode.RESULT_NOT_ENCODABLE,
                f"The result cannot be encoded: {type(error).__name__}: {error}",
            )
        )
    return _encoder.encode(
        ResultRecord(
            success=success,
            result=msgspec.Raw(result),
            function=function,
            job_try=job_try,
            enqueue_time_ms=enqueue_time_ms,
            start_ms=start_ms,
            finish_ms=finish_ms,
            queue_name=queue_name,
            id=job_id,
        )
    )


def decode_outcome(raw: bytes, job_id: str) -> Outcome:
    """How a generation job ended. Raises `UndecodableRecord`."""
    try:
        record = _result_record_decoder.decode(raw)
        if record.success:
            return Outcome(id=job_id, result=_result_decoder.decode(record.result))
        return Outcome(id=job_id, error=_decode_error(record.result))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableRecord(f"not a result record: {error}") from error


def _decode_error(raw: msgspec.Raw) -> JobError:
    try:
        return _error_decoder.decode(raw)
    except msgspec.ValidationError:
        # A stock arq worker reports its own failures as a plain value.
        return JobError.of(ErrorCode.INTERNAL, str(_any_decoder.decode(raw)))


def error_of(exception: BaseException) -> JobError:
    """The `JobError` that says what an exception says."""
    if isinstance(exception, JobFailed):
        return exception.error
    error = getattr(exception, "error", None)
    if isinstance(error, JobError):
        return error
    if isinstance(exception, asyncio.CancelledError):
        return JobError.of(ErrorCode.CANCELLED, "The job was cancelled")
    return JobError.of(ErrorCode.INTERNAL, f"{type(exception).__name__}: {exception}")


def serializer(record: dict[str, object]) -> bytes:
    """For stock arq: ``create_pool(job_serializer=serializer, job_deserializer=deserializer)``.

    arq passes exceptions as they are; msgpack has no such thing, so each becomes a `JobError`.
    """
    result = record.get("r")
    if isinstance(result, BaseException):
        record = {**record, "r": error_of(result)}
    return _encoder.encode(record)


def deserializer(raw: bytes) -> dict[str, object]:
    """The other half of `serializer`: a failed record's error comes back as `JobFailed`."""
    record = _any_decoder.decode(raw)
    if not isinstance(record, dict):
        raise UndecodableRecord("not an arq record")
    if record.get("s") is False:
        record["r"] = JobFailed(_decode_error(msgspec.Raw(_encoder.encode(record["r"]))))
    return record
