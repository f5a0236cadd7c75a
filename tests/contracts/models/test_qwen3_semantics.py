"""What every backend promises about slots, pages, chunks and rows, held to the torch kernels.

All in float32, where a difference of more than rounding is a fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.contracts.models.driver import Driver, int32, small_model
from tidemill_contracts.models.contract import StageInputs

PROMPT = random.Random(0).choices(range(101), k=50)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def driver(model_dir: Path) -> Driver:
    return Driver(model_dir)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def poison_unused(driver: Driver) -> None:
    """NaN wherever nothing has been written yet."""
    for pool in (driver.cache.k, driver.cache.v):
        pool[pool == 0] = float("nan")


def with_slots(change: Callable[[Tensor], Tensor]) -> Callable[[StageInputs], StageInputs]:
    return lambda inputs: replace(inputs, slot_mapping=change(inputs.slot_mapping))


class TestCache:
    def test_pages_start_zeroed(self, driver: Driver) -> None:
        assert not driver.cache.k.any()
        assert not driver.cache.v.any()

    def test_bytes_per_page_is_what_allocate_takes(self, driver: Driver) -> None:
        cache = driver.spec.allocate(3)
        assert cache.k.nbytes + cache.v.nbytes == 3 * driver.spec.bytes_per_page

    def test_only_the_slots_of_the_step_are_written(self, driver: Driver) -> None:
        row = driver.row()
        driver.prefill((row, PROMPT[:20]))
        driver.decode((row, PROMPT[20]))
        written = driver.cache.k.ne(0).any(-1).any(-1)
        expected = torch.zeros_like(written)
        for place in range(21):
            expected[:, row.pages[place // 16], place % 16] = True
        assert torch.equal(written, expected)
        assert torch.equal(driver.cache.v.ne(0).any(-1).any(-1), expected)


class TestSlots:
    def test_prefill_does_not_write_negative_slots(self, driver: Driver) -> None:
        driver.edit = with_slots(lambda slots: torch.full_like(slots, -1))
        driver.prefill((driver.row(), PROMPT))
        assert not driver.cache.k.any()
        assert not driver.cache.v.any()

    def test_decode_does_not_write_negative_slots(self, driver: Driver) -> None:
        row = driver.row()
        driver.prefill((row, PROMPT[:5]))
        before = driver.cache.k.clone(), driver.cache.v.clone()
        driver.edit = with_slots(lambda slots: torch.full_like(slots, -17))
        driver.decode((row, PROMPT[5]))
        assert torch.equal(driver.cache.k, before[0])
        assert torch.equal(driver.cache.v, before[1])

    def test_a_negative_slot_does_not_keep_its_neighbours_from_being_written(
        self, driver: Driver
    ) -> None:
        driver.edit = with_slots(lambda slots: slots.where(torch.arange(len(slots)) != 2, -1))
        row = driver.row()
        driver.prefill((row, PROMPT[:4]))
        written = driver.cache.k[0, row.pages[0], :5].ne(0).any(-1).any(-1)
        assert written.tolist() == [True, True, False, True, False]


class TestWhatIsNeverRead:
    def test_a_nan_outside_a_rows_own_places_reaches_nothing(
        self, driver: Driver, model_dir: Path
    ) -> None:
        """Tails of pages, pages of others and pages of nobody; short rows beside long ones."""
        prompts = [PROMPT[:1], PROMPT[:17], PROMPT[:16], PROMPT]
        clean = Driver(model_dir)
        expected = clean.generate(prompts, 4)
        poison_unused(driver)
        assert torch.equal(driver.generate(prompts, 4), expected)

    def test_a_nan_in_the_tail_reaches_no_later_chunk(self, driver: Driver) -> None:
        poison_unused(driver)
        row = driver.row()
        for start in range(0, 50, 13):
            assert driver.prefill((row, PROMPT[start : start + 13])).isfinite().all()

    @pytest.mark.parametrize("garbage", [-1, -(2**31), 2**31 - 1])
    def test_unused_block_table_entries(
        self, driver: Driver, model_dir: Path, garbage: int
    ) -> None:
        prompts = [PROMPT[:3], PROMPT[:40]]
        expected = Driver(model_dir).generate(prompts, 3)
        driver.edit = lambda inputs: replace(
            inputs, block_table=inputs.block_table.where(inputs.block_table >= 0, garbage)
        )
        assert torch.equal(driver.generate(prompts, 3), expected)


class TestChunks:
    @pytest.mark.parametrize("chunk", [1, 15, 16, 49])
    def test_chunked_is_whole(self, driver: Driver, chunk: int) -> None:
        close(driver.generate([PROMPT], 3, chunk=chunk), driver.generate([PROMPT], 3))

    def test_chunks_of_different_progress_share_a_call(self, driver: Driver) -> None:
        one, other = driver.row(), driver.row()
        driver.prefill((one, PROMPT[:30]))
        together = driver.prefill((one, PROMPT[30:]), (other, PROMPT[:7]))
        close(together[0:1], driver.prefill((driver.row(), PROMPT)))
        close(together[1:2], driver.prefill((driver.row(), PROMPT[:7])))

    def test_decode_is_prefill_of_one_token(self, driver: Driver) -> None:
        row = driver.row()
        driver.prefill((row, PROMPT[:-1]))
        close(
            driver.decode((row, PROMPT[-1])),
            driver.prefill((driver.row(), PROMPT)),
        )

    def test_chunk_offsets_say_where_a_chunk_lies(self, driver: Driver) -> None:
        """The packed order need not be the rows' order."""
        expected = driver.prefill((driver.row(), PROMPT[:9]), (driver.row(), PROMPT[9:30]))

        def swap(inputs: StageInputs) -> StageInputs:
            assert inputs.chunk_offsets is not None
            return replace(
                inputs,
                input_ids=torch.cat((inputs.input_ids[9:], inputs.input_ids[:9])),
                slot_mapping=torch.cat((inputs.slot_mapping[9:], inputs.slot_mapping[:9])),
                chunk_offsets=int32([21, 0]),
            )

        driver.edit = swap
        close(driver.prefill((driver.row(), PROMPT[:9]), (driver.row(), PROMPT[9:30])), expected)


