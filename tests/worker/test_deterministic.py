"""Deterministic mode: a job's tokens and log probabilities are its own, to the last bit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.contracts.models.driver import small_config, small_model, small_moe_config
from tests.worker.served import batcher, generate
from tidemill_contracts.models.errors import ContractMismatch
from tidemill_contracts.models.qwen3.ops import deterministic
from tidemill_contracts.models.qwen3.ops.deterministic import DeterministicOps
from tidemill_contracts.wire import GenerationJob, GenerationResult, SamplingParams
from tidemill_worker.engine.row import Row
from tidemill_worker.engine.scheduler import Scheduler

VOCABULARY = 101
OPTIONS: list[dict[str, object]] = [
    {"temperature": 0},
    {"temperature": 1, "seed": 3},
    {"temperature": 1.5, "seed": 4, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2, "logit_bias": {5: 1.0}},
    {"temperature": 1, "seed": 9, "top_k": 20, "min_p": 0.02},
]
CHANGES: dict[str, dict[str, object]] = {
    "one batch": {},
    "chunks of 5": {"max_step_tokens": 5, "max_rows": 4},
    "other pages": {"page_size": 4},
    "preempted": {"page_size": 1, "kv_pages": 120, "prefix_caching": False},
}


def _jobs(count: int = 32) -> list[GenerationJob]:
    rng = random.Random(5)
    return [
        GenerationJob(
            id=f"job-{index}",
            prompt_token_ids=rng.choices(range(VOCABULARY), k=rng.choice([1, 3, 15, 40, 64, 100])),
            sampling=SamplingParams(
                max_tokens=4,
                ignore_eos=True,
                logprobs=3,
                **OPTIONS[index % len(OPTIONS)],  # type: ignore[arg-type]
            ),
        )
        for index in range(count)
    ]


async def _run(
    model_dir: Path, batches: Sequence[Sequence[GenerationJob]], **settings: object
) -> list[tuple[str, GenerationResult]]:
    """The results of each batch, one batch after another, by the ids of their jobs."""
    found = []
    async with batcher(model_dir, **settings) as model:
        for batch in batches:
            results = await asyncio.gather(*(generate(model, job) for job in batch))
            found += [(result.id, result) for result in results]
    return found


def _bits(result: GenerationResult) -> object:
    assert result.logprobs is not None
    # Python compares floats to the last bit.
    return result.token_ids, [(place.logprob, place.top) for place in result.logprobs]


async def _alone(
    model_dir: Path, jobs: list[GenerationJob], **settings: object
) -> dict[str, object]:
    batches = [[job] for job in jobs]
    found = await _run(model_dir, batches, prefix_caching=False, **settings)
    return {id_: _bits(result) for id_, result in found}


def _shuffled(jobs: Sequence[GenerationJob], seed: int) -> list[GenerationJob]:
    return random.Random(seed).sample(list(jobs), len(jobs))


@pytest.fixture(scope="module", params=["dense", "moe"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = small_config if request.param == "dense" else small_moe_config
    return small_model(tmp_path_factory.mktemp("model"), config=config)


@pytest.fixture
def preemptions(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows that are preempted in the test."""
    found: list[Row] = []
    put_back = Scheduler._put_back

    def noted(self: Scheduler, row: Row) -> None:
        found.append(row)
        put_back(self, row)

    monkeypatch.setattr(Scheduler, "_put_back", noted)
    return found


@pytest.mark.parametrize(
    ("model_dir", "dtype", "kernels"),
    [
        ("dense", "float32", "auto"),
        ("dense", "float32", "torch"),
        ("dense", "bfloat16", "auto"),
        ("moe", "bfloat16", "auto"),
    ],
    indirect=["model_dir"],
)
async def test_no_batch_chunk_cache_or_preemption_changes_a_bit(
    model_dir: Path, dtype: str, kernels: str, preemptions: list[Row]
) -> None:
    jobs = _jobs()
    settings: dict[str, object] = {"dtype": dtype, "deterministic": True, "kernels": kernels}
    alone = await _alone(model_dir, jobs, **settings)
    sizes = [_shuffled(jobs[:size], size) for size in (2, 7, 16, 17, 32)]
    found = [("sizes", *each) for each in await _run(model_dir, sizes, **settings)]
    assert any(result.usage.cached_tokens for _, _, result in found), "none came from the cache"
    for name, change in CHANGES.items():
        batch = _shuffled(jobs, 1)
        found += [(name, *r) for r in await _run(model_dir, [batch], **{**settings, **change})]
    assert preemptions
    one_by_one = {"max_step_tokens": 1, "max_rows": 1}
    found += [("tokens", *r) for r in await _run(model_dir, [jobs[:5]], **settings, **one_by_one)]
    assert [(name, id_) for name, id_, result in found if _bits(result) != alone[id_]] == []


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_is_told_of_a_prompt_is_the_same_bits_in_any_batch(
    model_dir: Path, dtype: str, kernels: str
) -> None:
    jobs = [
        GenerationJob(
            id=job.id,
            prompt_token_ids=job.prompt_token_ids,
            sampling=SamplingParams(
                max_tokens=1, temperature=0, prompt_logprobs=3, logprob_token_ids=[4, 100]
            ),
        )
        for job in _jobs(9)
    ]

    def told(result: GenerationResult) -> object:
        assert result.prompt_logprobs is not None
        return [(e.logprob, e.top, e.listed) if e else None for e in result.prompt_logprobs]

    settings: dict[str, object] = {"dtype": dtype, "deterministic": True, "kernels": kernels}
    alone = dict(await _run(model_dir, [[job] for job in jobs], prefix_caching=False, **settings))
    assert len({str(told(result)) for result in alone.values()}) == len(jobs)
    for change in ({}, {"max_step_tokens": 5, "max_rows": 4}):
        batches = [_shuffled(jobs[:size], size) for size in (2, 5, 9)]
        for id_, result in await _run(model_dir, batches, **settings, **change):
            assert told(result) == told(alone[id_]), (id_, change)


