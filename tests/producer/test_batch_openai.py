"""Files for the OpenAI Batch API: what is mapped, what is refused, and the answers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationResult,
    JobError,
    ParsedToolCall,
    Timings,
    TokenLogprobs,
    Usage,
)
from tidemill_producer.batch.formats.choose import rows_and_format
from tidemill_producer.batch.formats.openai import OpenAIFormat
from tidemill_producer.batch.rows import BadLine, OutputRow, Row

USER = [{"role": "user", "content": "hi"}]
OPENAI = OpenAIFormat()


def read(url: str = "/v1/chat/completions", **body: Any) -> Row | BadLine:
    first = {"model": "m"} | ({"messages": USER} if url == "/v1/chat/completions" else {})
    line = {"custom_id": "r", "method": "POST", "url": url, "body": first | body}
    return OPENAI.read(json.dumps(line).encode(), 7, "run")


def good(*url: str, **body: Any) -> Row:
    row = read(*url, **body)
    assert isinstance(row, Row), row
    return row


def result(**fields: Any) -> GenerationResult:
    given: dict[str, Any] = {
        "id": "run:7",
        "model": "m",
        "text": "ab",
        "content": "ab",
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "usage": Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, reasoning_tokens=1),
        "timings": Timings(queued_ms=0, first_token_ms=0, total_ms=0),
    }
    return GenerationResult(**given | fields)


def answer(row: Row, **fields: Any) -> dict[str, Any]:
    line = OPENAI.encode(
        OutputRow(custom_id=row.custom_id, result=result(**fields), context=row.context)
    )
    assert OPENAI.is_ok(line)
    assert OPENAI.custom_id_of(line) == "r"
    body: dict[str, Any] = json.loads(line)["response"]["body"]
    return body


def test_a_chat_is_mapped_field_by_field() -> None:
    schema = {"type": "object"}
    tool = {"type": "function", "function": {"name": "f"}}
    job = good(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": t} for t in "ab"]},
        ],
        max_completion_tokens=9,
        temperature=0,
        logit_bias={"50": -100},
        logprobs=True,
        top_logprobs=2,
        stop=["x"],
        seed=4,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
        tools=[tool],
        reasoning_effort="none",
        metadata={"task": "t"},
        user="u",
        stream=False,
    ).job
    assert job.id == "run:7"
    assert job.messages is not None
    assert [(m.role, m.content) for m in job.messages] == [("system", "be brief"), ("user", "ab")]
    sampling = job.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0, 4)
    assert (sampling.logit_bias, sampling.logprobs, sampling.stop) == ({50: -100.0}, 2, ["x"])
    assert sampling.structured is not None
    assert sampling.structured.json_schema == schema
    assert job.chat.enable_thinking is False
    assert [tool.function for tool in job.chat.tools] == [{"name": "f"}]
    assert job.metadata == {"task": "t"}


def test_a_tool_choice_of_none_leaves_the_tools_out() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert good(tools=tools, tool_choice="none").job.chat.tools == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"modalities": ["audio"]}, "modalities"),
        ({"stream": True}, "stream"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_p": 2}, "top_p"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_path(body: dict[str, Any], field: str) -> None:
    bad = read(**body)
    assert isinstance(bad, BadLine)
    assert bad.error.message.endswith(f"- at `$.body.{field}`")
    line = OPENAI.encode(OutputRow(custom_id=bad.custom_id, error=bad.error, line=bad.line))
    assert not OPENAI.is_ok(line)
    written = json.loads(line)
    assert written["id"] == "batch_req_r"
    assert written["line"] == 7
    assert written["response"]["status_code"] == 400
    assert written["response"]["body"]["error"]["param"] == field


@pytest.mark.parametrize("field", ["suffix", "echo", "best_of", "prompt"])
def test_completions_refuse_what_they_cannot(field: str) -> None:
    values: dict[str, Any] = {"suffix": "x", "echo": True, "best_of": 2, "prompt": ["a", "b"]}
    bad = read("/v1/completions", **{"prompt": [1, 2], field: values[field]})
    assert isinstance(bad, BadLine)
    assert bad.error.message.endswith(f"`$.body.{field}`")


def test_a_completion_echoes_its_prompt_and_has_openais_default_length() -> None:
    row = good("/v1/completions", prompt="so ", echo=True)
    assert row.job.sampling.max_tokens == 16
    assert answer(row)["choices"][0]["text"] == "so ab"


def test_a_chat_is_answered_in_their_form() -> None:
    body = answer(
        good(),
        reasoning="hm",
        content="",
        tool_calls=[ParsedToolCall(name="f", arguments={"a": "é"})],
        logprobs=[TokenLogprobs(logprob=-1, top={5: -1.0}), TokenLogprobs(logprob=-2)],
    )
    (choice,) = body["choices"]
    assert body["object"] == "chat.completion"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "hm"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "é"}
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "token_id:5"
    assert first["top_logprobs"] == [{"token": "token_id:5", "logprob": -1.0, "bytes": None}]
    usage = body["usage"]
    assert usage["total_tokens"] == 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 1}


def test_a_fault_of_the_system_has_a_status_above_500() -> None:
    error = JobError.of(ErrorCode.ENGINE_ERROR, "it broke")
    response = json.loads(OPENAI.encode(OutputRow(custom_id="r", error=error)))["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (500, "server_error")


@pytest.mark.parametrize("name", ["openai", "tidemill"])
def test_every_fault_is_one_row_with_its_line(name: str) -> None:
    def line(custom_id: str) -> bytes:
        if name == "tidemill":
            return json.dumps({"custom_id": custom_id, "prompt": "a"}).encode()
        body = {"model": "m", "messages": USER}
        request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        return json.dumps({"custom_id": custom_id} | request).encode()

    raw = b"\n".join(
        [
            b"\xef\xbb\xbf[1,2]\r",
            b"",
            b"null",
            line("ok") + b"\r",
            line("ok"),
            line("cut")[:-1],
            line("bytes").replace(b"bytes", b"\xc3("),
            line("nul").replace(b"nul", b"n\0l"),
            line("twice")[:-1] + b', "custom_id": "other"}',
            b"x" * (64 * 1024 * 1024 + 1),
            line("last"),
        ]
    )
    rows, found = rows_and_format(io.BytesIO(raw), "auto", run_id="run")
    assert found.name == name
    read_rows = list(rows)
    assert [row.line for row in read_rows] == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert [row.custom_id for row in read_rows if isinstance(row, Row)] == ["ok", "last"]
    errors = {row.line: row.error for row in read_rows if isinstance(row, BadLine)}
    assert {error.code for error in errors.values()} == {"invalid_job"}
    assert "Line 4 has the same" in errors[5].message
    assert "the key `custom_id` twice" in errors[9].message