class TestPages:
    @pytest.mark.parametrize("page_size", [1, 5, 128])
    def test_the_page_size_does_not_matter(self, model_dir: Path, page_size: int) -> None:
        prompts = [PROMPT[:4], PROMPT]
        found = Driver(model_dir, page_size=page_size).generate(prompts, 4, chunk=19)
        close(found, Driver(model_dir).generate(prompts, 4, chunk=19))

    def test_rows_may_share_the_pages_of_a_common_prefix(self, driver: Driver) -> None:
        first, second = driver.row(), driver.row()
        driver.prefill((first, PROMPT[:32]))
        second.pages, second.tokens = list(first.pages), list(first.tokens)
        found = driver.prefill((second, PROMPT[32:]))
        close(found, driver.prefill((driver.row(), PROMPT)))

    def test_positions_are_absolute(self, driver: Driver) -> None:
        """The same chunk elsewhere in a row gives other logits."""
        repeated, once = driver.row(), driver.row()
        driver.prefill((repeated, [5] * 16))
        later = driver.prefill((repeated, PROMPT[:16]))
        assert not torch.allclose(later, driver.prefill((once, PROMPT[:16])), atol=1e-2)


class TestRows:
    def test_padding_rows_that_repeat_row_0_change_nothing(self, driver: Driver) -> None:
        rows = [driver.row(), driver.row()]
        driver.prefill((rows[0], PROMPT[:20]), (rows[1], PROMPT[:3]))
        k, v = driver.cache.k.clone(), driver.cache.v.clone()
        expected = driver.decode((rows[0], 4), (rows[1], 5))
        after = driver.cache.k.clone(), driver.cache.v.clone()
        driver.cache.k.copy_(k)
        driver.cache.v.copy_(v)
        for row in rows:
            row.tokens.pop()

        def pad(inputs: StageInputs) -> StageInputs:
            def padded(tensor: Tensor) -> Tensor:
                return torch.cat((tensor, tensor[:1], tensor[:1]))

            return replace(
                inputs,
                input_ids=padded(inputs.input_ids),
                seq_lens=padded(inputs.seq_lens),
                block_table=padded(inputs.block_table),
                slot_mapping=padded(inputs.slot_mapping),
                logits=driver_logits,
            )

        driver_logits = torch.empty(4, driver.config.vocab_size)
        driver.edit = pad
        driver.decode((rows[0], 4), (rows[1], 5))
        close(driver_logits[:2], expected)
        close(driver_logits[2:], expected[:1].expand(2, -1))
        close(driver.cache.k, after[0])
        close(driver.cache.v, after[1])

    def test_the_order_of_rows_does_not_matter(self, driver: Driver) -> None:
        lengths = [3, 50, 1, 17, 16, 40, 2]
        rows = [driver.row() for _ in lengths]
        driver.prefill(*((row, PROMPT[:length]) for row, length in zip(rows, lengths, strict=True)))
        work = [(row, token) for token, row in enumerate(rows)]
        expected = driver.decode(*work)
        order = [4, 2, 6, 0, 5, 3, 1]
        for row in rows:
            row.tokens.pop()
        close(driver.decode(*(work[index] for index in order)), expected[order])

    def test_how_decode_groups_rows_does_not_matter(
        self, driver: Driver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prompts = [PROMPT[:length] for length in (1, 2, 30, 31, 32, 33, 50)]
        expected = driver.generate(prompts, 4)
        monkeypatch.setattr("tidemill_contracts.models.qwen3.ops.reference.CPU_GROUP_BYTES", 1)
        close(driver.generate(prompts, 4), expected)


class TestOutputs:
    def test_logits_are_float32_in_any_model_dtype(self, model_dir: Path) -> None:
        driver = Driver(model_dir, dtype=torch.bfloat16)
        assert driver.prefill((driver.row(), PROMPT)).dtype == torch.float32

    def test_nothing_is_recorded_for_autograd(self, driver: Driver) -> None:
        with torch.enable_grad():
            logits = driver.prefill((driver.row(), PROMPT))
        assert not logits.requires_grad
        assert not driver.cache.k.requires_grad

    def test_bfloat16_stays_close_to_float32(self, model_dir: Path) -> None:
        """Tolerance: bf16 keeps 8 bits, so about 1% of the logits' spread on average and 8% at
        worst after two layers; a wrong cast or norm is several times that."""
        prompts = [PROMPT, PROMPT[:20], PROMPT[:3]]
        whole = Driver(model_dir)
        half = Driver(model_dir, dtype=torch.bfloat16)
        for prompt in prompts:
            expected = whole.prefill((whole.row(), prompt))
            error = (half.prefill((half.row(), prompt)) - expected).abs()
            assert error.mean() < 0.02 * expected.std()
            assert error.max() < 0.08 * expected.std()
