"""Which workers report no progress, and when the keeper must look."""

from __future__ import annotations

import os

import pytest

from reknit.adapters.keeper.common.spawn import Leader
from reknit.adapters.keeper.output.streams import WorkerStreams
from reknit.adapters.keeper.watchdog.hangs import Hangs, Limits
from reknit.adapters.keeper.watchdog.page import Page
from reknit.adapters.keeper.watchdog.progress import FOR_EVER, RECORD, SLOT, VARIABLE
from reknit.adapters.runtime.clock import SystemClock
from reknit.core.job.workers import NoProgress

BEGIN = 1000.0
LIMIT = 10.0


class Watched:
    """`Hangs` with workers that write what a test wants."""

    def __init__(self, clock: SystemClock, count: int = 1, limits: Limits = Limits(LIMIT)) -> None:
        self.hangs, self._page = Hangs(limits), Page()
        self.leaders = [
            Leader(2**22 + rank, clock, local_rank=rank, rank=rank, streams=WorkerStreams(), error_file="")
            for rank in range(count)
        ]
        for leader in self.leaders:
            path, _, _ = self._page.variables(leader.local_rank, {})[VARIABLE].rpartition(":")
            self.hangs.watch(leader, self._page, BEGIN)
        self.page = os.open(path, os.O_RDWR)

    def write(self, at: float, step: int = 0, rank: int = 0) -> None:
        os.pwrite(self.page, RECORD.pack(int(at * 1e9), step), SLOT * (rank + 1))

    def found(self, now: float) -> dict[int, NoProgress]:
        return {leader.local_rank: cause for leader, cause in self.hangs.found(now)}

    def close(self) -> None:
        self.hangs.forget()
        self._page.close()
        os.close(self.page)


@pytest.fixture
def one(clock: SystemClock) -> Watched:
    return Watched(clock)


def test_the_start_counts_until_the_first_report(one: Watched) -> None:
    """A worker that hangs while it imports is found as well."""
    assert one.hangs.wakes_at == BEGIN + LIMIT
    assert one.found(BEGIN + LIMIT - 0.1) == {}
    assert one.found(BEGIN + LIMIT) == {0: NoProgress(LIMIT, since_start=True)}
    assert one.hangs.wakes_at is None
    assert one.found(BEGIN + 2 * LIMIT) == {}
    one.close()


def test_the_time_in_the_page_counts_and_not_that_of_the_look(one: Watched) -> None:
    """The keeper looks once per limit at most, and is precise all the same."""
    one.write(BEGIN + 7, step=3)
    assert one.found(BEGIN + LIMIT) == {}
    assert one.hangs.wakes_at == BEGIN + 7 + LIMIT
    assert one.found(BEGIN + 7 + LIMIT) == {0: NoProgress(LIMIT, step=3)}
    one.close()


def test_a_worker_that_waits_for_others_is_not_hung(clock: SystemClock) -> None:
    """Its function has returned. The others are watched as before."""
    two = Watched(clock, 2)
    os.pwrite(two.page, RECORD.pack(FOR_EVER, 0), SLOT)
    assert two.found(BEGIN + LIMIT) == {1: NoProgress(LIMIT, since_start=True)}
    assert two.hangs.wakes_at is None
    two.close()


@pytest.mark.parametrize("written", [BEGIN + 1e6, 9e9, -5.0, 1.0])
def test_a_time_that_cannot_be_right(one: Watched, written: float) -> None:
    """Something was written, so progress was made when it was first seen. The same number is no new progress."""
    one.write(written)
    assert one.found(BEGIN + LIMIT) == {}
    assert one.hangs.wakes_at == BEGIN + 2 * LIMIT
    assert one.found(BEGIN + 2 * LIMIT) == {0: NoProgress(LIMIT, step=0)}
    one.close()


def test_another_source_of_progress(one: Watched) -> None:
    """For example a timer. It may come late."""
    one.hangs.progressed(one.leaders[0], BEGIN + 5)
    one.hangs.progressed(one.leaders[0], BEGIN + 4)
    assert one.found(BEGIN + LIMIT) == {}
    assert one.hangs.wakes_at == BEGIN + 5 + LIMIT
    assert one.found(BEGIN + 5 + LIMIT) == {0: NoProgress(LIMIT)}
    one.close()


