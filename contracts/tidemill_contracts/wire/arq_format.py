"""arq's own job and result records, in msgpack.

Tidemill's jobs stay arq jobs: any arq client that is given `serializer` and `deserializer` can
enqueue one and read its result. This module writes those records without arq, so that a
producer needs no arq (arq 0.28 keeps redis-py below 6). Field names are arq's: ``t`` try, ``f``
function, ``a`` args, ``k`` kwargs, ``et``/``st``/``ft`` enqueue, start and finish time in ms,
``s`` success, ``r`` result, ``q`` queue, ``id`` job id.

A result of more than `COMPRESS_BYTES` is compressed: ``z`` is then ``zlib``, and ``r`` the
compressed msgpack of the result, as bytes. `deserializer` undoes that, so an arq client sees no
difference; who reads records without it must look at ``z``.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib

import msgspec
from msgspec import UNSET, UnsetType

from tidemill_contracts.wire.codec import encode_job
from tidemill_contracts.wire.errors import ErrorCode, JobError, JobFailed, TidemillError
from tidemill_contracts.wire.job import GenerationJob
from tidemill_contracts.wire.result import GenerationResult, Outcome

GENERATE = "generate"
"""The name of the arq function that runs a generation job."""


COMPRESS_BYTES = 64 * 1024
"""Results larger than this are compressed, in bytes of msgpack."""
MAX_RESULT_BYTES = 64 * 1024 * 1024
"""Largest result before it is compressed; a larger one is a failure of its job."""
_ZLIB = "zlib"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What `arq:job:<id>` holds. The scripts read its first and its last bytes: the order of the
    fields matters."""

    enqueue_time_ms: int = msgspec.field(name="et")
    function: str = msgspec.field(name="f")
    args: list[msgspec.Raw] = msgspec.field(name="a")
    kwargs: dict[str, msgspec.Raw] = msgspec.field(name="k")
    job_try: int | None = msgspec.field(name="t", default=None)
    reply_to: str | None = msgspec.field(name="reply_to", default=None)
    """The stream that hears of the result. This and what follows is ours: arq ignores it."""
    content: str | None = msgspec.field(name="h", default=None)
    """`content_hash` of the job."""


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
    compression: str | UnsetType = msgspec.field(name="z", default=UNSET)
    content: str | None = msgspec.field(name="h", default=None)
    """The job's, so that the id cannot be used for another job while the result is there."""


_encoder = msgspec.msgpack.Encoder()
_job_record_decoder = msgspec.msgpack.Decoder(JobRecord)
_result_record_decoder = msgspec.msgpack.Decoder(ResultRecord)
_result_decoder = msgspec.msgpack.Decoder(GenerationResult)
_error_decoder = msgspec.msgpack.Decoder(JobError)
_bytes_decoder = msgspec.msgpack.Decoder(bytes)
_any_decoder = msgspec.msgpack.Decoder()


class UndecodableRecord(TidemillError):
    """Bytes in Redis are not the record that the key promises."""


class JobCancelled(JobFailed, asyncio.CancelledError):
    """What arq's `Job.result` raises for a cancelled job: `Job.abort` waits for just that."""


def encode_job_record(
    job: GenerationJob, *, enqueue_time_ms: int, reply_to: str | None = None
) -> bytes:
    """The job as an arq record. Raises `InvalidMessage` where the job is not valid."""
    return _encoder.encode(
        JobRecord(
            enqueue_time_ms=enqueue_time_ms,
            function=GENERATE,
            args=[msgspec.Raw(encode_job(job))],
            kwargs={},
            reply_to=reply_to,
            content=content_hash(job),
        )
    )


def content_hash(job: GenerationJob) -> str:
    """32 hex digits of what the job asks for: all but its id, and how urgent it is."""
    content = msgspec.structs.replace(job, id=None, priority=0, deadline=None)
    return hashlib.blake2b(_encoder.encode(content), digest_size=16).hexdigest()


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
    content: str | None = None,
) -> bytes:
    """A result as an arq record, compressed where it is large.

    `value` is a `GenerationResult`, a `JobError`, or what another arq function returned. Where
    it cannot be encoded, or is larger than `MAX_RESULT_BYTES`, the record says so as a failure of
    this job: nothing else is disturbed.
    """
    compression: str | UnsetType = UNSET
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
    if len(result) > MAX_RESULT_BYTES:
        success = False
        result = _encoder.encode(
            JobError.of(
                ErrorCode.RESULT_TOO_LARGE,
                f"The result has {len(result):,} bytes; at most {MAX_RESULT_BYTES:,} are kept:"
                " ask for fewer tokens, outputs or log probabilities",
            )
        )
    if len(result) > COMPRESS_BYTES:
        compression, result = _ZLIB, _encoder.encode(zlib.compress(result, 1))
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
            compression=compression,
            content=content,
        )
    )


def decode_result_record(raw: bytes) -> ResultRecord:
    """The record, with its result as plain msgpack. Raises `UndecodableRecord`."""
    try:
        record = _result_record_decoder.decode(raw)
        if record.compression is UNSET:
            return record
        result = msgspec.Raw(_decompress(record.compression, _bytes_decoder.decode(record.result)))
        return msgspec.structs.replace(record, result=result, compression=UNSET)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableRecord(f"not a result record: {error}") from error


def _decompress(compression: object, packed: object) -> bytes:
    """Raises `UndecodableRecord`."""
    if compression != _ZLIB or not isinstance(packed, bytes):
        raise UndecodableRecord(f"not a result record: compressed by {compression!r:.50}")
    try:
        plain = zlib.decompressobj().decompress(packed, MAX_RESULT_BYTES + 1)
    except zlib.error as error:
        raise UndecodableRecord(f"not a result record: {error}") from error
    if len(plain) > MAX_RESULT_BYTES:
        raise UndecodableRecord(f"not a result record: more than {MAX_RESULT_BYTES:,} bytes")
    return plain


def decode_outcome(raw: bytes, job_id: str) -> Outcome:
    """How a generation job ended, from its record. Raises `UndecodableRecord`."""
    record = decode_result_record(raw)
    if (job_error := error_in(record)) is not None:
        return Outcome(id=job_id, error=job_error)
    try:
        return Outcome(id=job_id, result=_result_decoder.decode(record.result))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableRecord(f"not a result record: {error}") from error


def error_in(record: ResultRecord) -> JobError | None:
    """Why the job failed; ``None`` where it did not. Raises `UndecodableRecord`."""
    try:
        return None if record.success else _decode_error(record.result)
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
    """The other half of `serializer`: a failed record's error comes back as `JobFailed`, and a
    compressed result as it was."""
    record = _any_decoder.decode(raw)
    if not isinstance(record, dict):
        raise UndecodableRecord("not an arq record")
    if (compression := record.pop("z", None)) is not None:
        record["r"] = _any_decoder.decode(_decompress(compression, record["r"]))
    if record.get("s") is False:
        error = _decode_error(msgspec.Raw(_encoder.encode(record["r"])))
        cancelled = error.code == ErrorCode.CANCELLED
        record["r"] = JobCancelled(error) if cancelled else JobFailed(error)
    return record


def enqueue_time_of(head: bytes, tail: bytes) -> int | None:
    """When a job was enqueued, in ms, from the first 16 and the last 12 bytes of its record: ours
    begins with the time, one by `serializer` ends with it."""
    for raw in (head[1:13], tail):
        if len(raw) == 12 and raw.startswith(b"\xa2et\xcf"):
            return int.from_bytes(raw[4:])
    return None
