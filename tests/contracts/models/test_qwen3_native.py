"""The C++ step against its torch twin: the same numbers, the same bits in any company, and the
same care about what does not belong to a row.

Everything runs with weights in bf16 and in int8, and twice where the machine has a matrix unit: on
it, and in the plain loops that stand for it elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contracts.models.driver import Driver, int32, small_config, small_model
from tidemill_contracts.models.contract import Quantization
from tidemill_contracts.models.errors import BackendError
from tidemill_contracts.models.qwen3 import int8
from tidemill_contracts.models.qwen3.native import choice, layout, library
from tidemill_contracts.models.qwen3.native.stage import NativeStage

PORTABLE = "x86-64-v3"
ARCHITECTURES = [PORTABLE] if library.lacking() else ["native", PORTABLE]

compiles = pytest.mark.skipif(library.find_compiler() is None, reason="no C++ compiler here")

SHAPES: dict[str, dict[str, Any]] = {
    "groups of two": {},
    "groups of five": {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64},
    "no groups": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128},
    "untied": {"tie_word_embeddings": False, "hidden_size": 192, "vocab_size": 528},
}


def fitting(**changes: Any) -> dict[str, Any]:
    shape = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 192, "vocab_size": 112}
    return small_config(**{**shape, "dtype": "bfloat16", **changes})


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setattr(choice, "library", partial(library.library, name))
    return name


@pytest.fixture(params=[None, "int8"], ids=["bf16", "int8"])
def quantization(request: pytest.FixtureRequest) -> Quantization | None:
    name: Quantization | None = request.param
    return name


def drivers(
    folder: Path, quantization: Quantization | None = None, **changes: Any
) -> tuple[Driver, Driver, Driver]:
    """The same weights on the library, in torch in bf16, and in torch in float32."""
    model = small_model(folder, config=fitting, **changes)
    driver = partial(Driver, model, page_size=32, quantization=quantization)
    native = driver(dtype=torch.bfloat16)
    plain = driver(dtype=torch.bfloat16, kernels="torch")
    exact = driver(dtype=torch.float32)
    return native, plain, exact


@pytest.fixture
def native(tmp_path: Path, architecture: str, quantization: Quantization | None) -> Driver:
    found = drivers(tmp_path, quantization)[0]
    assert isinstance(found.compiled["prefill"], NativeStage)
    return found


def prompts(*lengths: int, vocabulary: int = 112) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(vocabulary), k=length) for length in lengths]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def forced(driver: Driver, rows: Sequence[Sequence[int]], chunk: int, decoded: int = 3) -> Tensor:
    """Logits [rows, decoded + 1, V]: the last tokens of each row are decoded one by one."""
    states = [driver.row() for _ in rows]
    most = max(map(len, rows)) - decoded
    out = torch.empty(len(rows), decoded + 1, driver.config.vocab_size)
    for start in range(0, most, chunk):
        parts = [
            (index, row[start : min(start + chunk, len(row) - decoded)])
            for index, row in enumerate(rows)
            if start < len(row) - decoded
        ]
        logits = driver.prefill(*((states[index], tokens) for index, tokens in parts))
        out[[index for index, _ in parts], 0] = logits
    for step in range(decoded):
        tokens = [row[len(row) - decoded + step] for row in rows]
        out[:, step + 1] = driver.decode(*zip(states, tokens, strict=True))
    for state in states:
        driver.release(state)
    return out


@compiles
class TestAgainstTorch:
    @pytest.mark.parametrize("shape", SHAPES)
    def test_logits_are_as_near_to_float32_as_those_of_torch(
        self,
        tmp_path: Path,
        architecture: str,
        quantization: Quantization | None,
        shape: str,
    ) -> None:
        native, plain, exact = drivers(tmp_path, quantization, **SHAPES[shape])
        rows = prompts(4, 5, 36, 70, 150)
        expected = forced(exact, rows, chunk=64)
        assert error(forced(native, rows, chunk=64), expected) <= 1.5 * error(
            forced(plain, rows, chunk=64), expected
        )

    def test_score_gives_the_logits_of_any_token(self, native: Driver) -> None:
        (tokens,) = prompts(40)
        inner = native.score((native.row(), tokens), logit_rows=[39, 0, 17])
        for found, length in zip(inner, (40, 1, 18), strict=True):
            assert torch.equal(found, native.prefill((native.row(), tokens[:length]))[0])

    def test_weights_lie_as_the_twin_lays_them(self, architecture: str) -> None:
        built = layout.Tiled(library.library(architecture))
        gate, up = torch.randn(2, 96, 64).bfloat16()
        (target,) = built.allocate((192, 64), torch.bfloat16)
        built.fill((target,), [gate, up], gated=True)
        assert torch.equal(target, layout.tiled(layout.alternated(torch.cat((gate, up)))))
        built.fill((target,), [gate, up], gated=False)
        assert torch.equal(target, layout.tiled(torch.cat((gate, up))))
        assert torch.equal(layout.untiled(target), torch.cat((gate, up)))

    def test_weights_are_rounded_to_int8_as_the_twin_rounds_them(self, architecture: str) -> None:
        built = layout.TiledInt8(library.library(architecture))
        # 1,024 values of 8 bits each have halves of their largest among them: ties in rounding.
        gate, up = torch.randn(2, 96, 1024).bfloat16()
        up[3] = 0
        both = torch.cat((gate, up))
        expected, expected_scales = int8.quantize(both)
        values, scales = built.allocate((192, 1024), torch.bfloat16)
        built.fill((values, scales), [gate, up], gated=True)
        assert torch.equal(values, layout.tiled(layout.alternated(expected)))
        assert torch.equal(scales, layout.alternated(expected_scales))
        built.fill((values, scales), [gate, up], gated=False)
        assert torch.equal(layout.untiled(values), expected)
        assert torch.equal(scales, expected_scales)

    def test_pages_lie_as_the_twin_lays_them(self, tmp_path: Path, architecture: str) -> None:
        native, plain, _ = drivers(tmp_path)
        (tokens,) = prompts(50)
        for driver in (native, plain):
            driver.prefill((driver.row(), tokens))
        for pool, twin, page in (
            (native.cache.k, plain.cache.k, layout.k_page),
            (native.cache.v, plain.cache.v, layout.v_page),
        ):
            # Only the first layer's inputs are the same bits.
            for found, expected in zip(pool[0], twin[0], strict=True):
                torch.testing.assert_close(
                    found.flatten().float(), page(expected).float(), rtol=2e-2, atol=2e-2
                )


@compiles
class TestTheSameBits:
    """What `deterministic` promises holds here by construction."""

    ROWS = prompts(*range(4, 36), 50, 150)

    def test_alone_and_in_a_batch(self, native: Driver) -> None:
        together = forced(native, self.ROWS, chunk=64)
        for index in (0, 15, 16, 31, 33):
            assert torch.equal(forced(native, [self.ROWS[index]], chunk=64)[0], together[index])

    def test_whatever_the_chunks(self, native: Driver) -> None:
        rows = self.ROWS[-2:]
        whole = forced(native, rows, chunk=1000)
        for chunk in (1, 7, 32, 33):
            assert torch.equal(forced(native, rows, chunk=chunk), whole)

    def test_where_a_product_takes_its_rows_in_several_pieces(
        self, tmp_path: Path, architecture: str, quantization: Quantization | None
    ) -> None:
        """Of more than 128 rows in bf16, or 256 in int8, at this depth."""
        native = drivers(tmp_path, quantization, intermediate_size=4096)[0]
        rows = prompts(300)
        whole = forced(native, rows, chunk=1000)
        assert torch.equal(forced(native, rows, chunk=100), whole)

    def test_decoded_or_prefilled(self, native: Driver) -> None:
        row = self.ROWS[-1]
        decoded = forced(native, [row], chunk=1000, decoded=3)[0]
        for step in range(4):
            length = len(row) - 3 + step
            assert torch.equal(native.prefill((native.row(), row[:length]))[0], decoded[step])

    def test_decoded_beside_a_chunk(self, native: Driver) -> None:
        row, other = self.ROWS[-1], self.ROWS[-2]
        alone, along = native.row(), native.row()
        for state in (alone, along):
            native.prefill((state, row[:-1]))
        assert native.compiled["prefill"].decodes_along
        beside = native.prefill((native.row(), other), (along, row[-1:]))
        assert torch.equal(beside[1], native.decode((alone, row[-1]))[0])

    def test_on_any_number_of_threads(self, native: Driver) -> None:
        one = forced(native, self.ROWS, chunk=64)
        torch.set_num_threads(3)
        try:
            assert torch.equal(forced(native, self.ROWS, chunk=64), one)
        finally:
            torch.set_num_threads(1)


@compiles
class TestWhatDoesNotBelongToARow:
    def test_nan_in_unused_places_reaches_nothing(self, native: Driver) -> None:
        rows = prompts(5, 40, 64)
        clean = forced(native, rows, chunk=30)
        for pool in (native.cache.k, native.cache.v):
            pool.fill_(float("nan"))
        assert torch.equal(forced(native, rows, chunk=30), clean)

    def test_a_negative_slot_is_not_written(self, native: Driver) -> None:
        native.edit = lambda inputs: replace(inputs, slot_mapping=inputs.slot_mapping * 0 - 1)
        native.prefill((native.row(), prompts(20)[0]))
        assert not native.cache.k.any()
        assert not native.cache.v.any()

    def test_a_row_that_is_nan_spoils_no_other(self, native: Driver) -> None:
        first, second = prompts(20, 20)
        clean = native.prefill((native.row(), first), (native.row(), second))
        sick = native.row()
        native.prefill((sick, first[:10]))
        native.cache.v[:, sick.pages[0]] = float("nan")
        logits = native.prefill((sick, first[10:]), (native.row(), second))
        assert logits[0].isnan().all()
        assert torch.equal(logits[1], clean[1])

    @pytest.mark.parametrize("field", ["input_ids", "block_table", "seq_lens", "slot_mapping"])
    def test_what_points_outside_is_refused_before_anything_runs(
        self, native: Driver, field: str
    ) -> None:
        def beyond(inputs: Any) -> Any:
            return replace(inputs, **{field: int32([10**6]).expand_as(getattr(inputs, field)) + 0})

        native.edit = beyond
        with pytest.raises(BackendError, match="a token, a page or a place"):
            native.prefill((native.row(), prompts(20)[0]))
        assert not native.cache.k.any()


class TestWhereItCannotRun:
    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"hidden_size": 48}, "the hidden size of 48 is no multiple of 32"),
            ({"head_dim": 16}, "the head size of 16 is no multiple of 32"),
            ({"vocab_size": 101}, "the vocabulary of 101 is no multiple of 16"),
        ],
    )
    def test_other_shapes_run_in_torch(
        self, tmp_path: Path, changes: dict[str, Any], reason: str
    ) -> None:
        driver = Driver(
            small_model(tmp_path, config=fitting, **changes), page_size=32, dtype=torch.bfloat16
        )
        sizes = choice.Sizes.of(driver.config)
        assert choice.obstacle("dense", None, sizes, driver.runtime) == reason
        assert driver.prefill((driver.row(), [1, 2, 3])).isfinite().all()

    def test_int8_takes_tiles_that_are_twice_as_deep(self, tmp_path: Path) -> None:
        model = small_model(tmp_path, config=fitting, intermediate_size=96)
        driver = Driver(model, page_size=32, dtype=torch.bfloat16, quantization="int8")
        reason = choice.obstacle("dense", "int8", choice.Sizes.of(driver.config), driver.runtime)
        assert reason == "the intermediate size of 96 is no multiple of 64"
        assert driver.prefill((driver.row(), [1, 2, 3])).isfinite().all()

    def test_without_a_compiler_or_a_matrix_unit_the_same_model_runs_in_torch(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        quantization: Quantization | None,
    ) -> None:
        def missing() -> library.Library:
            raise library.NoLibrary("no C++ compiler is installed")

        monkeypatch.setattr(choice, "library", missing)
        without, plain, _ = drivers(tmp_path, quantization)
        rows = prompts(5, 40)
        assert torch.equal(forced(without, rows, chunk=30), forced(plain, rows, chunk=30))

    @pytest.mark.parametrize(
        ("compiler", "said"),
        [("/bin/false", "does not run"), ("/does/not/exist", "does not run")],
    )
    def test_a_compiler_that_fails_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
    ) -> None:
        monkeypatch.setenv("CXX", compiler)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(library.NoLibrary, match=said):
            library.library.__wrapped__(PORTABLE)

    @compiles
    def test_the_library_is_built_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(library, "OPTIONS", ("-std=c++20", *library.OPTIONS[3:]))
        library.library.__wrapped__(PORTABLE)
        (built,) = (tmp_path / "tidemill").iterdir()
        before = built.stat().st_mtime_ns
        library.library.__wrapped__(PORTABLE)
        assert built.stat().st_mtime_ns == before
