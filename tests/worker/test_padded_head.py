"""A model whose logits are wider than its vocabulary: what fills them up is no token."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.contracts.conformance.copies import PAD_TO, padded
from tests.contracts.models.driver import small_model
from tidemill_contracts.models.config import load_config
from tidemill_contracts.wire import GenerationJob, SamplingParams
from tidemill_worker.batcher import Batcher
from tidemill_worker.engine import runner
from tidemill_worker.settings import make_config

REAL = 101


async def test_ten_thousand_hot_draws_never_give_a_pad_row_nor_are_these_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_model(tmp_path / "model", vocab_size=REAL)
    # The pad rows repeat token 0, so that each is as likely as a token.
    monkeypatch.setattr(runner, "open_model", lambda path, _: (load_config(path), padded()))
    options = [{"top_k": 0}, {"top_k": 10**9, "top_p": 0.999}, {"min_p": 1e-9}, {"top_k": REAL}]
    jobs = [
        GenerationJob(
            prompt_token_ids=[seed + 1] * 9,
            sampling=SamplingParams(
                **{"temperature": 5, "top_k": 0, "top_p": 1, **options[seed % 4]},  # type: ignore[arg-type]
                seed=seed,
                n=16,
                max_tokens=20,
                ignore_eos=True,
                logprobs=128 if seed == 0 else None,
                prompt_logprobs=128 if seed == 0 else None,
            ),
        )
        for seed in range(32)
    ]
    model = await Batcher.start(
        make_config({"model": str(path), "dtype": "float32", "max_rows": 64, "kv_pages": 256})
    )
    try:
        assert model.runner._width == PAD_TO > REAL
        results = await asyncio.gather(
            *(model.generate(job, f"j{i}", time.time()) for i, job in enumerate(jobs))
        )
    finally:
        await model.close()
    drawn = [token for r in results for output in r.outputs for token in output.token_ids]
    assert len(drawn) > 10_000
    assert set(drawn) == set(range(REAL))
    told = [place for output in results[0].outputs for place in output.logprobs or []]
    told += [place for place in results[0].prompt_logprobs or [] if place is not None]
    assert len(told) == 16 * 20 + 8
    assert all(sorted(place.top) == list(range(REAL)) for place in told)
