"""Text to token ids: the model's tokenizer, chat template and generation defaults.

Reads ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and
``generation_config.json`` of a model directory. A directory without a tokenizer is served too:
jobs then bring token ids, and results have no text.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.wire import (
    ChatMessage,
    ChatOptions,
    ErrorCode,
    GenerationJob,
    JobFailed,
)
from tidemill_contracts.wire.receipt import hash_json
from tidemill_worker.chat import (
    CLOSING_SENTENCE,
    END_THINK,
    THINK,
    ThinkBlock,
    json_object,
    think_block,
)
from tidemill_worker.engine.detokenizer import Detokenizer
from tidemill_worker.engine.thinking import ThinkTokens

_T = TypeVar("_T")


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """What the model is given to go on from."""

    token_ids: list[int]
    think_block: ThinkBlock = ThinkBlock.ABSENT
    """Of a chat; a raw prompt's is not looked for."""

    @property
    def thinking_open(self) -> bool:
        """Whether the output begins inside a think block."""
        return self.think_block is ThinkBlock.OPEN


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What ``generation_config.json`` says where a job says nothing; ``None`` is not a word."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_id: int | list[int] | None = None


_Token = str | dict[str, object] | None
"""A token's text, or an object that has it as its ``content``."""


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: _Token = None
    eos_token: _Token = None
    pad_token: _Token = None
    unk_token: _Token = None

    def token(self, name: str) -> str | None:
        token = getattr(self, name)
        content = token.get("content") if isinstance(token, dict) else token
        return content if isinstance(content, str) else None


class _Decoder(msgspec.Struct, frozen=True):
    type: str = ""
    decoders: list[_Decoder] = []


class _TokenizerFile(msgspec.Struct, frozen=True):
    decoder: _Decoder | None = None


