"""Samples as ChatML conversations: for training as segments, for the export as a Jinja template.

The two must say the same thing; a test renders both and compares.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_model.tasks import Sample

Message = dict[str, str]

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

# Qwen3's own template adds to this: tool definitions in the system message, tool calls and
# thinking. This model has learnt none of them, so its template does not offer them;
# `enable_thinking` is therefore accepted and has no effect.
CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "    {%- if message.role in ['system', 'user', 'assistant'] %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "    {%- elif message.role == 'tool' %}\n"
    "        {%- if loop.first or loop.previtem.role != 'tool' %}\n"
    "            {{- '<|im_start|>user' }}\n"
    "        {%- endif %}\n"
    "        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}\n"
    "        {%- if loop.last or loop.nextitem.role != 'tool' %}\n"
    "            {{- '<|im_end|>\\n' }}\n"
    "        {%- endif %}\n"
    "    {%- else %}\n"
    "        {{- raise_exception('Unknown role: ' + message.role) }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}\n"
)

SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are Tidemill's demo model.",
    "Answer briefly.",
    "Answer with the result only.",
    "Be exact. Give only the answer, with no explanation.",
    "You answer short questions about numbers, letters and words.",
    "Reply in as few words as possible.",
    "Today is Monday.",
)


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a rendered conversation."""

    text: str
    learnt: bool  # True for what the model should write: an answer with its <|im_end|>


def prompt_text(messages: list[Message]) -> str:
    """`messages` in ChatML, up to where the assistant's answer starts."""
    turns = (f"{IM_START}{m['role']}\n{m['content']}{IM_END}\n" for m in messages)
    return "".join(turns) + f"{IM_START}assistant\n"


def conversation(
    samples: Iterator[Sample], rng: random.Random
) -> tuple[list[Sample], list[Segment]]:
    """The next training conversation: one sample, or a few as turns, at times with a system text.

    Returns the samples it took and the segments, whose texts in a row are the ChatML.
    """
    opening = ""
    if rng.random() < 0.3:
        # Joined at random, so that the questions start at many different positions.
        texts = rng.sample(SYSTEM_MESSAGES, rng.choice((1, 1, 2, 3)))
        opening = f"{IM_START}system\n{' '.join(texts)}{IM_END}\n"
    turns = [next(samples) for _ in range(rng.choice((1, 1, 1, 1, 1, 1, 2, 2, 3)))]
    segments: list[Segment] = []
    for sample in turns:
        question = prompt_text([{"role": "user", "content": sample.prompt}])
        segments.append(Segment(opening + question, learnt=False))
        segments.append(Segment(sample.answer + IM_END, learnt=True))
        opening = "\n"
    return turns, segments
