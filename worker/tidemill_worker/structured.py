"""From a job's `structured` to the grammar of each of its rows.

Compiling happens in a thread of its own, after a trial in a process of its own
(`grammar_check`), so that neither the event loop nor the engine ever waits for a schema. What
was compiled, or refused, is kept by its content.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

from tidemill_contracts.wire import (
    ErrorCode,
    GenerationJob,
    JobError,
    JobFailed,
    StructuredOutput,
)
from tidemill_worker import grammar_check
from tidemill_worker.chat import ThinkBlock
from tidemill_worker.engine.grammar import RowGrammar, Stage, Vocabulary, refusal
from tidemill_worker.text import Prompt, TextModel

MAX_KEPT = 64
"""Compiled grammars and refusals."""
_JSON: Any = {
    "lenient": False,
    # A blank, or a new line and its indentation: as JSON is written by hand, and not without end.
    "whitespace_pattern": r"(\n[ \t]{0,24}|[ \t])",
}


class Grammars:
    """Compiles what jobs ask for. `close` it after use."""

    def __init__(self, text: TextModel, threads: int | None = None) -> None:
        self._text = text
        self._threads = threads
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[tuple[str, str], LLMatcher | JobError] = OrderedDict()
        self._trial = Trial()
        # One thread alone touches all of these.
        self._thread = ThreadPoolExecutor(1, "tidemill-grammar")

    async def for_rows(self, job: GenerationJob, prompt: Prompt) -> list[RowGrammar]:
        """One grammar for each output of the job; none where it asks for no form.

        Raises `JobFailed` where there is no tokenizer, or the form cannot be held to.
        """
        structured = job.sampling.structured
        if structured is None:
            return []
        if self._text.tokenizer is None:
            raise JobFailed.of(
                ErrorCode.NO_TOKENIZER,
                "The model directory has no tokenizer.json: an output has no text to hold to"
                " a form - at `$.sampling.structured`",
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self._make, job, structured, prompt
        )

    def close(self) -> None:
        """Ends the thread after what it is compiling, and the trial's process."""
        self._thread.shutdown(cancel_futures=True)
        self._trial.close()

    def _make(
        self, job: GenerationJob, structured: StructuredOutput, prompt: Prompt
    ) -> list[RowGrammar]:
        if self._vocabulary is None:
            self._vocabulary = _vocabulary(self._text, self._threads)
        key = structured.kind, structured.source
        compiled = self._kept.get(key)
        if compiled is None:
            compiled = self._kept[key] = self._compile(structured, self._vocabulary.tokenizer)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        if isinstance(compiled, JobError):
            raise JobFailed(compiled)
        stage = first_stage(job, prompt, self._text)
        return [
            RowGrammar(self._vocabulary, compiled.deep_copy(), stage) for _ in range(job.sampling.n)
        ]

    def _compile(
        self, structured: StructuredOutput, tokenizer: LLTokenizer
    ) -> LLMatcher | JobError:
        path = f"$.sampling.structured.{structured.kind}"
        try:
            grammar = _grammar(structured)
        except ValueError as error:
            return refusal(path, str(error))
        reason = self._trial.refusal(grammar)
        if reason:
            return refusal(path, reason)
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=grammar_check.parser_limits())
        # Computing the first mask tells of grammars that allow nothing, or too much at once.
        allowed = any(matcher.compute_bitmask())
        if matcher.is_error() and "NoExtension" not in matcher.get_error():
            return refusal(path, matcher.get_error())
        if matcher.is_error() or not allowed:
            return refusal(path, "No text has this form")
        return matcher


class Trial:
    """The process in which grammars are compiled first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def refusal(self, grammar: str) -> str:
        """Why the grammar cannot be compiled; empty where it can."""
        process = self._process
        if process is None or process.poll() is not None:
            self.close()
            process = self._process = _start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(grammar) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return str(json.loads(answer))
        status = self.close()
        if status == -signal.SIGPROF:
            return f"Too complex: it takes more than {grammar_check.CPU_SECONDS:g} s to compile"
        return f"Too complex: compiling it ended a process with status {status}"

    def close(self) -> int:
        """Ends the process; returns its status."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        with contextlib.suppress(BrokenPipeError), process:
            pass  # closes its pipes, whereupon it ends, and waits for that
        return process.returncode


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        # -P: modules beside the script are named as some of Python's own.
        [sys.executable, "-P", str(Path(grammar_check.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is the worker's to handle
    )


def first_stage(job: GenerationJob, prompt: Prompt, text: TextModel) -> Stage:
    """Whether the answer begins at once, or thoughts may come before it."""
    if prompt.think_block is ThinkBlock.OPEN:
        return Stage.THOUGHTS
    thinks = job.messages is not None and prompt.think_block is ThinkBlock.ABSENT
    if thinks and text.switches_thinking and job.chat.enable_thinking is not False:
        return Stage.START
    return Stage.ANSWER


def _grammar(structured: StructuredOutput) -> str:
    """In llguidance's own form. Raises `ValueError` where it cannot be read."""
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        return LLMatcher.grammar_from_regex("|".join(map(_escaped, structured.choice)))
    if structured.grammar is not None:
        return LLMatcher.grammar_from_lark(structured.grammar)
    schema = {"type": "object"} if structured.json_object else structured.json_schema
    if schema is False:
        raise ValueError("No JSON is valid by the schema `false`")
    # Options need a schema that is an object; `true` is the same as an empty one.
    given = schema if isinstance(schema, dict) else {}
    return LLMatcher.grammar_from_json_schema(given, overrides=_JSON)


def _escaped(text: str) -> str:
    """A regex that matches this text alone."""
    return "".join(char if char.isalnum() else rf"\x{{{ord(char):x}}}" for char in text)


class _Tokens:
    """A model's vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self.eos_token_id = text.vocab_size
        padding = text.vocab_size + 1 - len(text.token_bytes)
        self.tokens = [*text.token_bytes, *[b""] * padding]
        self.special_token_ids = [*text.special_token_ids, text.vocab_size]

    def __call__(self, raw: bytes) -> list[int]:
        """The tokens that a form's text is written with: just its bytes, none of them special."""
        words = raw.decode()
        ids = self._text.tokenise(words)
        plain = set(ids).isdisjoint(self.special_token_ids)
        if plain and b"".join(self.tokens[token_id] for token_id in ids) == raw:
            return ids
        return list(self._literal.encode(words, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Tokenizer:
        """The tokenizer without the normal form (Qwen's is NFC) that it brings a prompt into, and
        without the special tokens that it finds in one: few forms need it."""
        assert self._text.tokenizer is not None
        tokenizer = Tokenizer.from_str(self._text.tokenizer.to_str())
        tokenizer.normalizer = None
        tokenizer.encode_special_tokens = True
        return tokenizer


def _vocabulary(text: TextModel, threads: int | None) -> Vocabulary:
    def token(content: str) -> int | None:
        return None if text.tokenizer is None else text.tokenizer.token_to_id(content)

    return Vocabulary(
        size=text.vocab_size,
        token_bytes=text.token_bytes,
        tokenizer=LLTokenizer(TokenizerWrapper(_Tokens(text))),
        executor=LLExecutor(threads),
        think=token("<think>"),
        newlines={
            token_id: len(raw)
            for token_id, raw in enumerate(text.token_bytes)
            if raw in (b"\n", b"\n\n")
        },
        eos=text.eos_token_ids,
    )
