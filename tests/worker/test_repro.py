"""What a row that failed in the model tells of itself is enough to make it fail again."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from tests.worker.engine.conftest import make_row
from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobError,
    JobFailed,
    SamplingParams,
)
from tidemill_contracts.wire.errors import MAX_REPRO_BYTES
from tidemill_producer.batch.formats.tidemill import TidemillFormat
from tidemill_producer.batch.rows import OutputRow, Row, read_rows
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine.row import FailedStep
from tidemill_worker.engine.row import Row as EngineRow
from tidemill_worker.repro import make_repro
from tidemill_worker.settings import make_config

PROMPT = [5, 17, 40, 3]
OPTIONS = SamplingParams(
    temperature=1.5,
    n=3,
    max_tokens=20,
    ignore_eos=True,
    logit_bias={7: -3.0},
    stop_token_ids=[9],
    min_tokens=20,
)


def _failed_row(prompt: list[int], generated: int = 0) -> EngineRow:
    row = make_row(prompt, 50, name="job-1")
    for token in range(generated):
        row.append(token, 0.0)
    row.failed_step = FailedStep("decode", len(prompt) + generated - 1, 1)
    return row


def _as_batch_row(repro: object) -> Row:
    (row,) = read_rows([(1, msgspec.json.encode(repro))], TidemillFormat(), run_id="run")
    assert isinstance(row, Row), row
    return row


async def _outcome(batcher: Batcher, job: GenerationJob) -> GenerationResult | JobError:
    try:
        return await batcher.generate(job, job.id or "job", time.time())
    except JobFailed as failure:
        return failure.error


@pytest.mark.parametrize("fault", ["raises", "not finite"])
async def test_a_row_that_failed_fails_again_and_goes_through_once_the_fault_is_gone(
    tiny_model: Path, fault: str
) -> None:
    batcher = await Batcher.start(
        make_config({"model": str(tiny_model), "dtype": "float32", "threads": 1, "kv_pages": 64})
    )
    decode = batcher.runner.decode
    seen: list[list[int]] = []

    def faulty(rows, tables):  # type: ignore[no-untyped-def]
        logits = decode(rows, tables)
        for line, row in enumerate(rows):
            if row.token_ids[:4] == PROMPT and row.generated == 6 and row.id.endswith(wrong):
                seen.append(list(row.token_ids))
                if fault == "raises":
                    raise RuntimeError("planted fault")
                logits[line] = float("nan")
        return logits

    batcher.runner.decode = faulty  # type: ignore[method-assign]
    try:
        wrong = "#1"
        job = GenerationJob(id="job-1", prompt_token_ids=PROMPT, sampling=OPTIONS)
        error = await _outcome(batcher, job)
        assert isinstance(error, JobError)
        assert isinstance(error.repro, dict)
        assert error.repro["custom_id"] == "repro-job-1#1"
        step = {name: error.repro["metadata"][name] for name in ("phase", "computed", "length")}
        assert step == {"phase": "decode", "computed": "9", "length": "1"}

        # As it stands in the output of `tidemill batch`, after the way over Redis.
        line = TidemillFormat().encode(OutputRow(custom_id="r", error=error))
        again = _as_batch_row(json.loads(line)["error"]["repro"]).job
        wrong = ""
        error = await _outcome(batcher, again)
        assert isinstance(error, JobError)
        assert error.code in (ErrorCode.ENGINE_ERROR, ErrorCode.NONFINITE_LOGITS)
        assert seen[-1] == seen[0], "not the same tokens led to the fault"

        wrong = "nothing"
        result = await _outcome(batcher, again)
        assert isinstance(result, GenerationResult)
        assert [*PROMPT, *result.token_ids[:6]] == seen[0]
        assert len(result.token_ids) == 7
    finally:
        await batcher.close()


def test_a_failure_that_is_not_the_models_has_no_repro() -> None:
    error = JobError.of(ErrorCode.EXPIRED, "late")
    assert "repro" not in json.loads(msgspec.json.encode(error))


def test_the_sampling_is_told_as_a_job_writes_it() -> None:
    job = GenerationJob(prompt="text", sampling=OPTIONS, metadata={"mine": "x"}, model="m")
    repro = make_repro(job, _failed_row([1, 2, 3], 4))
    assert repro["model"] == "m"
    found = _as_batch_row(repro).job
    assert found.prompt is None
    assert found.prompt_token_ids == [1, 2, 3]
    sampling = found.sampling
    assert (sampling.temperature, sampling.seed, sampling.n) == (0.0, 0, 1)
    assert (sampling.max_tokens, sampling.logit_bias) == (5, {7: -3.0})
    assert "skip_special_tokens" not in repro["sampling"]  # a default says nothing


@pytest.mark.parametrize("tokens", [10, 2_000, 50_000])
def test_a_repro_is_bounded_and_says_what_is_left_out(tokens: int) -> None:
    sampling = SamplingParams(
        logit_bias=dict.fromkeys(range(4000), 0.25),
        stop=["\N{SNOWMAN}" * 256] * 32,
        allowed_token_ids=list(range(4_096)),
    )
    job = GenerationJob(prompt_token_ids=[1], sampling=sampling)
    repro = make_repro(job, _failed_row(list(range(tokens))))
    assert len(msgspec.json.encode(repro)) <= MAX_REPRO_BYTES
    left_out = repro["metadata"]["left_out"].split(", ")
    assert {"logit_bias", "allowed_token_ids", "stop"} <= set(left_out)
    assert ("prompt_token_ids" in left_out) == (tokens == 50_000)
    assert repro["metadata"]["prompt_tokens"] == str(tokens)
    assert len(repro["metadata"]["prompt_sha256"]) == 64
    _as_batch_row({"prompt_token_ids": [1], **repro})
