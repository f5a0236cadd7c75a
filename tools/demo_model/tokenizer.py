"""Trains the demo model's tokenizer: Qwen's byte-level BPE in miniature.

Normalisation, pre-tokenisation, byte mapping and the added tokens are Qwen3's; only the merges
are few. Text outside the tasks therefore still encodes, at about a token a byte.
"""

from __future__ import annotations

from itertools import islice

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from tools.demo_model.chat import END_OF_TEXT, IM_END, IM_START, SYSTEM_MESSAGES
from tools.demo_model.tasks import Split, stream

BASE_VOCABULARY = 493
"""Bytes and merges; with the added tokens 500, so that the model's 512 rows include padding."""

SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
TAG_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Added but not special, as in Qwen3: they survive `skip_special_tokens`."""

# From Qwen3's tokenizer.json: `\p{N}` alone splits every digit from its neighbours.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(seed: int = 0, samples: int = 20_000) -> Tokenizer:
    """A tokenizer trained on `samples` training questions and answers."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=BASE_VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [*SYSTEM_MESSAGES * 100, *("system\nuser\nassistant\n" for _ in range(samples))]
    for sample in islice(stream(seed, Split.TRAIN), samples):
        texts += (sample.prompt, sample.answer)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAG_TOKENS])
    return tokenizer
