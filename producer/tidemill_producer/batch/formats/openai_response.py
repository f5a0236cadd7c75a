"""From a result to the body of an OpenAI response."""

from __future__ import annotations

import json
import time
from typing import Any

from tidemill_contracts.wire import (
    Completion,
    ErrorCode,
    GenerationResult,
    JobError,
    ParsedToolCall,
    TokenLogprobs,
)
from tidemill_producer.batch.formats.openai_request import RequestContext

STATUS = {
    ErrorCode.MODEL_NOT_FOUND: 404,
    ErrorCode.CANCELLED: 499,
    ErrorCode.EXPIRED: 408,
    ErrorCode.RESULT_NOT_ENCODABLE: 500,
    ErrorCode.RESULT_TOO_LARGE: 500,
    ErrorCode.NONFINITE_LOGITS: 500,
    ErrorCode.MAX_TRIES_EXCEEDED: 500,
    ErrorCode.ENGINE_ERROR: 500,
    ErrorCode.OUT_OF_MEMORY: 500,
    ErrorCode.PAYLOAD_LOST: 500,
    ErrorCode.UNDECODABLE: 500,
    ErrorCode.UNKNOWN_FUNCTION: 500,
    ErrorCode.INTERNAL: 500,
}
"""All others are the request's fault: 400."""


def status_of(error: JobError) -> int:
    """The HTTP status that says the same."""
    try:
        return STATUS.get(ErrorCode(error.code), 400)
    except ValueError:
        return 500


def error_body(error: JobError) -> dict[str, Any]:
    """The error as OpenAI's servers answer it; `param` names the field at fault."""
    _, at, path = error.message.rpartition(" - at `$.body.")
    kind = "server_error" if status_of(error) >= 500 else "invalid_request_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": path.rstrip("`") if at else None,
            "code": error.code,
        }
    }


def response_body(result: GenerationResult, context: RequestContext) -> dict[str, Any]:
    """A ``chat.completion`` or a ``text_completion``."""
    outputs: list[Completion] = result.outputs or [result]
    choice = _chat_choice if context.chat else _text_choice
    usage = result.usage
    return {
        "id": f"{'chatcmpl' if context.chat else 'cmpl'}-{result.id}",
        "object": "chat.completion" if context.chat else "text_completion",
        "created": int(time.time()),
        "model": context.model,
        "choices": [choice(output, n, result.id, context) for n, output in enumerate(outputs)],
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        },
    }


def _chat_choice(
    output: Completion, index: int, job_id: str, context: RequestContext
) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": output.content if output.content or not output.tool_calls else None,
        "refusal": None,
    }
    if output.reasoning is not None:
        message["reasoning_content"] = output.reasoning
    if output.tool_calls:
        message["tool_calls"] = [
            _tool_call(call, f"call_{job_id}_{index}_{n}")
            for n, call in enumerate(output.tool_calls)
        ]
    places = output.logprobs
    return {
        "index": index,
        "message": message,
        "logprobs": None
        if places is None
        else {
            "content": [
                {
                    **_token(token_id, place.logprob),
                    "top_logprobs": [_token(top, value) for top, value in place.top.items()],
                }
                for token_id, place in zip(output.token_ids, places, strict=True)
            ],
            "refusal": None,
        },
        "finish_reason": _finish_reason(output),
    }


def _text_choice(
    output: Completion, index: int, job_id: str, context: RequestContext
) -> dict[str, Any]:
    return {
        "index": index,
        "text": context.echoed + (output.text or ""),
        "logprobs": None
        if output.logprobs is None
        else _text_logprobs(output.token_ids, output.logprobs),
        "finish_reason": _finish_reason(output),
    }


def _text_logprobs(token_ids: list[int], places: list[TokenLogprobs]) -> dict[str, Any]:
    return {
        "tokens": [_name(token_id) for token_id in token_ids],
        "token_logprobs": [place.logprob for place in places],
        "top_logprobs": [
            {_name(top): value for top, value in place.top.items()} for place in places
        ],
    }


def _token(token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": _name(token_id), "logprob": logprob, "bytes": None}


def _name(token_id: int) -> str:
    """Results hold ids; the texts of single tokens are with the worker."""
    return f"token_id:{token_id}"


def _tool_call(call: ParsedToolCall, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _finish_reason(output: Completion) -> str:
    """OpenAI has no word for a deadline and for repetition: both cut the output short."""
    if output.finish_reason != "stop":
        return "length"
    return "tool_calls" if output.tool_calls else "stop"
