"""One contract under test: its models, loaded once for each page size, and how logits compare."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tidemill_contracts.models import startup
from tidemill_contracts.models.conformance.case import (
    ConformanceCase,
    ConformanceOptions,
    plan_run,
    with_page_size,
)
from tidemill_contracts.models.conformance.harness import Harness, Prompt
from tidemill_contracts.models.contract import ModelContract, RuntimeConfig, WeightSource
from tidemill_contracts.models.runtime import free_memory

MEMORY_SHARE = 0.5
"""Of the free memory: more than that a model under test does not take."""

STEPS = 3
"""Tokens of each prompt that are decoded."""


class CheckFailed(Exception):
    """The contract does not do what a check asks; the message says where."""


class CheckSkipped(Exception):
    """The check cannot be made on this contract; the message says why."""


@dataclass(frozen=True, slots=True)
class Export:
    """One call of the exporter."""

    given: Tensor
    returned: Tensor


@dataclass
class Session:
    """What the checks of one run share."""

    contract: ModelContract
    case: ConformanceCase
    options: ConformanceOptions = field(default_factory=ConformanceOptions)

    def __post_init__(self) -> None:
        self.fingerprint = self.contract.abi_fingerprint()
        self.exports: list[Export] = []
        self.source: WeightSource | None = None
        """What the model that is loaded was made from."""
        self._model: startup.ServedModel | None = None
        self._failures: dict[int, Exception] = {}
        """What start-up has raised, by page size: it is not tried twice."""

    @cached_property
    def runtime(self) -> RuntimeConfig:
        return plan_run(self.contract, self.case, self.options)

    @property
    def tolerance(self) -> float:
        """A share of the logits' standard deviation."""
        return self.case.tolerance_in(self.runtime.dtype)

    def model(self, page_size: int | None = None) -> startup.ServedModel:
        """The loaded model, on pages of `page_size` tokens; one at a time is in memory.

        Raises what start-up raises, and `CheckFailed` where the model takes more memory than there
        is to spare.
        """
        size = page_size or self.runtime.page_size
        if size in self._failures:
            raise self._failures[size]
        if self._model is None or self._model.runtime.page_size != size:
            self._model = None
            try:
                self._model = self._load(with_page_size(self.contract, self.runtime, size))
            except Exception as error:
                self._failures[size] = error
                raise
        return self._model

    def _load(self, runtime: RuntimeConfig) -> startup.ServedModel:
        self.check_memory(runtime)
        self.exports = []

        def export(tensor: Tensor) -> Tensor:
            copy = tensor.to(runtime.device, copy=True)
            self.exports.append(Export(tensor, copy))
            return copy

        def source() -> WeightSource:
            self.source = self.case.weights()
            return self.source

        return startup.load_model(self.contract, self.case.config, runtime, source, exporter=export)

    def check_memory(self, runtime: RuntimeConfig) -> None:
        """Raises `CheckFailed` where the weights take more memory than there is to spare."""
        needed = self.contract.hooks.weight_bytes(self.case.config, runtime)
        spare = int(free_memory(runtime.device) * MEMORY_SHARE)
        if needed > spare:
            raise CheckFailed(
                f"The model under test takes {needed:,} bytes of weights, and {spare:,} are to"
                " spare here. Run the kit where it fits, or give a smaller case of your own."
            )

    def harness(self, page_size: int | None = None) -> Harness:
        """New rows on zeroed pages."""
        model = self.model(page_size)
        for pool in (model.cache.k, model.cache.v):
            pool.zero_()
        return Harness(model)

    def pools(self) -> tuple[Tensor, Tensor]:
        """K and V as they lie in memory, in whichever layout.

        Raises `CheckSkipped` where this process does not see them.
        """
        model = self.model()
        cache = model.cache
        spec = self.contract.hooks.cache_spec(self.case.config, model.runtime)
        seen = 0 if cache.k.is_meta else cache.k.nbytes + cache.v.nbytes
        if seen < spec.bytes_per_page * model.runtime.total_kv_pages:
            raise CheckSkipped("the KV cache lies where this process does not see it")
        return cache.k, cache.v

    def reference(self) -> Session:
        """The reference contract with the same model, in float32 on the CPU.

        Raises `CheckSkipped` where there is none, or it is what runs already.
        """
        if self.case.reference is None:
            raise CheckSkipped("the case names no reference")
        runtime = self.runtime
        plain = runtime.device.type == "cpu" and runtime.dtype is torch.float32
        if self.case.reference is self.contract and plain and not runtime.deterministic:
            raise CheckSkipped("this run is the reference")
        return self._reference

    @cached_property
    def _reference(self) -> Session:
        assert self.case.reference is not None
        options = ConformanceOptions(dtype=torch.float32, page_size=self.runtime.page_size)
        session = Session(self.case.reference, self.case, options)
        try:
            session.check_memory(session.runtime)
        except CheckFailed as error:
            raise CheckSkipped(f"the reference does not fit: {error}") from error
        return session

    @cached_property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """As many as fit in a batch with two rows to spare, of lengths around the borders of
        pages; `STEPS` tokens of each are meant to be decoded."""
        page, most = self.runtime.page_size, self.runtime.max_seq_len - STEPS
        lengths = dict.fromkeys(
            max(1, min(length, most)) for length in (2 * page + 5, 1, page + 1, page, page - 1, 7)
        )
        chosen = list(lengths)[: max(1, self.runtime.max_batch_size - 2)]
        return tuple(self.tokens(length + STEPS, seed) for seed, length in enumerate(chosen))

    def tokens(self, length: int, seed: int = 99) -> tuple[int, ...]:
        """Random token ids of the real vocabulary."""
        return tuple(random.Random(seed).choices(range(self.case.config.vocab_size), k=length))

    def need_rows(self, rows: int) -> None:
        """Raises `CheckSkipped` where a batch may not have so many."""
        if self.runtime.max_batch_size < rows:
            raise CheckSkipped(
                f"needs {rows} rows in a step; the contract allows {self.runtime.max_batch_size}"
            )

    @cached_property
    def clean(self) -> Tensor:
        """What `prompts` give as one batch on zeroed pages, each in a single chunk."""
        return self.harness().run(self.prompts, STEPS)

    def expect_run(
        self, found: Tensor, expected: Tensor, prompts: Sequence[Prompt], unlike: str
    ) -> None:
        """Holds two results of `Harness.run` to each other, both [prompts, steps + 1, vocab]."""
        steps = expected.shape[1] - 1
        labels = [
            f"row {row}, {'prefill' if step == 0 else 'decode'} at length"
            f" {len(prompt) - steps + step}"
            for row, prompt in enumerate(prompts)
            for step in range(steps + 1)
        ]
        self.expect(found.flatten(0, 1), expected.flatten(0, 1), labels, unlike)

    def expect(self, found: Tensor, expected: Tensor, labels: Sequence[str], unlike: str) -> None:
        """Raises `CheckFailed` for the first row of logits that is not as expected.

        Both are [rows, vocabulary]; `labels` name the rows, `unlike` says what they are compared
        with.
        """
        spread = expected.std().item()
        allowed = self.tolerance * spread
        difference = (found - expected).abs()
        difference = difference.nan_to_num(nan=float("inf"))
        for label, row, ours, theirs in zip(labels, difference, found, expected, strict=True):
            token = int(row.argmax())
            if not row[token] <= allowed:
                wrong = int((row > allowed).sum())
                raise CheckFailed(
                    f"{label}: logit of token id {token} is {ours[token]:.6g}, but"
                    f" {theirs[token]:.6g} {unlike}: they differ by {row[token]:.3g}, allowed is"
                    f" {allowed:.3g} ({self.tolerance:g} of the logits' spread); {wrong} of"
                    f" {len(row)} logits are off."
                )
