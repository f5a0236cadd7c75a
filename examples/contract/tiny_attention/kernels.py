"""The kernels: plain functions of tensors, which write into the logits and the cache.

T packed tokens of B rows, H hidden size, V vocabulary; the cache is [pages, page size, H]. A
token's key is its embedding plus that of its position, its value the embedding alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def prefill(
    input_ids: Tensor,
    seq_lens: Tensor,
    chunk_lens: Tensor,
    chunk_offsets: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logits: Tensor,
) -> None:
    """One chunk of each row; ``logits[b]`` are those of row b's last token."""
    spans = zip(chunk_offsets.tolist(), chunk_lens.tolist(), seq_lens.tolist(), strict=True)
    for row, (offset, length, end) in enumerate(spans):
        chunk = slice(offset, offset + length)
        logits[row] = _last_token(
            input_ids[chunk], end, block_table[row], slot_mapping[chunk],
            embed, positions, k_cache, v_cache,
        )  # fmt: skip


def decode(
    input_ids: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    embed: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    logits: Tensor,
) -> None:
    """One token of each row: a chunk of one."""
    for row, end in enumerate(seq_lens.tolist()):
        token = slice(row, row + 1)
        logits[row] = _last_token(
            input_ids[token], end, block_table[row], slot_mapping[token],
            embed, positions, k_cache, v_cache,
        )  # fmt: skip


def _last_token(
    tokens: Tensor,
    end: int,
    table: Tensor,
    slots: Tensor,
    embed: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:
    """Writes the chunk's keys and values; the logits [V] of its last token."""
    page_size, hidden_size = k_cache.shape[1:]
    k_pool, v_pool = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    # Positions are absolute: a chunk begins where the row's earlier ones have ended.
    places = torch.arange(end, device=tokens.device)
    values = embed[tokens]
    keys = values + positions[places[end - len(tokens) :]]
    # A negative slot means "do not write".
    written = slots >= 0
    k_pool[slots[written].long()] = keys[written]
    v_pool[slots[written].long()] = values[written]
    # Reads stop at the row's end: neither the tail of its last page nor a table entry of -1 is
    # ever touched, whatever lies there.
    context = table[places // page_size].long() * page_size + places % page_size
    scores = (k_pool[context] @ keys[-1]).float() * hidden_size**-0.5
    attended = scores.softmax(0).to(values.dtype) @ v_pool[context]
    return torch.mv(embed, attended + values[-1])
