"""How to sample where a job leaves it open: the model's generation config, and Qwen3's own advice.

Qwen3 is to be sampled differently with and without thinking, but a model has one
``generation_config.json``, and published hybrids ship the values for thinking. So, for a value that
the job does not give:

1. A config with ``do_sample: false`` is greedy, in every mode.
2. A raw prompt (`prompt`, `prompt_token_ids`) follows the config as it is; what that leaves out is
   Hugging Face's default: greedy, the whole vocabulary.
3. A chat follows the config; what that leaves out is Qwen3's advice for the mode.
4. A chat that is known not to think (its think block is closed in the prompt, or it asked for
   ``enable_thinking: false``) follows Qwen3's advice if the config has nothing but the values for
   thinking. Any other value was put there for this model, and stays.

The prompt decides the mode: a template that thinks whatever it is told thinks. The soft switches
``/think`` and ``/no_think`` are the model's to see, and change nothing here.
"""

from __future__ import annotations

from tidemill_contracts.wire import GenerationJob
from tidemill_worker.chat import ThinkBlock
from tidemill_worker.text import Prompt, TextModel

# Model cards of Qwen3, "Best Practices".
THINKING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}
NON_THINKING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.0}
_PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def sampling_defaults(text: TextModel, job: GenerationJob, prompt: Prompt) -> dict[str, float]:
    """`temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` for what the job leaves
    open; a `temperature` of 0 is greedy, a `top_k` of 0 the whole vocabulary."""
    config = text.defaults
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k", "min_p")
        if (value := getattr(config, name)) is not None
    }
    if job.messages is None or config.do_sample is False:
        settled = {**_PLAIN, **given}
        if not config.do_sample:
            settled["temperature"] = 0.0
    elif prompt.think_block is ThinkBlock.OPEN:
        settled = {**THINKING, **given}
    elif prompt.think_block is ThinkBlock.CLOSED or job.chat.enable_thinking is False:
        meant_for_thinking = all(THINKING[name] == value for name, value in given.items())
        settled = {**NON_THINKING, **({} if meant_for_thinking else given)}
    else:
        settled = {**(THINKING if text.switches_thinking else NON_THINKING), **given}
    penalty = config.repetition_penalty
    return {**settled, "repetition_penalty": 1.0 if penalty is None else penalty}