def test_workers_without_progress_hang_together(clock: SystemClock) -> None:
    """They wait for one of them, whose last progress may be seconds later. A worker that goes on does not hang."""
    three = Watched(clock, 3)
    for rank, at in enumerate((5.0, 8.0, 6.0)):
        three.write(BEGIN + at, rank=rank)
    three.found(BEGIN + LIMIT)
    three.write(BEGIN + 14.5, rank=2)
    assert three.found(BEGIN + 5 + LIMIT) == {0: NoProgress(LIMIT, 0), 1: NoProgress(LIMIT - 3, 0)}
    assert three.hangs.wakes_at == BEGIN + 14.5 + LIMIT
    three.close()


def test_who_hangs_with_a_long_limit(clock: SystemClock) -> None:
    """Ten seconds without progress are enough."""
    three = Watched(clock, 3, Limits(1000.0))
    for rank, at in enumerate((0.5, 990.4, 991.5)):
        three.write(BEGIN + at, rank=rank)
    assert three.found(BEGIN + 1000.0) == {}
    assert three.found(BEGIN + 1001.0) == {0: NoProgress(1000.5, 0), 1: NoProgress(10.6, 0)}
    three.close()


def test_who_hangs_when_another_node_has_found_a_hang(clock: SystemClock) -> None:
    """Those that make no progress. What they do tells who is to blame."""
    two = Watched(clock, 2)
    for rank, at in enumerate((9.0, 10.5)):
        two.write(BEGIN + at, rank, rank)
    assert dict(two.hangs.last(BEGIN + 11, hangs=True)) == {two.leaders[0]: NoProgress(2.0, 0)}
    two.close()


def test_who_hangs_when_the_round_is_stopped_for_another_reason(clock: SystemClock) -> None:
    """Nobody, unless the time of a worker is nearly over. Then the other reason may be a consequence of the hang."""
    three = Watched(clock, 3)
    for rank, at in enumerate((3.0, 3.8, 6.0)):
        three.write(BEGIN + at, rank, rank)
    assert three.found(BEGIN + LIMIT) == {}
    three.write(BEGIN + 11.5, 2, 2)
    assert three.hangs.last(BEGIN + LIMIT + 1.9, hangs=False) == []
    assert dict(three.hangs.last(BEGIN + LIMIT + 2.1, hangs=False)) == {
        three.leaders[0]: NoProgress(9.1, 0),
        three.leaders[1]: NoProgress(8.3, 1),
    }
    three.close()


@pytest.mark.parametrize("hang_after_s", [LIMIT, None])
def test_a_start_has_a_limit_of_its_own(clock: SystemClock, hang_after_s: float | None) -> None:
    """Imports and the first checkpoint take longer than a step."""
    one = Watched(clock, limits=Limits(hang_after_s, 5 * LIMIT))
    for tenth in range(5):
        assert one.found(BEGIN + tenth * LIMIT) == {}
    assert one.found(BEGIN + 5 * LIMIT) == {0: NoProgress(5 * LIMIT, since_start=True)}
    one.close()


def test_the_first_progress_ends_the_limit_of_the_start(clock: SystemClock) -> None:
    """From then on the other limit holds, and a look is not missed because the start had more time."""
    one = Watched(clock, limits=Limits(LIMIT, 5 * LIMIT))
    one.write(BEGIN + 3, 0)
    assert one.hangs.wakes_at == BEGIN + LIMIT
    assert one.found(BEGIN + LIMIT) == {}
    assert one.found(BEGIN + 3 + LIMIT) == {0: NoProgress(LIMIT, 0)}
    one.close()
    two = Watched(clock, limits=Limits(None, LIMIT))
    two.write(BEGIN + 3, 0)
    assert two.found(BEGIN + LIMIT) == {}
    assert two.hangs.wakes_at is None
    two.close()


def test_a_dead_worker_does_not_hang(clock: SystemClock) -> None:
    """The others are still watched."""
    two = Watched(clock, 2)
    two.write(BEGIN + 5, rank=1)
    two.leaders[0].exitcode = 0
    assert two.found(BEGIN + LIMIT) == {}
    assert two.hangs.wakes_at == BEGIN + 5 + LIMIT
    two.close()


def test_a_keeper_that_was_stopped_counts_anew(one: Watched) -> None:
    """Its workers were perhaps stopped with it."""
    assert one.found(BEGIN + LIMIT + 100) == {}
    assert one.hangs.wakes_at == BEGIN + 2 * LIMIT + 100
    one.close()


def test_a_page_that_is_gone_changes_nothing(one: Watched) -> None:
    """The end of the round is told, and a new one may begin."""
    one.hangs.forget()
    assert one.hangs.wakes_at is None
    one.hangs.progressed(one.leaders[0], BEGIN)
    assert one.found(BEGIN + 1e6) == {}
    one.close()
