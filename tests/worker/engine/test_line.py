"""Whose turn it is: priorities that age, tenants that share evenly, deadlines, long lines."""

from __future__ import annotations

import random
import sys
from types import FrameType

from tests.worker.engine.conftest import Bench, make_row
from tidemill_worker.engine.fairness import FairShare
from tidemill_worker.engine.line import MAX_PREEMPTIONS, WaitingLine
from tidemill_worker.engine.row import Row


def _line(*rows: Row) -> WaitingLine:
    fair = FairShare()
    line = WaitingLine(fair)
    for arrival, row in enumerate(rows):
        row.arrival = arrival
        fair.arrive(row.tenant)
        line.push(row)
    return line


def _order(line: WaitingLine) -> list[str]:
    names = []
    while (row := line.first()) is not None:
        line.remove(row)
        names.append(row.id)
    return names


def _served_first(bench: Bench, count: int) -> list[str]:
    """Tenants of the first rows that are done."""
    while len(bench.delivered) < count:
        bench.step()
    return [row.tenant for row in bench.delivered[:count]]


def test_a_step_of_priority_is_a_minute_of_having_waited() -> None:
    line = _line(
        make_row([1], name="new", enqueued_at=1_000.0),
        make_row([1], name="high", enqueued_at=1_000.0, priority=1),
        make_row([1], name="old", enqueued_at=939.0),
        make_row([1], name="not so old", enqueued_at=941.0),
        make_row([1], name="low and very old", enqueued_at=100.0, priority=-10),
    )
    assert _order(line) == ["low and very old", "old", "high", "not so old", "new"]


def test_of_one_tenant_the_earliest_deadline_comes_first_then_the_oldest() -> None:
    line = _line(
        make_row([1], name="none"),
        make_row([1], name="later", deadline=9.0),
        make_row([1], name="soon", deadline=5.0),
        make_row([1], name="none, younger"),
        make_row([1], name="soon, younger", deadline=5.0),
        make_row([1], name="higher priority", priority=1),
    )
    assert _order(line) == [
        "higher priority", "soon", "soon, younger", "later", "none", "none, younger",
    ]  # fmt: skip


def test_ten_rows_do_not_wait_for_the_hundred_of_another_tenant() -> None:
    bench = Bench(max_rows=2)
    for n in range(100):
        bench.add(make_row([n, 1], 3, name=f"a{n}", tenant="a"))
    bench.step(20)
    done_before = len(bench.delivered)
    for n in range(10):
        bench.add(make_row([n, 2], 3, name=f"b{n}", tenant="b"))
    tenants = _served_first(bench, done_before + 26)[done_before:]
    assert tenants.count("b") == 10


def test_tenants_share_by_tokens_not_by_rows() -> None:
    bench = Bench(max_rows=1, pages=64)
    for n in range(40):
        bench.add(make_row([n] * 3, 18, name=f"long{n}", tenant="long"))
        bench.add(make_row([n] * 3, 3, name=f"short{n}", tenant="short"))
    tenants = _served_first(bench, 30)
    # 3 + 2·17 weighted tokens against 3 + 2·2.
    assert 4 <= tenants.count("short") / tenants.count("long") <= 7


def test_tenants_of_another_priority_have_their_own_turn() -> None:
    bench = Bench(max_rows=1)
    for n in range(4):
        bench.add(make_row([n], 2, tenant="a", name=f"low{n}", priority=-1))
        bench.add(make_row([n], 2, tenant="b", name=f"high{n}"))
    bench.run()
    assert [row.id[:-1] for row in bench.delivered] == ["high"] * 4 + ["low"] * 4


def test_an_idle_tenant_saves_up_no_credit() -> None:
    fair = FairShare()
    fair.arrive("idle")
    fair.leave("idle")
    fair.arrive("busy")
    fair.charge("busy", 1_000_000)
    fair.arrive("idle")
    assert fair.served("idle") == fair.served("busy")


