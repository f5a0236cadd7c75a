"""What the worker's options come to for one model and one machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.contracts.models.driver import small_config
from tests.contracts.models.toy import toy_contract
from tidemill_contracts.models import runtime as runtime_module
from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.contract import RuntimeConfig
from tidemill_contracts.models.errors import ContractMismatch, ModelError
from tidemill_contracts.models.runtime import (
    KV_MEMORY_SHARE,
    RuntimeOptions,
    find_device,
    free_memory,
    plan_runtime,
)

CONFIG = ModelConfig.from_hf(small_config(), "the/model")


def plan(
    limits: dict[str, int] | None = None, config: ModelConfig = CONFIG, **options: Any
) -> RuntimeConfig:
    contract = replace(toy_contract(), limits=limits or {})
    return plan_runtime(config, contract, RuntimeOptions(**options))


def test_what_is_not_given_comes_from_model_and_contract() -> None:
    runtime = plan()
    assert (runtime.dtype, runtime.max_seq_len, runtime.page_size) == (torch.float32, 512, 32)
    runtime = plan({"max_seq": 100, "page_size": 128})
    assert (runtime.max_seq_len, runtime.page_size) == (100, 128)
    runtime = plan({"page_size": 128}, page_size=64, max_model_len=33, dtype="bfloat16")
    assert (runtime.dtype, runtime.max_seq_len, runtime.page_size) == (torch.bfloat16, 33, 64)


def test_a_step_has_room_for_every_row() -> None:
    assert plan(max_rows=64, max_step_tokens=8).max_step_tokens == 64


def test_the_logits_of_one_score_call_stay_within_their_bytes() -> None:
    # 64 MiB of float32 are 110 rows of Qwen3's vocabulary; the toy's is small.
    assert plan(config=replace(CONFIG, vocab_size=151_936)).max_logit_rows == 110
    assert plan(max_step_tokens=300).max_logit_rows == 300


def test_pages_are_as_many_as_rows_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(max_rows=3, max_model_len=65).total_kv_pages == 3 * 3
    assert plan(kv_pages=7).total_kv_pages == 7


def test_pages_stay_within_their_share_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks = toy_contract().hooks
    weights = hooks.weight_bytes(CONFIG, plan())
    monkeypatch.setattr(runtime_module, "free_memory", lambda device: weights + 100_000)
    page_bytes = hooks.cache_spec(CONFIG, plan(kv_pages=1)).bytes_per_page
    assert plan().total_kv_pages == int(100_000 * KV_MEMORY_SHARE) // page_bytes
    monkeypatch.setattr(runtime_module, "free_memory", lambda device: 0)
    assert plan().total_kv_pages == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_model_len": 513}, "max_model_len: found 513, expected at most 512"),
        ({"dtype": "float16"}, "dtype: found float16, expected bfloat16 or float32"),
    ],
)
def test_what_the_model_cannot_do_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractMismatch, match=said):
        plan(**options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("npu", "torch_npu"),
        ("npu:1", "torch_npu"),
        ("abacus", "no such device"),
        ("cuda", "no CUDA device"),
    ],
)
def test_a_device_that_is_not_there_is_named(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        find_device(name)


def test_free_memory_is_what_the_system_says() -> None:
    free = free_memory(torch.device("cpu"))
    assert 2**20 < free < 2**50