class TextModel:
    """What turns a job into token ids and a row's ids into text."""

    def __init__(self, model_dir: Path, config: ModelConfig) -> None:
        self.model_dir = model_dir
        self.vocab_size = config.vocab_size
        self.defaults = _read(model_dir / "generation_config.json", GenerationDefaults)
        tokenizer_config = _read(model_dir / "tokenizer_config.json", _TokenizerConfig)
        self.tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        self.token_bytes = token_bytes(self.tokenizer)
        """Of every token id of the tokenizer; the model may have more."""
        self.special_token_ids = _special_token_ids(self.tokenizer)
        self._text_bytes = list(self.token_bytes)
        for token_id in self.special_token_ids:
            self._text_bytes[token_id] = b""
        self.think_tokens = self._find_think_tokens()
        """``None`` where the tokenizer has no single tokens for ``<think>`` and ``</think>``."""
        sources = _template_sources(model_dir, tokenizer_config)
        self._templates = {
            name: _compile_template(source, model_dir) for name, source in sources.items()
        }
        self.templates_hash = hash_json(sources)
        """For receipts; of the chat templates by name."""
        self.switches_thinking = any(map(_switches_thinking, sources.values()))
        """Whether the chat template knows ``enable_thinking``, as those of models do that think
        or not as they are told."""
        self._special_tokens = {
            name: token
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (token := tokenizer_config.token(name)) is not None
        }
        self.eos_token_ids = self._find_eos(config, tokenizer_config)

    def _find_eos(self, config: ModelConfig, tokenizer_config: _TokenizerConfig) -> frozenset[int]:
        """The union of what all three files say: each alone is known to be incomplete."""
        eos = set(config.eos_token_ids)
        declared = self.defaults.eos_token_id
        eos.update([declared] if isinstance(declared, int) else declared or [])
        token = tokenizer_config.token("eos_token")
        if self.tokenizer is not None and token is not None:
            token_id = self.tokenizer.token_to_id(token)
            if token_id is not None:
                eos.add(token_id)
        return frozenset(eos)

    def _find_think_tokens(self) -> ThinkTokens | None:
        if self.tokenizer is None:
            return None
        begin, end = map(self.tokenizer.token_to_id, (THINK, END_THINK))
        if begin is None or end is None:
            return None
        texts = (raw.decode(errors="replace") for raw in self._text_bytes)
        return ThinkTokens(
            begin=begin,
            end=end,
            blank=frozenset(token_id for token_id, text in enumerate(texts) if not text.strip()),
            closing=self.tokenise(CLOSING_SENTENCE),
        )

    def encode(self, job: GenerationJob) -> Prompt:
        """The job's prompt as token ids.

        Lets other threads run while it tokenises. Raises `JobFailed` where the prompt is empty, a
        token id is not in the vocabulary, the chat template refuses, there is no tokenizer, or
        chat options come without a chat.
        """
        if job.messages is None and job.chat != ChatOptions():
            raise JobFailed.of(ErrorCode.INVALID_JOB, "Chat options need `messages` - at `$.chat`")
        block = ThinkBlock.ABSENT
        if job.prompt_token_ids is not None:
            ids = list(job.prompt_token_ids)
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                raise JobFailed.of(
                    ErrorCode.TOKEN_OUT_OF_RANGE,
                    f"Token id {largest} is outside the vocabulary of {self.vocab_size:,}"
                    f" - at `$.prompt_token_ids[{ids.index(largest)}]`",
                )
        else:
            text = self.render(job)
            if job.messages is not None:
                block = think_block(text)
            ids = self.tokenise(text, "send `prompt_token_ids`")
        if not ids:
            raise JobFailed.of(ErrorCode.EMPTY_PROMPT, "The prompt has no tokens")
        return Prompt(token_ids=ids, think_block=block)

    def render(self, job: GenerationJob) -> str:
        """The job's prompt as text: the conversation up to where the assistant speaks.

        The template is given what Hugging Face's ``apply_chat_template`` gives it. Empty for a job
        of token ids. Raises `JobFailed` where there is no template, or it refuses.
        """
        if job.messages is None:
            return job.prompt or ""
        tools = [{"type": tool.type, "function": tool.function} for tool in job.chat.tools]
        template = self._templates.get("default")
        if tools:
            template = self._templates.get("tool_use", template)
        if template is None:
            raise JobFailed.of(
                ErrorCode.NO_TOKENIZER,
                "The model directory has no chat template: send `prompt` or `prompt_token_ids`",
            )
        if not job.messages:
            raise JobFailed.of(
                ErrorCode.EMPTY_PROMPT, "The conversation has no messages - at `$.messages`"
            )
        variables: dict[str, Any] = dict(self._special_tokens)
        if job.chat.enable_thinking is not None:
            variables["enable_thinking"] = job.chat.enable_thinking
        try:
            return template.render(
                variables,
                messages=[_message(message) for message in job.messages],
                tools=tools or None,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is someone else's code: it may raise anything
            raise JobFailed.of(
                ErrorCode.TEMPLATE_FAILED, f"The chat template refused the messages: {error}"
            ) from error

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer | None:
        """A fresh detokenizer; ``None`` without a tokenizer."""
        if self.tokenizer is None:
            return None
        return Detokenizer(self._text_bytes if skip_special_tokens else self.token_bytes)

    def token_ids_of(self, text: str) -> list[list[int]]:
        """The tokenisations with which `text` may stand in an output: at its start, and after a
        space, where that makes other tokens (as vLLM does it for its ``bad_words``).

        A text that begins with white space has one. Raises `JobFailed` without a tokenizer.
        """
        plain = self.tokenise(text, "texts such as `$.sampling.bad_words` have no tokens")
        if text[:1].isspace():
            return [plain]
        spaced = self.tokenise(" " + text)
        # Where the space is a token by itself, the plain sequence already stands in the other.
        return [plain] if spaced[-len(plain) :] == plain else [plain, spaced]

    def tokenise(self, text: str, otherwise: str = "") -> list[int]:
        """The text's tokens. Raises `JobFailed` without a tokenizer, saying what to do."""
        if self.tokenizer is None:
            raise JobFailed.of(
                ErrorCode.NO_TOKENIZER, f"The model directory has no tokenizer.json: {otherwise}"
            )
        # Unlike `encode`, this lets other threads run, and does without offsets.
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _read(path: Path, type_: type[_T]) -> _T:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return type_()
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _load_tokenizer(path: Path) -> Tokenizer | None:
    if not path.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    decoder = _read(path, _TokenizerFile).decoder or _Decoder()
    if "ByteLevel" not in {decoder.type, *(part.type for part in decoder.decoders)}:
        raise CheckpointError(f"{path}: not a byte-level tokenizer, as every Qwen3 model has")
    return tokenizer


def _message(message: ChatMessage) -> dict[str, Any]:
    """A turn as templates expect it: without what is not set, and arguments as objects."""
    given = msgspec.to_builtins(message)
    plain = {name: value for name, value in given.items() if value not in (None, [])}
    plain.setdefault("content", "")  # Qwen3's first templates need one beside tool calls too
    calls = []
    for call in message.tool_calls:
        arguments = call.function.arguments
        if isinstance(arguments, str):
            parsed = json_object(arguments)
            arguments = arguments if parsed is None else parsed
        function = {"name": call.function.name, "arguments": arguments}
        named = {} if call.id is None else {"id": call.id}
        calls.append({**named, "type": call.type, "function": function})
    if calls:
        plain["tool_calls"] = calls
    return plain


def _template_sources(model_dir: Path, config: _TokenizerConfig) -> dict[str, str]:
    """The chat templates by name: ``default``, and sometimes ``tool_use`` for jobs with tools."""
    path = model_dir / "chat_template.jinja"
    source = path.read_text("utf-8") if path.exists() else config.chat_template
    if isinstance(source, list):
        return {
            each["name"]: each["template"] for each in source if {"name", "template"} <= {*each}
        }
    return {} if source is None else {"default": source}


def _compile_template(source: str, model_dir: Path) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{model_dir}: the chat template is broken: {error}") from error


def _switches_thinking(source: str) -> bool:
    return "enable_thinking" in meta.find_undeclared_variables(_environment().parse(source))


@cache
def _environment() -> jinja2.Environment:
    # A template is code from the model's publisher: it runs sandboxed, with the settings and
    # the functions that Hugging Face's templates expect.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


class _GenerationTag(Extension):
    """``{% generation %}``: marks the assistant's words for training, and means nothing here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which a prompt must not have.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def token_bytes(tokenizer: Tokenizer | None) -> list[bytes]:
    """The bytes of every token id."""
    if tokenizer is None:
        return []
    to_byte = str.maketrans({char: chr(byte) for byte, char in enumerate(_byte_alphabet())})
    added = tokenizer.get_added_tokens_decoder()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token_id in added:
            table[token_id] = token.encode()
        else:
            table[token_id] = token.translate(to_byte).encode("latin-1")
    return table


def _special_token_ids(tokenizer: Tokenizer | None) -> list[int]:
    added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
    return [token_id for token_id, token in added.items() if token.special]


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary.

    Bytes that are printable in Latin-1 stand for themselves; the others are numbered from
    U+0100 on (GPT-2's ``bytes_to_unicode``).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
