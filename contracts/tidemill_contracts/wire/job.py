"""The job: what a producer asks for.

Jobs refuse unknown fields: ignoring an option that the worker does not know would give a wrong
answer. Limits are part of the contract, so that a producer refuses before it writes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1

MAX_JOB_BYTES = 8 * 1024 * 1024
"""Largest encoded job, in bytes."""
MAX_RESULT_TTL_S = 30 * 24 * 3600
MAX_PROMPT_TOKENS = 1_048_576
MAX_MESSAGES = 4_096
MAX_TOKEN_ID = 2**31 - 1
MAX_OUTPUTS = 64
MAX_TENANT_CHARACTERS = 128
MAX_LOGPROBS = 128
MAX_PROMPT_LOGPROBS = 262_144
"""Log probabilities of prompt tokens in one result: up to some 9 MB of it."""
MAX_STOPS = 32
MAX_STOP_CHARACTERS = 256
MAX_LISTED_TOKENS = 4_096
"""Entries of a list of token ids, or of a map from them."""
MAX_CHOICES = 4_096
MAX_STRUCTURE_BYTES = 64 * 1024
"""Of a schema as JSON, a regex, a grammar, or all choices together, in UTF-8."""

JobId = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")]
"""Printable ASCII without spaces: the id becomes part of Redis keys."""
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ends a row that writes the same over and over."""

    max_pattern: Annotated[int, Meta(ge=1, le=256)] = 64
    """Longest pattern to look for, in tokens."""
    min_count: Annotated[int, Meta(ge=2, le=1_000)] = 8
    """How often it must stand at the end of the output, without a gap."""


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form that each output must have: exactly one field is set.

    An output ends where its form is complete and cannot go on. One that `max_tokens` or a stop
    text cuts is the beginning of the form. In a chat that thinks, the thoughts are free and the
    form is the answer's.
    """

    json_schema: dict[str, Any] | bool | None = None
    """JSON that is valid by this schema. A keyword that cannot be held to is refused; properties
    come in the schema's order, and no more white space than in indented JSON."""
    regex: Annotated[str, Meta(min_length=1)] | None = None
    """Text that matches as a whole, in the syntax of Rust's regex crate."""
    choice: (
        Annotated[
            list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=MAX_CHOICES)
        ]
        | None
    ) = None
    """One of these texts."""
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    """Text of a context-free grammar, in llguidance's variant of Lark."""
    json_object: bool = False
    """Any JSON object."""

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = [f"`{name}`" for name in self.__struct_fields__]
            found = " and ".join(f"`{name}`" for name in given) or "none"
            raise ValueError(
                f"Expected exactly one of {', '.join(names[:-1])} and {names[-1]}, got {found}"
            )
        size = len(self.source.encode())
        if size > MAX_STRUCTURE_BYTES:
            raise ValueError(
                f"`{given[0]}` has {size:,} bytes, at most {MAX_STRUCTURE_BYTES:,} are allowed"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return self._given()[0]

    @property
    def source(self) -> str:
        """What is set, as text: a schema, and the choices, as JSON."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return msgspec.json.encode(value).decode()
        except (TypeError, OverflowError, RecursionError) as error:
            raise ValueError(f"`{self.kind}` cannot be written as JSON: {error}") from error

    def _given(self) -> list[str]:
        named = [name for name in self.__struct_fields__ if getattr(self, name) is not None]
        return [name for name in named if name != "json_object" or self.json_object]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to choose each next token, and when to end. ``None`` means: as the model's generation
    config says.

    The order is: penalties, `logit_bias`, `allowed_token_ids`, `structured`, `bad_words` and
    `min_tokens`, then temperature, `min_p`, `top_k`, `top_p`, then the draw.
    """

    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Sample from the smallest set of tokens whose probabilities reach this sum."""
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKEN_ID)] | None = None
    """Sample from this many most likely tokens; 0 or -1 for all of them."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this share of the likeliest one."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    """A seeded job draws the same tokens whatever it is batched with."""
    n: Annotated[int, Meta(ge=1, le=MAX_OUTPUTS)] = 1
    """Independent outputs; output i of a seeded job is seeded by seed and i."""

    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken from the logit of every token that the output holds."""
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    """Taken from a token's logit for each time that the output holds it."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Divides positive logits, and multiplies negative ones, of every token in prompt or output."""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LISTED_TOKENS)
    ] = {}
    """Added to the logits of these tokens."""
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_LISTED_TOKENS)] | None
    ) = None
    """Sample from these tokens only."""
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
        Meta(max_length=MAX_STOPS),
    ] = []
    """Texts that the output must not contain; a word's last token is barred after the others."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)] | None = None
    """Most tokens to generate; ``None`` takes the worker's default, clamped to the context."""
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_PROMPT_TOKENS)] = 0
    """No end-of-sequence or stop token, and no stop text, before so many tokens."""
    stop: (
        Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
        | Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOPS),
        ]
    ) = []
    """The output ends where one of these texts begins; thoughts are part of the output."""
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LISTED_TOKENS)] = []
    include_stop_str_in_output: bool = False
    """Keep the stop text at the end of the output."""
    ignore_eos: bool = False
    """Go on to `max_tokens`, past every end-of-sequence token; a form that cannot go on ends."""
    repetition_detection: RepetitionDetection | None = None
    structured: StructuredOutput | None = None
    """Hold the output to a JSON Schema, a regex, a list of choices or a grammar."""

    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Give each token's log probability, and those of this many likeliest ones."""
    logprob_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LOGPROBS)] = []
    """Give the log probabilities of these tokens at each place: cheap scoring of labels."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    """Give the prompt tokens' log probabilities too, and those of this many likeliest ones and of
    `logprob_token_ids` in each place: `MAX_PROMPT_LOGPROBS` in all at most. Such a prompt is
    computed whole, whatever the prefix cache holds."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""

    def check_prompt_logprobs(self, prompt_len: int) -> None:
        """Raises `ValueError` where those of a prompt of so many tokens are more than allowed."""
        if self.prompt_logprobs is None:
            return
        each = 1 + self.prompt_logprobs + len(self.logprob_token_ids)
        if prompt_len * each > MAX_PROMPT_LOGPROBS:
            raise ValueError(
                f"{prompt_len:,} prompt tokens with {each:,} log probabilities each are more than"
                f" the {MAX_PROMPT_LOGPROBS:,} that one result may hold"
                " - at `$.sampling.prompt_logprobs`"
            )

    @property
    def stops(self) -> list[str]:
        """`stop` as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the assistant asks to be called, as the OpenAI chat API writes it."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = {}
    """As an object, or as its JSON text."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One call that an earlier assistant turn made."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    """``None`` only where an assistant turn makes tool calls."""
    reasoning_content: str | None = None
    """What the assistant thought in this turn; templates drop it from all but the last turns."""
    tool_calls: Annotated[list[ToolCall], Meta(max_length=128)] = []
    tool_call_id: str | None = None
    """Which call a tool's turn answers."""

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls:
            raise ValueError("A message needs `content`, or `tool_calls`")


