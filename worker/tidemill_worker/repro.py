"""A row that failed in the model, as a row for `tidemill batch` that does the same again."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from tidemill_contracts.wire import GenerationJob, JobError, SamplingParams
from tidemill_contracts.wire.errors import MAX_REPRO_BYTES
from tidemill_worker.engine.row import Row


def with_repro(error: JobError, job: GenerationJob, row: Row) -> JobError:
    """The error of a row of the job, with what brings it about again where the model gave it."""
    if row.failed_step is None:
        return error
    return msgspec.structs.replace(error, repro=make_repro(job, row))


def make_repro(job: GenerationJob, row: Row) -> dict[str, Any]:
    """The row's prompt and sampling, its seed and every default settled, as plain JSON values.

    Of the lists that may be long, the longest are left out where it would be too large.
    """
    step = row.failed_step
    assert step is not None
    prompt = row.token_ids[: row.prompt_len]
    effective = row.sampling
    sampling = msgspec.structs.replace(
        job.sampling,
        temperature=effective.temperature,
        top_p=effective.top_p,
        top_k=effective.top_k,
        min_p=effective.min_p,
        repetition_penalty=effective.repetition_penalty,
        seed=effective.seed,
        n=1,
        max_tokens=row.generated + 1,
    )
    default = SamplingParams()
    changed = {
        name: msgspec.to_builtins(value, str_keys=True)
        for name in SamplingParams.__struct_fields__
        if (value := getattr(sampling, name)) != getattr(default, name)
    }
    metadata = {
        "phase": step.phase,
        "computed": str(step.computed),
        "length": str(step.length),
        "prompt_tokens": str(row.prompt_len),
        # Of the ids as little-endian int32.
        "prompt_sha256": hashlib.sha256(np.array(prompt, "<i4").tobytes()).hexdigest(),
    }
    repro: dict[str, Any] = {
        "custom_id": f"repro-{row.id}",
        "prompt_token_ids": prompt,
        "sampling": changed,
        "metadata": metadata,
    }
    if job.model is not None:
        repro["model"] = job.model
    left_out: list[str] = []
    while _size(repro) > MAX_REPRO_BYTES:
        lists = [(repro, "prompt_token_ids")] + [(changed, name) for name in changed]
        holder, name = max(lists, key=lambda place: _size(place[0].get(place[1])))
        del holder[name]
        left_out.append(name)
        metadata["left_out"] = ", ".join(left_out)
    return repro


def _size(value: object) -> int:
    return len(msgspec.json.encode(value))
