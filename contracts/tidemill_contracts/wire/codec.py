"""Bytes to messages and back: msgpack on Redis, JSON in files. Never pickle.

Decoding a job is the one validation that producers and workers share; its errors name the field
by its path, as in ``Expected `int` >= 1 - at `$.sampling.max_tokens```.
"""

from __future__ import annotations

import msgspec

from tidemill_contracts.wire.errors import ErrorCode, InvalidMessage, JobError
from tidemill_contracts.wire.job import MAX_JOB_BYTES, SCHEMA_VERSION, GenerationJob

_msgpack_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(GenerationJob)
_json_job_decoder = msgspec.json.Decoder(GenerationJob)

JsonObject = dict[str, object]


def encode_job(job: GenerationJob) -> bytes:
    """The job as msgpack, validated as a worker will validate it.

    A struct that Python code built has not been checked by anyone yet: this decodes its own
    output, so that a bad value is refused before it reaches Redis. Raises `InvalidMessage`.
    """
    try:
        raw = _msgpack_encoder.encode(job)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise _invalid(f"The job cannot be encoded: {error}") from error
    decode_job(raw)
    return raw


def decode_job(raw: bytes) -> GenerationJob:
    """A job from msgpack. Raises `InvalidMessage` with the path of the field at fault."""
    return _decode(raw, _job_decoder)


def decode_json_job(raw: bytes | str) -> GenerationJob:
    """A job from JSON. Raises `InvalidMessage` with the path of the field at fault."""
    return _decode(raw.encode() if isinstance(raw, str) else raw, _json_job_decoder)


def convert_job(fields: object) -> GenerationJob:
    """A job from plain Python values, as arq hands them to a function.

    Raises `InvalidMessage` with the path of the field at fault.
    """
    try:
        raw = _msgpack_encoder.encode(fields)
    except (TypeError, OverflowError, UnicodeEncodeError) as error:
        raise _invalid(f"The job cannot be encoded: {error}") from error
    return decode_job(raw)


def _decode(
    raw: bytes,
    decoder: msgspec.msgpack.Decoder[GenerationJob] | msgspec.json.Decoder[GenerationJob],
) -> GenerationJob:
    if len(raw) > MAX_JOB_BYTES:
        raise _invalid(f"The job has {len(raw):,} bytes; at most {MAX_JOB_BYTES:,} are allowed")
    try:
        job = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _invalid(str(error)) from error
    if job.schema_version != SCHEMA_VERSION:
        raise InvalidMessage(
            JobError.of(
                ErrorCode.UNSUPPORTED_SCHEMA_VERSION,
                f"Schema version {job.schema_version} is not supported, only"
                f" {SCHEMA_VERSION} - at `$.schema_version`",
            )
        )
    return job


def _invalid(message: str) -> InvalidMessage:
    return InvalidMessage(JobError.of(ErrorCode.INVALID_JOB, message))
