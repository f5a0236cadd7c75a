"""From a job to the engine's rows, and from finished rows to the job's result."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from tidemill_contracts.models.startup import ServedModel
from tidemill_contracts.wire import (
    Completion,
    ErrorCode,
    GenerationJob,
    GenerationResult,
    JobFailed,
    Receipt,
    Timings,
    Usage,
)
from tidemill_worker.chat import ThinkBlock, split
from tidemill_worker.defaults import sampling_defaults
from tidemill_worker.engine.grammar import RowGrammar
from tidemill_worker.engine.output import OutputText, Repetition
from tidemill_worker.engine.row import Row, RowSampling
from tidemill_worker.engine.thinking import Thinking
from tidemill_worker.repro import with_repro
from tidemill_worker.text import Prompt, TextModel


def make_rows(
    job: GenerationJob,
    job_id: str,
    prompt: Prompt,
    text: TextModel,
    *,
    grammars: Sequence[RowGrammar] = (),
    max_tokens: int,
    enqueued_at: float,
    seed: int | None = None,
) -> list[Row]:
    """One row for each output that the job asks for, seeded one by one; `grammars` has one for
    each of them, or none; `seed` was drawn for the job before, and counts where it gives none.

    Raises `JobFailed` where an option names a token that the model does not have, the result would
    be too large, or there is no room for what the job asks.
    """
    asked = job.sampling
    _check_tokens(job, text.vocab_size)
    try:
        asked.check_prompt_logprobs(len(prompt.token_ids))
    except ValueError as error:
        raise JobFailed.of(ErrorCode.INVALID_JOB, str(error)) from None
    sampling = _effective(job, prompt, text, seed)
    ends = set(asked.stop_token_ids)
    if not asked.ignore_eos:
        ends |= text.eos_token_ids
    budget = _thinking_budget(job, prompt, text, max_tokens)
    rows = []
    for index in range(asked.n):
        detokenizer = text.detokenizer(asked.skip_special_tokens)
        output = None
        if detokenizer is not None:
            output = OutputText(
                detokenizer, asked.stops, include_stop=asked.include_stop_str_in_output
            )
        elif asked.stops:
            raise JobFailed.of(
                ErrorCode.NO_TOKENIZER,
                "The model directory has no tokenizer.json: there is no text for"
                " `$.sampling.stop` to stand in; use `stop_token_ids`",
            )
        watch = asked.repetition_detection
        rows.append(
            Row(
                id=job_id if asked.n == 1 else f"{job_id}#{index}",
                token_ids=list(prompt.token_ids),
                max_len=len(prompt.token_ids) + max_tokens,
                sampling=dataclasses.replace(
                    sampling,
                    seed=nth_seed(sampling.seed, index),
                    # Outputs have one prompt: the first row tells of it.
                    prompt_logprobs=None if index else asked.prompt_logprobs,
                ),
                end_token_ids=frozenset(ends),
                min_tokens=min(asked.min_tokens, max_tokens),
                text=output,
                thinking=_thinking(job, prompt, text, budget),
                repetition=Repetition(watch.max_pattern, watch.min_count) if watch else None,
                grammar=grammars[index] if grammars else None,
                tenant=job.tenant,
                priority=job.priority,
                deadline=job.deadline,
                cache_salt=job.cache_salt,
                enqueued_at=enqueued_at,
            )
        )
    return rows


def thinking_room(job: GenerationJob, prompt: Prompt, text: TextModel) -> int:
    """Most tokens that a job's thinking budget lets thoughts take, the closing sentence included;
    0 where there is no budget, or the prompt has ended the thoughts.

    Raises `JobFailed` where the model has no tokens for the tags.
    """
    budget = job.chat.thinking_budget
    if budget is None or prompt.think_block is ThinkBlock.CLOSED:
        return 0
    if text.think_tokens is None:
        raise JobFailed.of(
            ErrorCode.INVALID_JOB,
            "The model's tokenizer has no tokens for <think> and </think>"
            " - at `$.chat.thinking_budget`",
        )
    return budget + len(text.think_tokens.closing)


def nth_seed(seed: int, index: int) -> int:
    """The seed of a job's output `index`; that of output 0 is the job's own."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<QQ", seed, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def make_result(
    job: GenerationJob, job_id: str, model: str, prompt: Prompt, rows: Sequence[Row]
) -> GenerationResult:
    """The job's one result. Raises `JobFailed` where a row failed."""
    for row in rows:
        if row.error is not None:
            raise JobFailed(with_repro(row.error, job, row))
    asked = job.sampling
    outputs = [_completion(job, prompt, row) for row in rows]
    first, first_row = outputs[0], rows[0]
    return GenerationResult(
        **{name: getattr(first, name) for name in Completion.__struct_fields__},
        id=job_id,
        model=model,
        usage=Usage(
            prompt_tokens=first_row.prompt_len,
            completion_tokens=sum(row.generated for row in rows),
            cached_tokens=first_row.cached,
            reasoning_tokens=sum(row.thinking.written for row in rows if row.thinking),
            resumed_tokens=sum(row.resumed for row in rows),
            draft_tokens=sum(row.draft_tokens for row in rows),
            accepted_draft_tokens=sum(row.accepted_draft_tokens for row in rows),
        ),
        timings=Timings(
            queued_ms=_since_enqueued(first_row, min(row.scheduled_at for row in rows)),
            first_token_ms=_since_enqueued(first_row, min(row.first_token_at for row in rows)),
            total_ms=_since_enqueued(first_row, max(row.finished_at for row in rows)),
        ),
        sampling=_told(first_row.sampling),
        outputs=outputs if len(outputs) > 1 else [],
        prompt_logprobs=(
            None if asked.prompt_logprobs is None else [None, *first_row.prompt_logprobs]
        ),
    )


