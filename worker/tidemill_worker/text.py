"""Text to token ids: the model's tokenizer, chat template and generation defaults.

Reads ``tokenizer.json``, ``tokenizer_config.json``, ``chat_template.jinja`` and
``generation_config.json`` of a model directory. A directory without a tokenizer is served too:
jobs then bring token ids, and results have no text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn, TypeVar

import jinja2
import msgspec
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from tidemill_contracts.models.config import ModelConfig
from tidemill_contracts.models.errors import CheckpointError
from tidemill_contracts.wire import ChatMessage, ErrorCode, GenerationJob, JobError, JobFailed
from tidemill_worker.engine.detokenizer import Detokenizer

_T = TypeVar("_T")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """What ``generation_config.json`` says where a job says nothing."""

    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    eos_token_id: int | list[int] | None = None


class _TokenizerConfig(msgspec.Struct, frozen=True):
    chat_template: str | list[dict[str, str]] | None = None
    eos_token: str | dict[str, object] | None = None


class TextModel:
    """What turns a job into token ids and a row's ids into text."""

    def __init__(self, model_dir: Path, config: ModelConfig) -> None:
        self.model_dir = model_dir
        self.vocab_size = config.vocab_size
        self.defaults = _read(model_dir / "generation_config.json", GenerationDefaults)
        tokenizer_config = _read(model_dir / "tokenizer_config.json", _TokenizerConfig)
        self.tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        self._token_bytes = _token_bytes(self.tokenizer) if self.tokenizer else []
        self._template = _load_template(model_dir, tokenizer_config)
        self.eos_token_ids = self._find_eos(config, tokenizer_config)

    def _find_eos(self, config: ModelConfig, tokenizer_config: _TokenizerConfig) -> frozenset[int]:
        """The union of what all three files say: each alone is known to be incomplete."""
        eos = set(config.eos_token_ids)
        declared = self.defaults.eos_token_id
        eos.update([declared] if isinstance(declared, int) else declared or [])
        token = tokenizer_config.eos_token
        content = token.get("content") if isinstance(token, dict) else token
        if self.tokenizer is not None and isinstance(content, str):
            token_id = self.tokenizer.token_to_id(content)
            if token_id is not None:
                eos.add(token_id)
        return frozenset(eos)

    def encode(self, job: GenerationJob) -> list[int]:
        """The job's prompt as token ids.

        Releases the GIL while it tokenises. Raises `JobFailed` where the prompt is empty, a
        token id is not in the vocabulary, the chat template refuses, or there is no tokenizer.
        """
        if job.prompt_token_ids is not None:
            ids = list(job.prompt_token_ids)
            largest = max(ids, default=0)
            if largest >= self.vocab_size:
                _fail(
                    ErrorCode.TOKEN_OUT_OF_RANGE,
                    f"Token id {largest} is outside the vocabulary of {self.vocab_size:,}"
                    f" - at `$.prompt_token_ids[{ids.index(largest)}]`",
                )
        else:
            text = self.render(job.messages) if job.messages is not None else job.prompt or ""
            if self.tokenizer is None:
                _fail(
                    ErrorCode.NO_TOKENIZER,
                    "The model directory has no tokenizer.json: send `prompt_token_ids`",
                )
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            _fail(ErrorCode.EMPTY_PROMPT, "The prompt has no tokens")
        return ids

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, up to where the assistant speaks. Raises `JobFailed`."""
        if self._template is None:
            _fail(
                ErrorCode.NO_TOKENIZER,
                "The model directory has no chat template: send `prompt` or `prompt_token_ids`",
            )
        if not messages:
            _fail(ErrorCode.EMPTY_PROMPT, "The conversation has no messages - at `$.messages`")
        try:
            return self._template.render(
                messages=[msgspec.to_builtins(message) for message in messages],
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is someone else's code: it may raise anything
            _fail(ErrorCode.TEMPLATE_FAILED, f"The chat template refused the messages: {error}")

    def detokenizer(self) -> Detokenizer | None:
        """A fresh detokenizer that skips special tokens; ``None`` without a tokenizer."""
        return Detokenizer(self._token_bytes) if self.tokenizer is not None else None


def _fail(code: ErrorCode, message: str) -> NoReturn:
    raise JobFailed(JobError.of(code, message))


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
        decoder = json.loads(path.read_bytes()).get("decoder") or {}
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path}: not a tokenizer: {error}") from error
    kinds = {decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))}
    if "ByteLevel" not in kinds:
        raise CheckpointError(f"{path}: not a byte-level tokenizer, as every Qwen3 model has")
    return tokenizer


def _load_template(model_dir: Path, config: _TokenizerConfig) -> jinja2.Template | None:
    path = model_dir / "chat_template.jinja"
    source = path.read_text("utf-8") if path.exists() else config.chat_template
    if isinstance(source, list):  # several named templates: take the one for chat
        source = next((t["template"] for t in source if t.get("name") == "default"), None)
    if source is None:
        return None
    # A template is code from the model's publisher: it runs sandboxed, with the settings and
    # the functions that Hugging Face's templates expect.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{model_dir}: the chat template is broken: {error}") from error


def _tojson(value: object, indent: int | None = None) -> str:
    # jinja2's own filter escapes HTML, which a prompt must not have.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _token_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes of every token id; empty for special tokens, which the text leaves out."""
    to_byte = {char: byte for byte, char in enumerate(_byte_alphabet())}
    table = [b""] * tokenizer.get_vocab_size(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id >= len(table):
            table.extend([b""] * (token_id + 1 - len(table)))
        if token_id in added:
            table[token_id] = b"" if added[token_id].special else token.encode()
        else:
            table[token_id] = bytes(to_byte[char] for char in token)
    return table


def _byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in a byte-level BPE vocabulary.

    Bytes that are printable in Latin-1 stand for themselves; the others are numbered from
    U+0100 on (GPT-2's ``bytes_to_unicode``).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]
