"""What a result tells of the model's own probabilities, for tokens of the output and the prompt.

By the contract's kernels where it has some, else in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tidemill_contracts.models.sampling import SamplingKernels, Telling
from tidemill_contracts.wire import TokenLogprobs
from tidemill_worker.engine.logit_blocks import LogitBlocks


def tell(
    kernels: SamplingKernels, logits: Tensor, tellings: Sequence[Telling]
) -> list[TokenLogprobs | None]:
    """By kernels; ``None`` where a place's logits, of ``[places, vocabulary]``, are not finite."""
    return [
        None
        if told is None
        else TokenLogprobs(logprob=told.logprob, top=told.top, listed=told.listed)
        for told in kernels.tell(logits, tellings)
    ]


def token_logprobs(
    log_probabilities: Tensor, token_ids: Sequence[int], top: int, listed: Sequence[int]
) -> list[TokenLogprobs]:
    """In torch, of the tokens that stand in some places of one row.

    `log_probabilities` is float32 ``[places, vocabulary]``. `top` is how many of the likeliest
    tokens to tell of, `listed` are others to tell of in each place.
    """
    device = log_probabilities.device
    own = log_probabilities.gather(1, torch.tensor(token_ids, device=device)[:, None])[:, 0]
    places, vocabulary = log_probabilities.shape
    values, ids = LogitBlocks.of(log_probabilities).likeliest(range(places), min(top, vocabulary))
    asked = log_probabilities[:, torch.tensor(listed, dtype=torch.long, device=device)]
    return [
        TokenLogprobs(
            logprob=logprob,
            top=dict(zip(likeliest, their_values, strict=True)),
            listed=dict(zip(listed, asked_values, strict=True)),
        )
        for logprob, likeliest, their_values, asked_values in zip(
            own.tolist(), ids.tolist(), values.tolist(), asked.tolist(), strict=True
        )
    ]
