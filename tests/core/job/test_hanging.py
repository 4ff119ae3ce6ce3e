"""Which of the workers that hang together is blamed, and how sure that is."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve

from reknit.core.job.hanging import Certainty, Spot, blamed
from reknit.core.job.workers import Activity, Collective, NoProgress, Stance, WorkerFailure

WAITS = Activity(Stance.COLLECTIVE, "all_reduce", "train.py:9")
BARRIER = Activity(Stance.COLLECTIVE, "barrier", "train.py:12")
BACKWARD = Activity(Stance.WAITING, "backward", "train.py:8")
LOADS = Activity(Stance.OWN, "load", "data.py:41")
SAVES = Activity(Stance.OWN, "save", "train.py:20")
STOPPED = Activity(Stance.STOPPED, "load", "data.py:41")
LINE = Activity(Stance.UNKNOWN, "step", "train.py:7")
OTHER_LINE = Activity(Stance.UNKNOWN, "step", "train.py:5")


def recorded(activity: Activity, number: int, group: str = "") -> Activity:
    """The same, with what torch's flight recorder says."""
    return evolve(activity, collective=Collective("all_reduce", number, group, activity.stance is Stance.OWN))


def hung(*activities: Activity | None, step: int | None = 3) -> list[WorkerFailure]:
    """A worker for each activity: rank 0 did the first one. All have the same step and time."""
    return [
        WorkerFailure(rank, rank, -9, cause=NoProgress(30.0, step, activity=activity))
        for rank, activity in enumerate(activities)
    ]


@pytest.mark.parametrize(
    ("activities", "ranks", "certainty"),
    [
        ([WAITS, LOADS, WAITS], (1,), Certainty.CERTAIN),
        ([BACKWARD, LOADS, WAITS], (1,), Certainty.CERTAIN),
        ([LINE, LOADS, LINE], (1,), Certainty.CERTAIN),
        ([WAITS, LOADS, LOADS], (1, 2), Certainty.PROBABLE),
        ([WAITS, STOPPED, WAITS], (1,), Certainty.CERTAIN),
        ([LOADS, STOPPED, SAVES], (1,), Certainty.CERTAIN),
        ([SAVES, LOADS, SAVES], (1,), Certainty.PROBABLE),
        ([WAITS, LINE, WAITS], (1,), Certainty.PROBABLE),
        ([LINE, OTHER_LINE, LINE], (1,), Certainty.PROBABLE),
        ([LINE, WAITS, LINE], (1,), Certainty.PROBABLE),
        ([WAITS, BARRIER, WAITS], (1,), Certainty.PROBABLE),
        ([WAITS, BACKWARD, WAITS, WAITS], (1,), Certainty.PROBABLE),
        ([recorded(WAITS, 4), recorded(LOADS, 3), recorded(WAITS, 4)], (1,), Certainty.CERTAIN),
        ([recorded(WAITS, 5), WAITS, recorded(WAITS, 5), recorded(BARRIER, 5)], (3,), Certainty.PROBABLE),
        ([recorded(LOADS, 4), recorded(LOADS, 3), *[recorded(WAITS, 4)] * 2], (0, 1), Certainty.CERTAIN),
        ([LOADS], (0,), Certainty.CERTAIN),
        ([None], (0,), Certainty.CERTAIN),
    ],
)
def test_who_is_blamed(activities: list[Activity | None], ranks: tuple[int, ...], certainty: Certainty) -> None:
    """In whichever order the journal names them."""
    for failures in itertools.permutations(hung(*activities)):
        worst, hang = blamed(failures)
        assert hang.spots[0].ranks == ranks
        assert worst.rank in ranks
        assert hang.certainty is certainty


@pytest.mark.parametrize(
    "activities",
    [
        [WAITS, BARRIER],
        [WAITS, WAITS, WAITS],
        [WAITS, BARRIER, BACKWARD],
        [None, None, None],
        [LINE, OTHER_LINE],
        [LOADS, SAVES],
        [recorded(WAITS, 4, "tp"), recorded(WAITS, 3, "tp"), recorded(WAITS, 4, "tp")],
        [recorded(WAITS, 4), recorded(WAITS, 2, "tp"), recorded(WAITS, 4)],
        [recorded(WAITS, 4), WAITS, recorded(WAITS, 4)],
        [recorded(WAITS, 4), recorded(WAITS, 3), recorded(WAITS, 4)],
    ],
)
def test_nothing_is_claimed_that_cannot_be_told(activities: list[Activity | None]) -> None:
    """Then the worker that is furthest behind is named."""
    others = hung(*activities)[1:]
    behind = WorkerFailure(9, 9, -9, cause=NoProgress(30.0, 2, activity=activities[0]))
    worst, hang = blamed([*others, behind])
    assert (worst, hang.certainty) == (behind, Certainty.UNKNOWN)


def test_a_worker_that_has_skipped_a_collective_is_ahead() -> None:
    """By its step alone, one of those that wait for it would be blamed."""
    a, b, c = hung(WAITS, BARRIER, WAITS)
    ahead = WorkerFailure(1, 1, -9, cause=NoProgress(29.0, 4, activity=BARRIER))
    assert blamed([a, ahead, c])[0] == ahead
    assert b != ahead


def test_of_several_at_the_blamed_place_the_one_behind_is_named() -> None:
    """Somebody has to be."""
    a, b, c = hung(WAITS, LOADS, WAITS)
    behind = WorkerFailure(3, 3, -9, cause=NoProgress(29.0, 2, activity=LOADS))
    assert blamed([a, b, c, behind])[0] == behind


def test_a_hang_lists_few_places() -> None:
    """A job of thousands of workers may hang at as many. The blamed one comes first, and then the largest."""
    places = [Activity(Stance.COLLECTIVE, "recv", f"train.py:{line}") for line in range(20)]
    _, hang = blamed(hung(*places, WAITS, WAITS, LOADS))
    assert hang.spots[:2] == (Spot((22,), LOADS), Spot((20, 21), WAITS))
    assert sum(len(spot.ranks) for spot in hang.spots) + hang.unlisted == 23


def test_a_worker_that_has_made_progress_is_never_blamed() -> None:
    """It has failed in its own way."""
    crashed = WorkerFailure(5, 5, 1, message="ValueError: x")
    assert blamed([crashed, *hung(WAITS, LOADS)])[0].rank == 1


def test_collectives_are_shown_apart_if_nobody_can_tell() -> None:
    """They blame nobody: ranks that broadcast may stand one apart."""
    _, hang = blamed(hung(recorded(WAITS, 4), recorded(WAITS, 3), recorded(WAITS, 4)))
    assert hang.certainty is Certainty.UNKNOWN
    assert hang.spots == (Spot((0, 2), recorded(WAITS, 4)), Spot((1,), recorded(WAITS, 3)))


def test_what_the_workers_of_a_place_do_not_share_is_not_shown() -> None:
    """The line of a place speaks of all of its workers."""
    _, hang = blamed(hung(recorded(LOADS, 4), recorded(LOADS, 3), recorded(WAITS, 4), recorded(WAITS, 4)))
    assert [spot.activity for spot in hang.spots] == [LOADS, recorded(WAITS, 4)]
