"""Checks of the KV cache: which slots are written, which places are read.

The layout of the pools is the contract's own affair, so nothing here looks for a place in them.
What has been written is told by what has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tidemill_contracts.models import startup
from tidemill_contracts.models.conformance.case import with_page_size
from tidemill_contracts.models.conformance.harness import Edit, Harness, Row
from tidemill_contracts.models.conformance.session import (
    STEPS,
    CheckFailed,
    CheckSkipped,
    Session,
)
from tidemill_contracts.models.contract import StageInputs

PAGE_SIZES = (8, 16, 128)
"""What `page_size_independence` tries."""

GARBAGE = 12345.0
"""A value that no kernel writes by chance, in bfloat16 neither."""


def cache_size(session: Session) -> None:
    """`allocate` takes the bytes that `bytes_per_page` announces, on pages of the asked size."""
    spec = session.contract.hooks.cache_spec(session.case.config, session.runtime)
    if spec.page_size != session.runtime.page_size:
        raise CheckFailed(
            f"cache_spec() has pages of {spec.page_size} tokens, asked for"
            f" {session.runtime.page_size}"
        )
    session.pools()
    for pages in (1, 3):
        cache = spec.allocate(pages)
        found = cache.k.nbytes + cache.v.nbytes
        if found != pages * spec.bytes_per_page:
            raise CheckFailed(
                f"allocate({pages}) takes {found:,} bytes, announced are {spec.bytes_per_page:,}"
                " for a page"
            )


def zeroed_pages(session: Session) -> None:
    """Pages start zeroed."""
    session.pools()
    spec = session.contract.hooks.cache_spec(session.case.config, session.runtime)
    # An allocator is likely to hand out again, unzeroed, what was just given back.
    used = spec.allocate(3)
    _fill((used.k, used.v), 1)
    del used
    cache = spec.allocate(3)
    for name, pool in (("K", cache.k), ("V", cache.v)):
        if wrong := int(pool.count_nonzero()):
            raise CheckFailed(f"{wrong} of {pool.numel()} elements of {name} are not zero")


def slot_mapping(session: Session) -> None:
    """Each token writes its own slot, whole and alone, from the first slot to the last one."""
    pools = _floating_pools(session)
    harness = session.harness()
    page, pages = session.runtime.page_size, session.runtime.total_kv_pages
    _fill(pools, GARBAGE)
    harness.prefill((Row(), session.tokens(1)))
    alone = sum(int(mask.sum()) for mask in _written(pools))
    spec = session.contract.hooks.cache_spec(session.case.config, session.runtime)
    if not alone:
        raise CheckFailed("the prefill of one token writes nothing to the cache")

    length = min(page + 1, session.runtime.max_seq_len - 1)
    for ids in ([pages - 1, 0], [0, pages - 1]):
        harness = session.harness()
        _fill(pools, GARBAGE)
        row = Row(pages=list(ids))
        harness.prefill((row, session.tokens(length)))
        before = _written(pools)
        _expect_count(before, length * alone, f"the prefill of {length} tokens on pages {ids}")
        kept = [pool.clone() for pool in pools]
        harness.decode((row, 1))
        after = _written(pools)
        _expect_count(after, (length + 1) * alone, f"that and the decode of 1 token on {ids}")
        for pool, old, mask in zip(pools, kept, before, strict=True):
            if not torch.equal(pool[mask], old[mask]):
                raise CheckFailed(f"the decode at length {length + 1} changes earlier places")
    if alone * pools[0].dtype.itemsize * page > spec.bytes_per_page:
        raise CheckFailed(f"one token writes {alone} elements, more than its share of a page")


def _floating_pools(session: Session) -> tuple[Tensor, Tensor]:
    """Raises `CheckSkipped` where a cache cannot hold a NaN or `GARBAGE`."""
    pools = session.pools()
    if not all(pool.is_floating_point() for pool in pools):
        raise CheckSkipped("the cache holds no floating-point numbers")
    return pools


def _fill(pools: tuple[Tensor, Tensor], value: float) -> None:
    for pool in pools:
        pool.fill_(value)


def _written(pools: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Where the pools no longer hold `GARBAGE`."""
    return [pool != torch.full_like(pool, GARBAGE) for pool in pools]


def _expect_count(written: list[Tensor], expected: int, what: str) -> None:
    found = sum(int(mask.sum()) for mask in written)
    if found != expected:
        raise CheckFailed(
            f"{what} changes {found} elements of K and V; {expected} would be one slot a token"
        )


