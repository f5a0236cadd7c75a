"""From the body of an OpenAI request to a job. What we cannot do is refused, never ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from tidemill_contracts.wire import ErrorCode, GenerationJob, InvalidMessage, JobError
from tidemill_producer.batch.rows import invalid

CHAT_URL = "/v1/chat/completions"
DEFAULT_COMPLETION_TOKENS = 16
"""`max_tokens` of ``/v1/completions``, by OpenAI's reference."""
WITHOUT_EFFECT = ("user", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""Say nothing about the answer."""
SAME_NAME = (
    "temperature", "top_p", "seed", "n", "stop", "presence_penalty", "frequency_penalty",
    "logit_bias", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids",
    "ignore_eos",
)  # fmt: skip
"""Fields of `SamplingParams` too; those after `logit_bias` are not OpenAI's."""


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the response repeats of its request."""

    chat: bool
    model: str
    echoed: str = ""
    """Stands before the text of a completion."""


def read_body(
    url: str, body: dict[str, Any], *, job_id: str
) -> tuple[GenerationJob, RequestContext]:
    """Raises `InvalidMessage`, which names the field as ``$.body.field``."""
    left = {name: value for name, value in body.items() if value is not None}
    for name in WITHOUT_EFFECT:
        left.pop(name, None)
    if left.pop("stream", False) is not False:
        raise _refused("A batch cannot stream", "stream")
    sampling = {name: left.pop(name) for name in SAME_NAME if name in left}
    job: dict[str, Any] = {"id": job_id, "sampling": sampling}
    renamed = {"sampling": ""}
    for name in ("model", "metadata"):
        if name in left:
            job[name] = left.pop(name)
    if "model" not in job:
        raise invalid("Object missing required field `model` - at `$.body`")
    if url == CHAT_URL:
        _read_chat(left, job, renamed)
        echoed = ""
    else:
        echoed = _read_completion(left, job)
    if left:
        raise _refused("This field is not supported", next(iter(left)))
    try:
        read = msgspec.convert(job, GenerationJob, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as error:
        raise invalid(_with_their_path(str(error), renamed)) from error
    return read, RequestContext(url == CHAT_URL, str(job["model"]), echoed)


def _read_chat(left: dict[str, Any], job: dict[str, Any], renamed: dict[str, str]) -> None:
    sampling = job["sampling"]
    if "messages" not in left:
        raise invalid("Object missing required field `messages` - at `$.body`")
    messages = left.pop("messages")
    if not isinstance(messages, list):
        raise invalid("Expected `array` - at `$.body.messages`")
    job["messages"] = [_message(message, n) for n, message in enumerate(messages)]
    limits = [name for name in ("max_completion_tokens", "max_tokens") if name in left]
    if len(limits) == 2:
        raise _refused("`max_tokens` excludes this field", "max_completion_tokens")
    if limits:
        sampling["max_tokens"] = left.pop(limits[0])
        renamed["sampling.max_tokens"] = limits[0]
    tops = left.pop("top_logprobs", None)
    wanted = left.pop("logprobs", False)
    if not isinstance(wanted, bool):
        raise invalid("Expected `bool` - at `$.body.logprobs`")
    if wanted:
        sampling["logprobs"] = 0 if tops is None else tops
        renamed["sampling.logprobs"] = "top_logprobs"
    elif tops is not None:
        raise _refused("Only with `logprobs`: true", "top_logprobs")
    if "response_format" in left:
        structured = _structured(left.pop("response_format"))
        if structured is not None:
            sampling["structured"] = structured
            renamed["sampling.structured"] = "response_format"
    chat: dict[str, Any] = {}
    tools = left.pop("tools", None)
    choice = left.pop("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise _refused("Only `auto` and `none` are supported", "tool_choice")
    if left.pop("parallel_tool_calls", True) is not True:
        raise _refused("Calls cannot be held to one at a time", "parallel_tool_calls")
    if tools is not None and choice == "auto":
        chat["tools"] = tools
    thinking = _thinking(left)
    if thinking is not None:
        chat["enable_thinking"] = thinking
    if "thinking_budget" in left:
        chat["thinking_budget"] = left.pop("thinking_budget")
    renamed["chat"] = ""
    renamed["chat.enable_thinking"] = "chat_template_kwargs.enable_thinking"
    if chat:
        job["chat"] = chat


def _read_completion(left: dict[str, Any], job: dict[str, Any]) -> str:
    """Returns the text to echo."""
    sampling = job["sampling"]
    prompt = left.pop("prompt", None)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        job["prompt_token_ids"] = prompt
    elif isinstance(prompt, str):
        job["prompt"] = prompt
    else:
        raise _refused("Expected one prompt, as text or as token ids", "prompt")
    sampling["max_tokens"] = left.pop("max_tokens", DEFAULT_COMPLETION_TOKENS)
    if "logprobs" in left:
        sampling["logprobs"] = left.pop("logprobs")
    if left.pop("best_of", sampling.get("n", 1)) != sampling.get("n", 1):
        raise _refused("Only as many as `n` are supported", "best_of")
    if left.get("suffix") == "":
        left.pop("suffix")
    echo = left.pop("echo", False)
    if not isinstance(echo, bool):
        raise invalid("Expected `bool` - at `$.body.echo`")
    if not echo:
        return ""
    if not isinstance(prompt, str):
        raise _refused("Token ids cannot be echoed as text", "echo")
    if "logprobs" in sampling:
        raise _refused("Not together with `logprobs`", "echo")
    return prompt


def _message(message: Any, n: int) -> Any:
    """With the parts of its content joined, and OpenAI's ``developer`` as ``system``."""
    if not isinstance(message, dict):
        return message  # its type is refused with all others
    written = {name: value for name, value in message.items() if value is not None}
    if written.get("role") == "developer":
        written["role"] = "system"
    content = written.get("content")
    if isinstance(content, list):
        texts = []
        for i, part in enumerate(content):
            where = f"messages[{n}].content[{i}]"
            if not isinstance(part, dict) or part.get("type") != "text":
                raise _refused("Only parts of type `text` are supported", where)
            if not isinstance(part.get("text"), str) or len(part) > 2:
                raise _refused("Expected `type` and `text`", where)
            texts.append(part["text"])
        written["content"] = "".join(texts)
    return written


def _structured(wanted: Any) -> dict[str, Any] | None:
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        form = wanted.get("json_schema")
        if isinstance(form, dict) and isinstance(form.get("schema"), dict):
            return {"json_schema": form["schema"]}
        raise _refused("Expected an object with a `schema`", "response_format.json_schema")
    raise _refused("Expected `text`, `json_object` or `json_schema`", "response_format.type")


def _thinking(left: dict[str, Any]) -> bool | None:
    given = left.pop("chat_template_kwargs", {})
    if not isinstance(given, dict) or given.keys() - {"enable_thinking"}:
        raise _refused("Only `enable_thinking` is supported", "chat_template_kwargs")
    thinking: bool | None = given.get("enable_thinking")
    effort = left.pop("reasoning_effort", None)
    if effort is None:
        return thinking
    if effort not in ("none", "medium", "high"):
        raise _refused(
            "Only `none`, `medium` and `high` are supported (`thinking_budget` limits thoughts)",
            "reasoning_effort",
        )
    if thinking is not None and thinking != (effort != "none"):
        raise _refused("`enable_thinking` says the opposite", "reasoning_effort")
    return bool(effort != "none")


def _with_their_path(message: str, renamed: dict[str, str]) -> str:
    """The message with the path of the job's field made that of the body's."""

    def theirs(found: re.Match[str]) -> str:
        path = found[1]
        for ours in sorted(renamed, key=len, reverse=True):
            if path == ours or path.startswith((ours + ".", ours + "[")):
                rest = path[len(ours) :].lstrip("." if not renamed[ours] else "")
                path = renamed[ours] + rest
                break
        return f"`$.body.{path}`"

    return re.sub(r"`\$\.([^`]*)`", theirs, message)


def _refused(message: str, field: str) -> InvalidMessage:
    error = JobError.of(ErrorCode.NOT_SUPPORTED, f"{message} - at `$.body.{field}`")
    return InvalidMessage(error)