def test_leaving_for_a_moment_does_not_wipe_out_what_a_tenant_had() -> None:
    fair = FairShare()
    for tenant in ("a", "b"):
        fair.arrive(tenant)
    fair.charge("a", 500)
    fair.charge("b", 100)
    fair.leave("a")
    fair.arrive("a")
    assert fair.served("a") - fair.served("b") == 400
    fair.leave("a")
    fair.charge("b", 900)
    fair.arrive("c")
    assert fair.served("c") == fair.served("b")
    assert len(fair) == 2  # what a had in advance is made up for


def test_nothing_is_remembered_of_tenants_when_all_are_idle() -> None:
    bench = Bench()
    for n in range(50):
        bench.add(make_row([n, 1], 2, tenant=f"tenant-{n}"))
    bench.run()
    assert len(bench.scheduler.fair) == 0
    assert bench.scheduler.line.first() is None
    assert not bench.scheduler.line._lanes


def test_counters_never_fall_so_a_heap_of_them_is_never_wrong() -> None:
    rng = random.Random(5)
    fair = FairShare()
    rows: list[str] = []
    before: dict[str, int] = {}
    for _ in range(5_000):
        tenant = f"t{rng.randrange(8)}"
        if rows and rng.random() < 0.5:
            tenant = rows.pop(rng.randrange(len(rows)))
            fair.charge(tenant, rng.randrange(50))
            before[tenant] = fair.served(tenant)
            fair.leave(tenant)
        else:
            idle = tenant not in rows
            floor = min((fair.served(other) for other in rows), default=0)
            fair.arrive(tenant)
            rows.append(tenant)
            if idle:
                assert fair.served(tenant) >= max(before.get(tenant, 0), floor)


def test_a_row_that_was_preempted_too_often_goes_before_all() -> None:
    often = make_row([1], name="often", enqueued_at=1_000.0, priority=-100)
    often.preemptions = MAX_PREEMPTIONS
    assert _order(_line(make_row([1], name="first", priority=100), often)) == ["often", "first"]


def test_rows_set_aside_come_back_where_they_were() -> None:
    rows = [make_row([1], name=str(n), tenant="ab"[n % 2]) for n in range(6)]
    line = _line(*rows)
    for _ in range(100):
        for _ in range(4):
            row = line.first()
            assert row is not None
            line.set_aside(row)
        assert len(line) == 6
        line.restore()
    names = _order(line)
    assert sorted(names) == ["0", "1", "2", "3", "4", "5"]
    assert [name for name in names if name in "024"] == ["0", "2", "4"]


def test_a_row_put_in_line_again_is_there_once() -> None:
    row, other = make_row([1, 2], name="row"), make_row([3], name="other")
    line = _line(row, other)
    for _ in range(1_000):
        line.remove(row)
        line.push(row)
    assert (len(line), line.tokens, line.room) == (2, 3, 16)
    assert len(line._lanes[0].oldest._entries) < 200
    assert _order(line) == ["row", "other"]
    assert (len(line), line.tokens, line.room) == (0, 0, 0)


def test_late_rows_are_found_and_no_others() -> None:
    rows = [make_row([1], deadline=float(n) if n else None) for n in range(10)]
    line = _line(*rows)
    line.remove(rows[2])
    late = line.expired(4.0)
    assert sorted(row.deadline or 0 for row in late) == [1.0, 3.0, 4.0]
    for row in late:
        line.remove(row)
    assert line.expired(4.0) == []


def test_a_turn_in_a_line_of_a_hundred_thousand_costs_no_more_than_a_logarithm() -> None:
    rows = [
        make_row([1], tenant=str(n % 1_000), priority=n % 3, deadline=1e9 if n % 9 == 0 else None)
        for n in range(100_000)
    ]
    line = _line(*rows)
    line.first()  # the tenants' counters are looked up once
    calls = 0

    def count(frame: FrameType, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for n in range(100):
            row = line.first()
            assert row is not None
            line.remove(row)
            line._fair.charge(row.tenant, 50)
            line.remove(rows[-1 - n])  # as a cancellation does
            line.expired(0.0)
    finally:
        sys.setprofile(None)
    assert calls < 100 * 150