def make_receipt(
    job: GenerationJob,
    prompt: Prompt,
    rows: Sequence[Row],
    text: TextModel,
    model: ServedModel,
    weights: str,
) -> Receipt:
    """What the job's result was made from; `weights` is the hash of the checkpoint's."""
    first = rows[0]
    return Receipt.of(
        weights=weights,
        contract=model.contract.abi_fingerprint(),
        chat_template=None if job.messages is None else text.templates_hash,
        prompt_token_ids=prompt.token_ids,
        sampling=settled_sampling(job, first),
        outputs=[row.output_token_ids for row in rows],
        dtype=str(model.runtime.dtype).removeprefix("torch."),
        quantization=model.contract.model.quant,
        deterministic=model.runtime.deterministic,
    )


def _completion(job: GenerationJob, prompt: Prompt, row: Row) -> Completion:
    assert row.finish_reason is not None
    # An end of sequence is no reason to tell of, unless the job has named it itself.
    told = isinstance(row.stop_reason, str) or row.stop_reason in job.sampling.stop_token_ids
    text = row.text.finish() if row.text is not None else None
    fields: dict[str, Any] = {}
    if job.messages is not None and text is not None:
        reply = split(text, thinking_open=prompt.thinking_open)
        fields = {
            "reasoning": reply.reasoning,
            "content": reply.content,
            "tool_calls": reply.tool_calls,
            "thinking_truncated": row.thinking is not None and row.thinking.truncated,
        }
    return Completion(
        text=text,
        token_ids=list(row.output_token_ids),
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason if told else None,
        logprobs=row.logprobs if row.sampling.wants_logprobs else None,
        **fields,
    )


def _thinking(
    job: GenerationJob, prompt: Prompt, text: TextModel, budget: int | None
) -> Thinking | None:
    if job.messages is None or text.think_tokens is None:
        return None
    return Thinking(text.think_tokens, is_open=prompt.thinking_open, budget=budget)


def _thinking_budget(
    job: GenerationJob, prompt: Prompt, text: TextModel, max_tokens: int
) -> int | None:
    """The budget that leaves room for an answer; a smaller one than the job's only where the
    length was left to the worker."""
    room = thinking_room(job, prompt, text)
    budget = job.chat.thinking_budget
    if budget is None or room == 0:
        return None
    lacking = max(0, room + 1 - max_tokens)
    if lacking > (budget if job.sampling.max_tokens is None else 0):
        raise JobFailed.of(
            ErrorCode.INVALID_JOB,
            f"{max_tokens:,} tokens leave no room for an answer after a thinking budget of"
            f" {budget:,} and the {room - budget} tokens that end the thoughts: raise"
            " `$.sampling.max_tokens` or lower the budget - at `$.chat.thinking_budget`",
        )
    return budget - lacking


def _effective(
    job: GenerationJob, prompt: Prompt, text: TextModel, drawn: int | None
) -> RowSampling:
    """The job's sampling, completed by the model's own defaults."""
    asked = job.sampling
    defaults = sampling_defaults(text, job, prompt)
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if (value := getattr(asked, name)) is not None
    }
    settled = {**defaults, **given}
    seed = drawn if asked.seed is None else asked.seed
    return RowSampling(
        temperature=settled["temperature"],
        top_p=settled["top_p"],
        top_k=max(0, int(settled["top_k"])),
        min_p=settled["min_p"],
        repetition_penalty=settled["repetition_penalty"],
        seed=secrets.randbits(63) if seed is None else seed,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=asked.logit_bias,
        allowed_token_ids=asked.allowed_token_ids or (),
        bad_words=[ids for word in asked.bad_words for ids in text.token_ids_of(word)],
        logprobs=asked.logprobs,
        logprob_token_ids=asked.logprob_token_ids,
    )


def settled_sampling(job: GenerationJob, row: Row) -> dict[str, Any]:
    """The job's sampling with everything settled that it leaves open, as plain values; `row` is its
    first."""
    return {
        **msgspec.to_builtins(job.sampling),
        **_told(row.sampling),
        "max_tokens": row.max_len - row.prompt_len,
        "end_token_ids": sorted(row.end_token_ids),
    }


def _told(sampling: RowSampling) -> dict[str, Any]:
    """What the result says of the effective sampling: what a job may leave open."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
    return {name: getattr(sampling, name) for name in names}


def _check_tokens(job: GenerationJob, vocab_size: int) -> None:
    asked = job.sampling
    named: dict[str, Iterable[int]] = {
        "logit_bias": asked.logit_bias,
        "allowed_token_ids": asked.allowed_token_ids or (),
        "stop_token_ids": asked.stop_token_ids,
        "logprob_token_ids": asked.logprob_token_ids,
    }
    for name, ids in named.items():
        largest = max(ids, default=0)
        if largest >= vocab_size:
            raise JobFailed.of(
                ErrorCode.TOKEN_OUT_OF_RANGE,
                f"Token id {largest} is outside the vocabulary of {vocab_size:,}"
                f" - at `$.sampling.{name}`",
            )


def _since_enqueued(row: Row, at: float) -> float:
    """Milliseconds from the job's enqueueing to a time in seconds."""
    return round(max(0.0, at - row.enqueued_at) * 1000, 3)
