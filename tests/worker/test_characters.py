"""Characters that span tokens, through the batcher and real kernels: a form makes the model write
them, whatever its weights want."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_tiny_model
from tidemill_contracts.wire import (
    GenerationJob,
    GenerationResult,
    SamplingParams,
    StructuredOutput,
)
from tidemill_worker.batcher import Batcher
from tidemill_worker.settings import make_config

TEXTS = [
    "\ufffd",
    "a\ufffd\ufffdb\ufffd",
    "👩\u200d🚒 and 👩\u200d🚒",
    "汉字，标点。",
    "Příliš žluťoučký kůň",
    "e\u0301 ﷽ \U0001f1e8\U0001f1ff",
]


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "random", chat_template="")


@asynccontextmanager
async def _batcher(path: Path) -> AsyncIterator[Batcher]:
    config = make_config(
        {"model": str(path), "dtype": "float32", "threads": 1, "kv_pages": 512, "max_rows": 32}
    )
    model = await Batcher.start(config)
    try:
        yield model
    finally:
        await model.close()


async def _write(model: Batcher, text: str, **sampling: Any) -> GenerationResult:
    options = {"temperature": 1, "seed": 2, "max_tokens": 100, **sampling}
    form = StructuredOutput(choice=[text])
    job = GenerationJob(prompt="Write", sampling=SamplingParams(structured=form, **options))
    return await model.generate(job, "job", time.time())


def _bytes(model: Batcher, token_ids: list[int]) -> bytes:
    return b"".join(model.text.token_bytes[token_id] for token_id in token_ids)


async def test_replacement_and_long_characters_come_back_whole_and_stall_no_output(
    random_model: Path,
) -> None:
    async with _batcher(random_model) as model:
        results = await asyncio.gather(*(_write(model, text) for text in TEXTS))
    assert [result.text for result in results] == TEXTS
    assert all(result.finish_reason == "stop" for result in results)
    assert max(len(result.token_ids) for result in results) > 20, "characters span tokens"


async def test_a_length_that_cuts_a_character_loses_nothing_before_it(random_model: Path) -> None:
    async with _batcher(random_model) as model:
        whole = await asyncio.gather(*(_write(model, text) for text in TEXTS))
        cut = 0
        for result in whole:
            lengths = range(1, len(result.token_ids))
            assert result.text is not None
            shorter = await asyncio.gather(
                *(_write(model, result.text, max_tokens=length) for length in lengths)
            )
            for length, other in zip(lengths, shorter, strict=True):
                assert other.token_ids == result.token_ids[:length]
                raw = _bytes(model, other.token_ids)
                assert other.text == raw.decode(errors="replace")
                assert other.finish_reason == "length"
                cut += raw.decode(errors="ignore") != raw.decode(errors="replace")
    assert cut > 20


@pytest.mark.parametrize("text", TEXTS[1:])
async def test_a_stop_text_of_such_characters_is_found(random_model: Path, text: str) -> None:
    stop = text[2:]
    async with _batcher(random_model) as model:
        result = await _write(model, text + " and more", stop=[stop, "more"])
    assert (result.text, result.stop_reason) == (text[: text.find(stop)], stop)
