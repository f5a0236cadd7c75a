"""Compiles grammars for trial, in a process of its own that may die of one.

Some schemas of a few kilobytes compile for longer than anyone waits, and nothing can stop a thread
that does. So the worker has every new grammar compiled here first. The process ends itself
(SIGPROF) where one takes more than `CPU_SECONDS`, and the worker starts another.

Run as a script, since importing the package would take longer than most grammars. Each line in is
an llguidance grammar as a JSON string; each line out says why it is refused, or is empty.
"""

from __future__ import annotations

import json
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits

CPU_SECONDS = 2.0
MEMORY_BYTES = 4 * 2**30


def parser_limits() -> LLParserLimits:
    """Bounds on a grammar's size and on each step's work, for the trial and for real."""
    return LLParserLimits(
        # Work for a step's mask: some 15 ms for a row, and memory of 1 to 2 kB a state.
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limits = parser_limits()
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        refusal = LLMatcher.validate_grammar(json.loads(line), limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(refusal) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
