"""Reading batch files: every fault a person can put into one."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tidemill_contracts.wire import ChatMessage, SamplingParams, StructuredOutput
from tidemill_producer.batch import rows
from tidemill_producer.batch.formats.tidemill import TidemillFormat
from tidemill_producer.batch.rows import BadLine, Row, count_rows, read_rows
from tidemill_producer.batch.tally import is_right


def read(*lines: bytes | str) -> list[Row | BadLine]:
    raw = b"\n".join(line.encode() if isinstance(line, str) else line for line in lines)
    found = list(read_rows(rows.lines(io.BytesIO(raw)), TidemillFormat(), run_id="run"))
    assert len(found) == count_rows(io.BytesIO(raw))
    return found


def row(**fields: Any) -> str:
    return json.dumps({"custom_id": "r", "prompt": "x"} | fields)


def test_every_field_of_a_job_can_be_given() -> None:
    (found,) = read(
        json.dumps(
            {
                "custom_id": "r1",
                "messages": [{"role": "user", "content": "hi"}],
                "sampling": {"seed": 1, "temperature": 0, "structured": {"choice": ["a"]}},
                "model": "m",
                "priority": 3,
                "metadata": {"task": "t"},
                "deadline": 1e9,
            }
        )
    )
    assert isinstance(found, Row)
    assert (found.custom_id, found.line, found.job.id) == ("r1", 1, "run:1")
    assert found.job.messages == [ChatMessage(role="user", content="hi")]
    assert found.job.sampling == SamplingParams(
        seed=1, temperature=0.0, structured=StructuredOutput(choice=["a"])
    )
    assert (found.job.model, found.job.priority, found.job.deadline) == ("m", 3, 1e9)
    assert found.job.metadata == {"task": "t"}


@pytest.mark.parametrize(
    ("line", "custom_id", "says"),
    [
        ("[1,2]", None, "Expected `object`, got `array`"),
        ("null", None, "Expected `object`, got `null`"),
        ("plain text", None, "malformed"),
        ('{"custom_id": "r", "prompt": "x"', None, "truncated"),
        ('{"custom_id": "r", "prompt": "x"} {}', None, "trailing characters"),
        ('{"prompt": "x"}', None, "`custom_id`"),
        (row(custom_id=7), None, "$.custom_id"),
        (row(custom_id=""), None, "$.custom_id"),
        ('{"custom_id": "r"}', "r", "exactly one"),
        (row(prompt_token_ids=[1]), "r", "exactly one"),
        (row(prompt=None, prompt_token_ids=[1, -1]), "r", "$.prompt_token_ids[1]"),
        (row(sampling={"max_tokens": 0}), "r", "$.sampling.max_tokens"),
        (row(sampling={"max_tokenz": 1}), "r", "`max_tokenz` - at `$.sampling`"),
        (row(sampling={"temperature": "hot"}), "r", "$.sampling.temperature"),
        ('{"custom_id": "r", "prompt": "x", "deadline": NaN}', None, "malformed"),
        ('{"custom_id": "r", "prompt": "x", "deadline": 1e999}', "r", "$.deadline"),
        (row(id="mine"), "r", "unknown field `id`"),
        (row(extra=1), "r", "unknown field `extra`"),
        (row(schema_version=2), "r", "$.schema_version"),
        (row(metadata={"k": "v" * 513}), "r", "$.metadata"),
        (b'{"custom_id": "r", "prompt": "\xff\xfe"}', "r", "UTF-8"),
        (b'{"custom_id": "r", "prompt": "\\ud800"}', None, "surrogate"),
        ("[" * 100_000, None, "Expected `object`"),
    ],
)
def test_a_bad_line_says_what_is_wrong_and_the_next_is_read(
    line: bytes | str, custom_id: str | None, says: str
) -> None:
    bad, good = read(line, row(custom_id="next"))
    assert isinstance(bad, BadLine)
    assert (bad.line, bad.custom_id) == (1, custom_id)
    assert says in bad.error.message
    assert bad.error.code in {"invalid_job", "unsupported_schema_version"}
    assert not bad.error.retryable
    assert isinstance(good, Row)
    assert good.line == 2


def test_a_second_use_of_a_custom_id_is_refused_and_names_the_first() -> None:
    first, other, second = read(row(custom_id="a"), row(custom_id="b"), row(custom_id="a"))
    assert isinstance(first, Row)
    assert isinstance(other, Row)
    assert isinstance(second, BadLine)
    assert "Line 1" in second.error.message


def test_blank_lines_are_no_rows_but_count_as_lines() -> None:
    found = read("", row(custom_id="a"), "  ", "\t", row(custom_id="b"), "", "")
    assert [each.line for each in found] == [2, 5]


def test_a_byte_order_mark_and_windows_line_ends_are_taken_off() -> None:
    found = read(b"\xef\xbb\xbf" + row(custom_id="a").encode() + b"\r", row(custom_id="b") + "\r")
    assert [type(each) for each in found] == [Row, Row]


@pytest.mark.parametrize("raw", [b"", b"\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\r\n"])
def test_an_empty_file_has_no_rows(raw: bytes) -> None:
    assert read(raw) == []


def test_a_line_that_is_too_long_is_one_bad_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 60)
    for size in (61, 62, 121, 122, 200, 1000):
        long, good = read(row(prompt="x" * (size - len(row(prompt="")))), row(custom_id="next"))
        assert isinstance(long, BadLine)
        assert "more than 60 bytes" in long.error.message
        assert isinstance(good, Row)
        assert good.line == 2
    (exact,) = read(row(prompt="x" * (60 - len(row(prompt="")))))
    assert isinstance(exact, Row)


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("42", "42", True),
        (" 42\n", "42", True),
        ("43", "42", False),
        (None, "42", False),
        ('{"b": 2, "a": 1}', '{"a":1,"b":2}', True),
        ('{"a": 1}', '{"a":1,"b":2}', False),
        ("[1, 2]", "[1,2]", False),
        ("not json", '{"a":1}', False),
    ],
)
def test_an_answer_is_right_when_equal_as_text_or_as_a_json_object(
    text: str | None, expected: str, right: bool
) -> None:
    assert is_right(text, expected) is right
