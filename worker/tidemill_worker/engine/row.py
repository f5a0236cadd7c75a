"""One generation in the engine: what is known, how much of it is computed, how it ends.

One rule replaces the cases of prefill and decode: the computed tokens catch up with the known
ones. A row whose last known token has just been computed gets one more token sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill_contracts.keys import PRIORITY_STEP_MS
from tidemill_contracts.models.contract import Phase
from tidemill_contracts.wire import FinishReason, JobError, TokenLogprobs
from tidemill_worker.engine.drafter import Drafter
from tidemill_worker.engine.grammar import RowGrammar
from tidemill_worker.engine.output import OutputText, Repetition
from tidemill_worker.engine.thinking import Thinking


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The effective sampling of one row, every default resolved."""

    temperature: float
    top_p: float
    top_k: int
    """0 for the whole vocabulary."""
    seed: int
    """Given, or drawn once when the row was made."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    """Empty where every token is allowed."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences whose last token is barred after the others."""
    logprobs: int | None = None
    """How many of the likeliest tokens to tell of; ``None`` for no log probabilities at all."""
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    """The same as `logprobs`, for the tokens of the prompt."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.top_k == 1

    @property
    def unfiltered(self) -> bool:
        return self.top_k == 0 and self.top_p >= 1 and self.min_p == 0

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)


@dataclass(frozen=True, slots=True)
class FailedStep:
    """The step that a row failed in."""

    phase: Phase
    computed: int
    """Tokens of the row that were computed before it."""
    length: int
    """Tokens that it was to compute."""


@dataclass(slots=True, eq=False)
class Row:
    """One generation. Owned by the engine's thread once it is submitted."""

    id: str
    token_ids: list[int]
    """Prompt and generated tokens."""
    max_len: int
    """Length at which the row ends, in tokens."""
    sampling: RowSampling
    end_token_ids: frozenset[int] = frozenset()
    """End-of-sequence and stop tokens: each ends the row."""
    min_tokens: int = 0
    """Generated tokens before which nothing but the length ends the row."""
    text: OutputText | None = None
    """``None`` where the model has no tokenizer."""
    thinking: Thinking | None = None
    """Of a chat."""
    repetition: Repetition | None = None
    grammar: RowGrammar | None = None
    """What the output is held to; it moves on with each token that is appended."""
    tenant: str = ""
    priority: int = 0
    deadline: float | None = None
    """Seconds since the Unix epoch."""
    cache_salt: str = ""
    """Rows share cached prefixes only with rows of the same salt."""
    enqueued_at: float = 0.0
    """Seconds since the Unix epoch, as are the other times."""

    prompt_len: int = field(init=False)
    arrival: int = field(default=0, init=False)
    """Order in which the scheduler met the rows."""
    computed: int = field(default=0, init=False)
    """Tokens whose K and V are in the cache."""
    cached: int = field(default=0, init=False)
    """Prompt tokens that the prefix cache saved this row from computing."""
    resumed: int = field(default=0, init=False)
    """Generated tokens that come from another worker."""
    charged: int = field(default=0, init=False)
    """Tokens that its tenant has been charged for, or never will be."""
    pages: list[int] = field(default_factory=list, init=False)
    table_index: int = field(default=-1, init=False)
    """Its line in the block tables while it runs; −1 while it waits."""
    preemptions: int = field(default=0, init=False)
    restarts: int = field(default=0, init=False)
    """Times that the backend lost its K and V."""
    drafter: Drafter | None = field(default=None, init=False)
    """Guesses its tokens, once it decodes where that is asked for."""
    draft_tokens: int = field(default=0, init=False)
    """Guessed tokens that were computed."""
    accepted_draft_tokens: int = field(default=0, init=False)
    """Those of them that saved the row a step."""
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    """Of the prompt's tokens from the second on, as far as they are told."""
    scheduled_at: float = field(default=0.0, init=False)
    first_token_at: float = field(default=0.0, init=False)
    finished_at: float = field(default=0.0, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)
    stop_reason: str | int | None = field(default=None, init=False)
    """The stop text or token that ended the row."""
    error: JobError | None = field(default=None, init=False)
    failed_step: FailedStep | None = field(default=None, init=False)
    """Where the engine, not the job, is what the error speaks of."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.token_ids)

    @property
    def known(self) -> int:
        return len(self.token_ids)

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining(self) -> int:
        """Known tokens that are not computed yet; 1 is a decode step."""
        return len(self.token_ids) - self.computed

    @property
    def untold(self) -> range:
        """Places of the prompt whose logits are still to be told of; each tells of the token after
        it. Outlives a preemption: no place is told of twice."""
        if self.sampling.prompt_logprobs is None:
            return range(0)
        return range(len(self.prompt_logprobs), self.prompt_len - 1)

    @property
    def reusable(self) -> int:
        """Leading tokens whose K and V may come from another row: the logits of the others are
        needed, those of the last known token in any case."""
        return self.untold.start if self.untold else self.known - 1

    @property
    def held(self) -> bool:
        """Whether a mask says which token may come next."""
        return self.grammar is not None and self.grammar.masks

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def rank(self) -> tuple[float, int]:
        """Lower has waited longer, each step of priority counted as a minute: it is preempted
        later. Never changes, so that whatever comes later is one day behind every row."""
        return (self.enqueued_at - self.priority * PRIORITY_STEP_MS / 1000, self.arrival)

    def replay(self, token_ids: Sequence[int], first_token_at: float) -> bool:
        """Appends what another worker has generated, in a row that is not submitted yet.

        False where they are not what this row could have generated: it is of no use any more.
        """
        for token_id in token_ids:
            if self.ended:
                return False
            self.append(token_id, first_token_at)
        self.resumed = len(token_ids)
        # All but the last of them were computed there, and charged for.
        self.charged = self.known - 1 if token_ids else 0
        return self.error is None

    def append(self, token_id: int, now: float) -> None:
        """Adds the next token and notes whether it ends the row."""
        if not self.generated:
            self.first_token_at = now
        self.token_ids.append(token_id)
        if self.thinking is not None:
            self.thinking.append(token_id)
        if token_id in self.end_token_ids and self.generated > self.min_tokens:
            # Its own text is no part of the output, and can complete no stop text.
            self._end("stop", token_id)
            return
        may_stop = self.generated >= self.min_tokens
        stop = None
        if self.text is not None:
            stop = self.text.append(token_id, may_stop=may_stop)
        if self.grammar is not None:
            self.grammar.advance(token_id)
        if stop is not None:
            self._end("stop", stop)
        elif self.grammar is not None and self.grammar.over:
            self.end_with_grammar()
        elif self.known >= self.max_len:
            self._end("length")
        elif may_stop and self._repeats():
            self._end("repetition")

    def end_with_grammar(self) -> None:
        """Ends the row where nothing can be added to its form, or the grammar has failed."""
        assert self.grammar is not None
        self.error = self.grammar.error
        if self.error is None:
            self._end("stop")

    def _repeats(self) -> bool:
        return self.repetition is not None and self.repetition.found(
            self.token_ids, self.prompt_len
        )

    def _end(self, reason: FinishReason, stop: str | int | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop
