"""Jobs that differ in every sampling option at once, and when two of their results are the same.

For the demo model with `TEMPLATE`. Every fourth job is a chat whose thoughts a budget ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest

from tidemill_contracts.wire import (
    ChatMessage,
    ChatOptions,
    Completion,
    GenerationJob,
    GenerationResult,
    RepetitionDetection,
    SamplingParams,
    StructuredOutput,
)

VOCABULARY = 512
TEMPLATE = "{{ messages[-1].content }}<|im_start|>assistant\n<think>\n"
PROMPTS = ["What is 2 + 3?", "Repeat: one two one two", "Say hello", "Count: 1 2 3 4"]
TEXTS = ["e", "1", " the", "on", "two", "3 4"]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
    },
    "required": ["n", "ok"],
    "additionalProperties": False,
}
CHOICES = ["yes", "no 3 4", "žluť 👩‍🚒"]
FORMS = [
    StructuredOutput(regex=r"[a-z]{2,4}( [0-9]{1,2})?"),
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(json_object=True),
    StructuredOutput(choice=CHOICES),
    StructuredOutput(grammar='start: "(" NUMBER ")"\nNUMBER: /[0-9]{1,3}/'),
]

OPTIONS: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda rng: rng.choice([0, 0.3, 1, 2.0, 5]),
    "top_p": lambda rng: rng.choice([0.2, 0.8, 0.99]),
    "top_k": lambda rng: rng.choice([-1, 1, 3, 40, 10**9]),
    "min_p": lambda rng: rng.choice([0.01, 0.3, 1]),
    "seed": lambda rng: rng.randrange(2**63),
    "n": lambda rng: rng.choice([2, 3]),
    "presence_penalty": lambda rng: rng.choice([-1, 0.5, 2]),
    "frequency_penalty": lambda rng: rng.choice([-0.5, 0.5, 2]),
    "repetition_penalty": lambda rng: rng.choice([0.8, 1.3, 2]),
    "logit_bias": lambda rng: {rng.randrange(250): -100.0, rng.randrange(250, 490): 5},
    "allowed_token_ids": lambda rng: sorted(rng.sample(range(490), 200)),
    "bad_words": lambda rng: rng.sample(TEXTS, 2),
    "max_tokens": lambda rng: rng.randint(8, 24),
    "min_tokens": lambda rng: rng.randint(2, 8),
    "stop": lambda rng: rng.choice([rng.choice(TEXTS), rng.sample(TEXTS, 2)]),
    "stop_token_ids": lambda rng: rng.sample(range(490), 20),
    "include_stop_str_in_output": lambda _: True,
    "ignore_eos": lambda _: True,
    "repetition_detection": lambda _: RepetitionDetection(max_pattern=4, min_count=3),
    "structured": lambda _: FORMS[0],
    "logprobs": lambda rng: rng.choice([0, 1, 5, 128]),
    "logprob_token_ids": lambda rng: rng.sample(range(VOCABULARY), 3),
    "prompt_logprobs": lambda rng: rng.choice([0, 2]),
    "skip_special_tokens": lambda _: False,
}


def mixed_jobs() -> list[GenerationJob]:
    """32 jobs, each with about a third of the options."""
    rng = random.Random(11)
    forms = zip(itertools.cycle(FORMS), itertools.cycle((True, False)), strict=True)
    jobs = []
    for i in range(32):
        given = {name: make(rng) for name, make in OPTIONS.items() if rng.random() < 0.35}
        # What is not seeded is not the same twice; and a form or a list bars most tokens already.
        given.setdefault("seed", i)
        given.setdefault("max_tokens", 20)
        if "structured" in given:
            given.pop("allowed_token_ids", None)
            given.pop("bad_words", None)
            given["max_tokens"] += 20
            given["structured"], may_be_cut = next(forms)
            if not may_be_cut:
                given.pop("stop", None)
                given.pop("stop_token_ids", None)
        text = PROMPTS[i % 4] * rng.randint(1, 4)
        fields: dict[str, Any] = {"prompt": text}
        if i % 4 == 3:
            given["max_tokens"] += 80  # for the budget, and the sentence that ends the thoughts
            budget = rng.choice([0, 2, 6])
            fields = {
                "messages": [ChatMessage(role="user", content=text)],
                "chat": ChatOptions(thinking_budget=budget),
            }
        jobs.append(GenerationJob(id=f"mixed-{i}", sampling=SamplingParams(**given), **fields))
    return jobs


def outputs_of(result: GenerationResult) -> list[Completion]:
    return list(result.outputs) or [result]


def assert_same(one: GenerationResult, other: GenerationResult) -> None:
    assert one.sampling == other.sampling
    for a, b in zip(outputs_of(one), outputs_of(other), strict=True):
        assert (a.token_ids, a.text) == (b.token_ids, b.text)
        assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
        assert (a.reasoning, a.content) == (b.reasoning, b.content)
        for told, also in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert told.logprob == pytest.approx(also.logprob, abs=1e-3)
    prompts = (result.prompt_logprobs or [None] for result in (one, other))
    for place, also_place in zip(*prompts, strict=True):
        if place is not None and also_place is not None:
            assert place.logprob == pytest.approx(also_place.logprob, abs=1e-3)
