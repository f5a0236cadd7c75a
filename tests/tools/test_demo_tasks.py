"""The demo model's tasks, tokenizer, jobs and shipped directory. Nothing is trained here."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from tidemill_producer.batch.tally import is_right
from tools.demo_model import make_prompts
from tools.demo_model.chat import CHAT_TEMPLATE, IM_END, conversation, prompt_text
from tools.demo_model.tasks import TASKS, Sample, Split, draw, split_of, stream

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "worker" / "tidemill_worker" / "demo_model"
JOBS = ROOT / "examples" / "demo.jsonl"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@pytest.fixture(scope="module")
def jobs() -> list[dict[str, Any]]:
    return [json.loads(line) for line in JOBS.read_text(encoding="utf-8").splitlines()]


def _samples(kind: str, split: Split, count: int = 50) -> list[Sample]:
    rng = random.Random(3)
    return [draw(kind, rng, split) for _ in range(count)]


def _config(name: str) -> dict[str, Any]:
    value = json.loads((MODEL / name).read_text(encoding="utf-8"))
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("split", Split)
def test_one_seed_gives_one_sequence_of_samples(split: Split) -> None:
    first = list(islice(stream(11, split), 200))
    assert first == list(islice(stream(11, split), 200))
    assert first != list(islice(stream(12, split), 200))


def test_training_and_held_out_questions_are_disjoint() -> None:
    train = list(islice(stream(1, Split.TRAIN), 5_000))
    held_out = list(islice(stream(2, Split.HELD_OUT), 500))
    assert {s.key for s in train}.isdisjoint(s.key for s in held_out)
    assert {s.prompt for s in train}.isdisjoint(s.prompt for s in held_out)


def test_the_split_is_by_content_and_not_by_wording() -> None:
    sums = _samples("sum", Split.HELD_OUT, count=400)
    numbers = [sorted(int(part) for part in s.key.split()[1:]) for s in sums]
    assert all(split_of(f"sum {a} {b}") is Split.HELD_OUT for a, b in numbers)
    assert len({s.prompt for s in sums}) > len({s.key for s in sums})


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("split", Split)
def test_a_sample_is_of_the_kind_and_on_the_side_asked_for(kind: str, split: Split) -> None:
    samples = _samples(kind, split)
    assert all(s.kind == kind and split_of(s.key) is split for s in samples)


@pytest.mark.parametrize("kind", TASKS)
def test_the_expected_answer_is_correct_and_another_is_not(kind: str) -> None:
    samples = _samples(kind, Split.TRAIN)
    for sample in samples:
        assert is_right(sample.answer, sample.answer)
        assert is_right(f" {sample.answer}\n", sample.answer)
        assert not is_right(sample.answer + "0", sample.answer)
        assert not is_right("", sample.answer)


def test_json_is_compared_as_values() -> None:
    expected = '{"name": "Ana", "age": 31, "city": "Oslo"}'
    assert is_right('{"age":31,"city":"Oslo","name":"Ana"}', expected)
    assert not is_right('{"name": "Ana", "age": "31", "city": "Oslo"}', expected)
    assert not is_right('{"name": "Ana"', expected)


@pytest.mark.parametrize(
    "text",
    [
        "What is 23 + 34?",
        "12345",
        "  two  spaces\n\n\ttab \r\n",
        "🙂🚀 ❤️ 👩‍🚀 never seen: 🦖🥨",
        "naïve straße žlutý кот 東京 안녕 नमस्ते",
        '{"name": "Łukasz", "age": 7}',
    ],
)
def test_the_tokenizer_round_trips_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_tokenizer_splits_digits_and_knows_qwens_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2048").tokens == ["2", "0", "4", "8"]
    chat = "<|im_start|>user\n<think></think><tool_call></tool_call><|im_end|><|endoftext|>"
    encoding = tokenizer.encode(chat)
    assert len(encoding.ids) == 9
    kept = tokenizer.decode(encoding.ids, skip_special_tokens=True)
    assert kept == "user\n<think></think><tool_call></tool_call>"


def test_the_template_writes_what_was_trained_on() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    rng = random.Random(4)
    samples = stream(4, Split.TRAIN)
    for _ in range(50):
        turns, segments = conversation(samples, rng)
        text = "".join(segment.text for segment in segments)
        messages = []
        if text.startswith("<|im_start|>system\n"):
            system = text.removeprefix("<|im_start|>system\n").partition(IM_END)[0]
            messages.append({"role": "system", "content": system})
        for turn in turns:
            messages.append({"role": "user", "content": turn.prompt})
            messages.append({"role": "assistant", "content": turn.answer})
        assert template.render(messages=messages) == text + "\n"
        question = messages[:-1]
        rendered = template.render(messages=question, add_generation_prompt=True)
        assert rendered == prompt_text(question)
        assert text == rendered + turns[-1].answer + IM_END


def test_the_template_puts_tool_results_in_one_user_turn() -> None:
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
    results = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    assert template.render(messages=results) == (
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>"
        "\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_the_demo_jobs_are_what_the_tool_writes() -> None:
    assert JOBS.read_text(encoding="utf-8") == make_prompts.as_lines(make_prompts.jobs())


def test_the_demo_jobs_cover_every_kind_and_every_form(jobs: list[dict[str, Any]]) -> None:
    assert len(jobs) >= 200
    assert len({job["custom_id"] for job in jobs}) == len(jobs)
    assert {job["metadata"]["task"] for job in jobs} == set(TASKS)
    assert any("prompt" in job for job in jobs)
    assert any(job.get("messages", [{}])[0].get("role") == "system" for job in jobs)
    assert any(len(job.get("messages", [])) == 3 for job in jobs)


def test_no_demo_question_is_drawn_in_training(jobs: list[dict[str, Any]]) -> None:
    # `jobs()` draws held-out samples only; this asks the files themselves, on the small kinds
    # in particular, of which this many training samples hold nearly every wording.
    asked = " ".join(json.dumps(job, ensure_ascii=False) for job in jobs)
    trained = {sample.prompt for sample in islice(stream(1, Split.TRAIN), 20_000)}
    found = {prompt for prompt in trained if f'"{prompt}"' in asked}
    assert not found


def test_the_demo_answers_fit_their_token_limit(
    jobs: list[dict[str, Any]], tokenizer: Tokenizer
) -> None:
    for job in jobs:
        answer = tokenizer.encode(job["metadata"]["expected"] + IM_END)
        assert len(answer.ids) <= job["sampling"]["max_tokens"]


def test_the_shipped_directory_is_a_small_qwen3(tokenizer: Tokenizer) -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 12 * 2**20
    config = _config("config.json")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["model_type"] == "qwen3"
    assert config["vocab_size"] % 64 == 0
    assert config["vocab_size"] > tokenizer.get_vocab_size()
    ends = [tokenizer.token_to_id(token) for token in (IM_END, "<|endoftext|>")]
    assert _config("generation_config.json")["eos_token_id"] == ends
    tokenizer_config = _config("tokenizer_config.json")
    assert tokenizer_config["chat_template"] == CHAT_TEMPLATE
    assert tokenizer_config["eos_token"] == IM_END


def test_the_shipped_weights_have_the_configured_shapes_and_no_head() -> None:
    config = _config("config.json")
    with safe_open(MODEL / "model.safetensors", framework="numpy") as weights:
        names = set(weights.keys())
        assert weights.metadata() == {"format": "pt"}
        embedding = weights.get_slice("model.embed_tokens.weight")
        assert embedding.get_shape() == [config["vocab_size"], config["hidden_size"]]
        assert embedding.get_dtype() == "BF16"
    assert "lm_head.weight" not in names
    assert len(names) == 11 * config["num_hidden_layers"] + 2