async def test_the_demo_model_in_its_own_dtype() -> None:
    jobs = [
        GenerationJob(
            id=f"job-{index}",
            prompt="Count the words: " + "one two " * index,
            sampling=SamplingParams(max_tokens=3, temperature=index % 2, seed=1, logprobs=2),
        )
        for index in range(0, 15, 5)
    ]
    settings: dict[str, object] = {"dtype": None, "deterministic": True}
    alone = await _alone(Path("demo"), jobs, **settings)
    for change in ({}, {"max_step_tokens": 9, "max_rows": 3}):
        for id_, result in await _run(Path("demo"), [jobs], **settings, **change):
            assert _bits(result) == alone[id_], (id_, change)


async def test_a_product_that_adds_otherwise_in_large_batches_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: this is what libraries do."""

    def split_when_large(self: DeterministicOps, x: Tensor, weight: Tensor) -> Tensor:
        if len(x) <= 4:
            return functional.linear(x, weight)
        half = x.shape[1] // 2
        first = functional.linear(x[:, :half], weight[:, :half])
        return first + functional.linear(x[:, half:], weight[:, half:])

    monkeypatch.setattr(DeterministicOps, "linear", split_when_large)
    model_dir, jobs = small_model(tmp_path / "model"), _jobs(12)
    settings = {"dtype": "float32", "deterministic": True, "prefix_caching": False}
    alone = dict(await _run(model_dir, [[job] for job in jobs], **settings))
    together = dict(await _run(model_dir, [jobs], **settings))
    assert any(_bits(alone[id_]) != _bits(together[id_]) for id_ in alone)


class _PlaceMatters:
    """`torch.mm` that adds something to the last row of every product."""

    def __init__(self, rows: int) -> None:
        self._mm = torch.mm
        self._rows = rows

    def __call__(self, x: Tensor, y: Tensor, **out: Tensor) -> Tensor:
        product = self._mm(x, y, **out)
        if len(x) >= self._rows:
            product[-1] += 1
        return product


@pytest.fixture
def faulty_products(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(deterministic.torch, "mm", _PlaceMatters(request.param))


@pytest.mark.parametrize("faulty_products", [32], indirect=True)
@pytest.mark.usefixtures("faulty_products")
def test_a_smaller_tile_is_taken_where_a_place_in_the_larger_one_matters() -> None:
    x, weight = torch.randn(40, 24), torch.randn(8, 24)
    expected = DeterministicOps().linear(x[3:4], weight)
    assert torch.equal(DeterministicOps().linear(x, weight)[3:4], expected)
    torch.testing.assert_close(DeterministicOps().linear(x, weight), x @ weight.t())


@pytest.mark.parametrize("faulty_products", [1], indirect=True)
@pytest.mark.usefixtures("faulty_products")
def test_a_machine_without_such_a_tile_is_refused() -> None:
    with pytest.raises(deterministic.ModelError, match="Deterministic mode cannot be had"):
        DeterministicOps().linear(torch.randn(2, 24), torch.randn(8, 24))


def test_silu_does_not_depend_on_where_a_number_stands() -> None:
    ops, x = DeterministicOps(), torch.randn(700, 2 * 49)
    together = ops.silu_and_mul(x)
    for rows in (1, 2, 13, 699):
        assert torch.equal(ops.silu_and_mul(x[-rows:]), together[-rows:])
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(together, functional.silu(gate) * up)


@pytest.mark.parametrize(
    "settings", [{}, {"max_step_tokens": 5, "max_rows": 4}, CHANGES["preempted"]]
)
async def test_in_ordinary_mode_the_tokens_are_the_same_in_float32(
    model_dir: Path, settings: dict[str, object]
) -> None:
    jobs = _jobs(20)
    alone = dict(await _run(model_dir, [[job] for job in jobs], prefix_caching=False))
    for id_, result in await _run(model_dir, [_shuffled(jobs, 2)] * 2, **settings):
        assert result.token_ids == alone[id_].token_ids, id_


async def test_what_is_not_shown_for_a_device_is_refused(model_dir: Path) -> None:
    """The contract's own check: torch's meta device stands for one that is no CPU."""
    with pytest.raises(ContractMismatch, match="deterministic: found device meta"):
        async with batcher(model_dir, deterministic=True, device="meta"):
            pass