def negative_slots(session: Session) -> None:
    """A negative slot means "do not write", in prefill and decode, and holds back no neighbour."""
    page, last = session.runtime.page_size, session.runtime.total_kv_pages - 1
    longest = session.runtime.max_seq_len - 1
    tokens = session.tokens(min(page + 2, longest))
    # Where a negative slot would land: counted from the end of the pool, or before its start.
    pages = [last, last - 1, 0][: max(1, (longest + 1) // page)]
    victim_tokens = session.tokens(min(len(pages) * page - 1, longest), seed=1)
    harness, victim = session.harness(), Row(pages=list(pages))
    harness.prefill((victim, victim_tokens))
    expected = harness.decode((victim, 1))
    for slot in (-1, -page - 1):
        hidden = _with_slots(partial(torch.full_like, fill_value=slot))
        harness, victim = session.harness(), Row(pages=list(pages))
        harness.prefill((victim, victim_tokens))
        before = _copies(session)
        harness.prefill((Row(pages=[1, 2]), tokens), edit=hidden)
        _expect_unchanged(session, before, f"a prefill with slots {slot}")
        row = Row(pages=[1, 2])
        harness.prefill((row, tokens))
        before = _copies(session)
        harness.decode((row, 1), edit=hidden)
        _expect_unchanged(session, before, f"a decode with slot {slot}")
        found = harness.decode((victim, 1))
        session.expect(found, expected, ["another row"], f"had nobody written slot {slot}")

    session.need_rows(2)
    harness, row = session.harness(), Row()
    second = torch.arange(2 * len(tokens)) >= len(tokens)
    only_first = _with_slots(lambda slots: slots.where(~second.to(slots.device), -1))
    harness.prefill((row, tokens), (Row(), tokens[::-1]), edit=only_first)
    found = harness.decode((row, 1))
    harness, row = session.harness(), Row()
    harness.prefill((row, tokens))
    expected = harness.decode((row, 1))
    session.expect(found, expected, ["row 0"], "where its neighbour has no negative slots")


def _with_slots(change: Callable[[Tensor], Tensor]) -> Edit:
    return lambda inputs: replace(inputs, slot_mapping=change(inputs.slot_mapping))


def _copies(session: Session) -> list[Tensor]:
    """K and V as they are now; nothing where this process does not see them."""
    try:
        return [pool.clone() for pool in session.pools()]
    except CheckSkipped:
        return []


def _expect_unchanged(session: Session, before: list[Tensor], what: str) -> None:
    for index, (old, new) in enumerate(zip(before, _copies(session), strict=True)):
        if changed := int((new != old).sum()):
            raise CheckFailed(f"{what} changes {changed} elements of {'KV'[index]}")


def kv_rewrite_idempotent(session: Session) -> None:
    """Computing a chunk again over its own slots changes neither its logits nor the cache."""
    tokens = session.prompts[0]
    half = len(tokens) // 2
    harness, row = session.harness(), Row()
    harness.prefill((row, tokens[:half]))
    expected = harness.prefill((row, tokens[half:]))
    kept = _copies(session)
    row.length = half
    found = harness.prefill((row, tokens[half:]))
    session.expect(found, expected, ["the second time"], "the first time")
    for index, (old, new) in enumerate(zip(kept, _copies(session), strict=True)):
        difference = (new.float() - old.float()).abs().max().item()
        if not difference <= session.tolerance * old.float().std().item():
            raise CheckFailed(f"{'KV'[index]} differs by {difference:.3g} after the second time")


def stored_k(session: Session) -> None:
    """K and V lie in the cache as the reference stores them: K after its norm and RoPE."""
    reference = session.reference()
    tokens = session.tokens(min(session.runtime.page_size, 9))
    found = _stored(session, tokens)
    expected = _stored(reference, tokens)
    for name, ours, theirs in zip("KV", found, expected, strict=True):
        if len(ours) != len(theirs):
            raise CheckSkipped(f"{name} takes another number of elements than in the reference")
        difference = (ours - theirs).abs().max().item()
        allowed = session.tolerance * theirs.std().item()
        if not difference <= allowed:
            raise CheckFailed(
                f"sorted by size, the stored {name} of {len(tokens)} tokens is off by"
                f" {difference:.3g}, allowed is {allowed:.3g}; K belongs there after norm and RoPE"
            )


def _stored(session: Session, tokens: tuple[int, ...]) -> list[Tensor]:
    """What a prefill has written, K and V apart, whatever the layout: sorted by size."""
    pools = _floating_pools(session)
    harness = session.harness()
    _fill(pools, GARBAGE)
    harness.prefill((Row(), tokens))
    return [
        pool[mask].float().cpu().sort().values
        for pool, mask in zip(pools, _written(pools), strict=True)
    ]


def reused_pages(session: Session) -> None:
    """What earlier rows have left in a page changes nothing."""
    found = _used(session).run(session.prompts, STEPS)
    session.expect_run(found, session.clean, session.prompts, "on pages that nobody has used")


def _used(session: Session) -> Harness:
    """New rows on pages that earlier ones have filled."""
    harness = session.harness()
    rows = [Row() for _ in range(session.runtime.max_batch_size)]
    full = session.runtime.max_seq_len
    harness.prefill(*((row, session.tokens(full, seed)) for seed, row in enumerate(rows)))
    for row in rows:
        harness.release(row)
    return harness


def nan_in_page_tail(session: Session) -> None:
    """A NaN where a row has written nothing (page tails, others' pages) reaches no output."""
    for chunk in (None, max(1, session.runtime.page_size - 3)):
        found = _poisoned(session).run(session.prompts, STEPS, chunk=chunk)
        for row, logits in enumerate(found):
            if not logits.isfinite().all():
                raise CheckFailed(
                    f"row {row} of {len(session.prompts[row])} tokens"
                    f"{f', in chunks of {chunk},' if chunk else ''} has logits that are not finite"
                )
        expected = session.harness().run(session.prompts, STEPS, chunk=chunk)
        session.expect_run(found, expected, session.prompts, "without NaN in the cache")


def _poisoned(session: Session) -> Harness:
    """New rows on pages of NaN."""
    pools = _floating_pools(session)
    harness = session.harness()
    _fill(pools, float("nan"))
    return harness


def unused_table_entries(session: Session) -> None:
    """Block-table entries past a row's pages are never read, whether −1 or another row's page."""
    page, most = session.runtime.page_size, session.runtime.max_seq_len
    # Rows that fill their pages to the end: there is no tail that could be read instead.
    lengths = [min(page, most), min(2 * page, most)][: session.runtime.max_batch_size]
    prompts = [session.tokens(length, seed) for seed, length in enumerate(lengths)]
    expected = _prefill_then_decode_last(session.harness(), prompts)
    labels = [
        f"{phase} at length {length}" for phase in ("prefill", "decode") for length in lengths
    ]
    for entry in (-1, 0, session.runtime.total_kv_pages - 1):

        def unused(inputs: StageInputs, entry: int = entry) -> StageInputs:
            table = inputs.block_table
            return replace(inputs, block_table=table.where(table >= 0, entry))

        # On NaN, where that can be, a page that is read shows even with a weight of zero.
        try:
            harness = _poisoned(session)
        except CheckSkipped:
            harness = _used(session)
        found = _prefill_then_decode_last(harness, prompts, unused)
        unlike = f"on zeroed pages, where unused entries are -1 (here they are {entry})"
        session.expect(found, expected, labels, unlike)


def _prefill_then_decode_last(
    harness: Harness, prompts: list[tuple[int, ...]], edit: Edit | None = None
) -> Tensor:
    """The logits of whole prompts, then those of their last tokens, decoded into the same slots."""
    rows = [Row() for _ in prompts]
    prefilled = harness.prefill(*zip(rows, prompts, strict=True), edit=edit)
    for row in rows:
        row.length -= 1
    lasts = [prompt[-1] for prompt in prompts]
    return torch.cat((prefilled, harness.decode(*zip(rows, lasts, strict=True), edit=edit)))


def shared_pages(session: Session) -> None:
    """Rows may share the full pages of a common prefix, as the prefix cache has them do."""
    page, most = session.runtime.page_size, session.runtime.max_seq_len
    if most < page + 6:
        raise CheckSkipped("a row has no page but its first")
    session.need_rows(2)
    prefix, one, two = session.tokens(page), session.tokens(3, seed=1), session.tokens(4, seed=2)
    harness, first = session.harness(), Row()
    harness.prefill((first, prefix + one[:2]))
    second = Row(pages=first.pages[:1], length=page)
    found = harness.prefill((second, two))
    found = torch.cat((found, harness.decode((first, one[2]), (second, 1))))

    harness, first, second = session.harness(), Row(), Row()
    harness.prefill((first, prefix + one[:2]))
    expected = harness.prefill((second, prefix + two))
    expected = torch.cat((expected, harness.decode((first, one[2]), (second, 1))))
    labels = ["the row that shares, prefill", "the row that shared, decode", "the other, decode"]
    session.expect(found, expected, labels, "on pages of its own")


def page_size_independence(session: Session) -> None:
    """The page size does not change what a row computes."""
    own = session.runtime.page_size
    if "page_size" in session.contract.limits:
        raise CheckSkipped(f"the contract's limits fix the page size at {own}")
    expected = session.clean
    others = [size for size in PAGE_SIZES if size != own]
    accepted = [size for size in others if _accepts(session, size)]
    if not accepted:
        raise CheckSkipped(f"the contract refuses pages of {others} tokens")
    for size in accepted:
        found = session.harness(size).run(session.prompts, STEPS)
        session.expect_run(
            found, expected, session.prompts, f"on pages of {own}, not {size}, tokens"
        )


def _accepts(session: Session, page_size: int) -> bool:
    runtime = with_page_size(session.contract, session.runtime, page_size)
    return not list(startup.problems(session.contract, session.case.config, runtime))