class Tool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may ask to be called: OpenAI's ``{"type": "function", …}``."""

    function: dict[str, Any]
    """Name, description and JSON Schema of the parameters, passed on to the chat template."""
    type: Literal["function"] = "function"


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the chat template is told besides the messages, and how long the model may think."""

    enable_thinking: bool | None = None
    """Qwen3's hard switch; ``None`` leaves it to the template, which thinks where it can."""
    tools: Annotated[list[Tool], Meta(max_length=128)] = []
    thinking_budget: Annotated[int, Meta(ge=0, le=MAX_PROMPT_TOKENS)] | None = None
    """Most tokens of thoughts, of each output. When they are used up, the sentence that Qwen
    documents for it ends the thoughts, and the answer follows; no option of `sampling` keeps its
    tokens from being written. It counts in `max_tokens`, which must leave room for an answer of a
    token; where `max_tokens` is left open, the worker's default is for the answer alone. Without
    effect on an output that has no thoughts."""


class GenerationJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One generation: exactly one of `prompt`, `messages` and `prompt_token_ids` is set."""

    id: JobId | None = None
    """Identifies the job and its result; a producer makes one where it is absent."""
    model: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """The model to use; ``None`` is whatever the worker serves."""
    prompt: str | None = None
    """Text that is tokenised as it stands, without a chat template."""
    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    """A conversation for the model's chat template."""
    chat: ChatOptions = ChatOptions()
    """Only with `messages`."""
    prompt_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_PROMPT_TOKENS)] | None = None
    sampling: SamplingParams = SamplingParams()
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Each step up counts as a minute of having waited already."""
    tenant: Annotated[str, Meta(max_length=MAX_TENANT_CHARACTERS)] = ""
    """Whose job it is: a worker serves tenants evenly, by tokens, however many jobs each has."""
    deadline: Annotated[float, Meta(ge=0, le=1e11)] | None = None
    """When the answer stops being useful, in seconds since the Unix epoch."""
    result_ttl: Annotated[float, Meta(ge=1, le=MAX_RESULT_TTL_S)] | None = None
    """Seconds that the result is kept for; ``None`` is what the worker has set, or a day."""
    cache_salt: Annotated[str, Meta(max_length=128)] = ""
    """Share cached prefixes only with jobs of the same salt, the tenant's name for instance."""
    receipt: bool = False
    """Give a receipt with the result: hashes of all that it was made from."""
    metadata: Annotated[
        dict[
            Annotated[str, Meta(min_length=1, max_length=64)],
            Annotated[str, Meta(max_length=512)],
        ],
        Meta(max_length=16),
    ] = {}
    """The caller's own notes: at most 16 pairs, keys to 64 and values to 512 characters."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        forms = self.prompt, self.messages, self.prompt_token_ids
        if forms.count(None) != 2:
            names = ("prompt", "messages", "prompt_token_ids")
            given = [name for name, form in zip(names, forms, strict=True) if form is not None]
            found = " and ".join(f"`{name}`" for name in given) or "none"
            raise ValueError(
                "Expected exactly one of `prompt`, `messages` and `prompt_token_ids`,"
                f" got {found} - at `$`"
            )
        if self.prompt_token_ids is not None:
            self.sampling.check_prompt_logprobs(len(self.prompt_token_ids))
