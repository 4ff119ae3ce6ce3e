"""Which of the workers that hang is to blame, and how sure that is.

When one worker hangs, the others mostly wait for it, so that all hang. What each worker did (`Activity`) tells them
apart:

1. Workers that stand in work of their own are to blame, or are stopped by a signal. The others wait for them. If these
   are more than half of all, or stand at different places, they are only likely to blame. Of several places it is then
   the one with the fewest workers.
2. If no worker stands in work of its own, a place where at most half of the workers stand is the likely one. It must
   have fewer workers than any other place. Places of which nothing is known go before places in a collective.
3. Otherwise nobody can tell. Then the worker that is furthest behind is named, by its step and its time.

Of several workers at the place that is blamed, the one furthest behind is named, and `Hang` names all of them. A worker
that has skipped a collective is ahead of the others by its step. So the place goes before the step.

What torch's flight recorder tells is shown, and blames nobody. Records may be missing for reasons that have nothing to
do with the hang. Ranks that broadcast may stand one collective apart. Each process group counts its own collectives.

The rule was tried with the kinds of hangs in `benchmarks/hangs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum

from attrs import evolve, frozen

from .workers import UNSEEN, Activity, NoProgress, Stance, WorkerFailure

_MOST_SPOTS = 6
"""Number of places that a `Hang` lists. A job of many nodes whose workers all stand elsewhere would make it long."""


class Certainty(Enum):
    """How sure it is that the blamed workers hold up the others."""

    CERTAIN = "certain"
    PROBABLE = "probable"
    UNKNOWN = "unknown"
    """The blamed worker is the one furthest behind, and nothing else speaks against it."""


@frozen
class Spot:
    """Workers that hang at the same place."""

    ranks: tuple[int, ...]
    """Their global ranks, the lowest first."""
    activity: Activity
    """What the first of them did."""


@frozen
class Hang:
    """Where the workers stood that hung together."""

    certainty: Certainty
    spots: tuple[Spot, ...]
    """The place of the blamed worker first, and then those with the most workers."""
    unlisted: int = 0
    """Number of workers that hung at other places."""


def blamed(failures: Iterable[WorkerFailure]) -> tuple[WorkerFailure, Hang]:
    """The worker to blame of those without progress, of which there must be at least one, and where all of them
    stood."""
    hung = [f for f in failures if isinstance(f.cause, NoProgress)]
    suspects, certainty = _suspects(hung)
    worst = furthest_behind(suspects)
    place_of = _place_and_collective if certainty is Certainty.UNKNOWN else _place
    places = _places(hung, place_of)
    own = places.pop(place_of(worst))
    spots = [own, *sorted(places.values(), key=lambda members: (-len(members), members[0].rank))]
    listed = spots[:_MOST_SPOTS]
    return worst, Hang(certainty, tuple(map(_spot, listed)), sum(map(len, spots)) - sum(map(len, listed)))


def furthest_behind(hung: Sequence[WorkerFailure]) -> WorkerFailure:
    """Of these workers without progress, the one with the lowest step. Of several, the one whose last progress is the
    oldest, and then the first. There must be at least one.

    The step comes first, because a worker that is behind may have made its last progress later than those that wait for
    it. A worker without any progress is behind all others. If some worker reports progress without a step, the steps
    cannot be compared, and the time alone decides.
    """
    causes = [_cause(f) for f in hung]
    have_steps = all(cause.since_start or cause.step is not None for cause in causes)

    def place(cause: NoProgress) -> tuple[bool, int, float]:
        step = cause.step if have_steps and not cause.since_start else None
        return step is not None, step or 0, -cause.for_s

    return min(zip(hung, causes, strict=True), key=lambda pair: place(pair[1]))[0]


def activity_of(failure: WorkerFailure) -> Activity:
    """What a worker without progress did."""
    return _cause(failure).activity or UNSEEN


def _suspects(hung: Sequence[WorkerFailure]) -> tuple[Sequence[WorkerFailure], Certainty]:
    """The workers of which one is named, and how sure it is that these hold up the others."""
    busy = [f for f in hung if activity_of(f).stance in (Stance.OWN, Stance.STOPPED)]
    if busy or len(hung) == 1:
        busy = [f for f in busy if activity_of(f).stance is Stance.STOPPED] or busy or list(hung)
        places = _places(busy, _place)
        if len(places) == 1:
            # A worker may look outside of any collective for what another one should do, for example for a file.
            is_rare = len(busy) * 2 <= len(hung) or len(busy) == len(hung)
            return busy, Certainty.CERTAIN if is_rare else Certainty.PROBABLE
        rarest = _rarest(places, len(busy))
        return (rarest, Certainty.PROBABLE) if rarest else (busy, Certainty.UNKNOWN)
    unknown = [f for f in hung if activity_of(f).stance is Stance.UNKNOWN]
    for candidates in (unknown, hung):
        if found := _rarest(_places(candidates, _place), len(hung)):
            return found, Certainty.PROBABLE
    return hung, Certainty.UNKNOWN


def _rarest(places: dict[Hashable, list[WorkerFailure]], of: int) -> list[WorkerFailure]:
    """The workers at the place that has fewer than any other, and at most half of `of`. Empty: there is none."""
    ordered = sorted(places.values(), key=len)
    if not ordered or len(ordered[0]) * 2 > of or (len(ordered) > 1 and len(ordered[0]) == len(ordered[1])):
        return []
    return ordered[0]


def _place(failure: WorkerFailure) -> Hashable:
    activity = activity_of(failure)
    return activity.op, activity.site, activity.stance is Stance.STOPPED


def _place_and_collective(failure: WorkerFailure) -> Hashable:
    """Where a worker stands, and at which collective. If nobody can be blamed, the report groups workers by it."""
    return _place(failure), activity_of(failure).collective


def _places(
    hung: Iterable[WorkerFailure], place_of: Callable[[WorkerFailure], Hashable]
) -> dict[Hashable, list[WorkerFailure]]:
    places: dict[Hashable, list[WorkerFailure]] = {}
    for failure in hung:
        places.setdefault(place_of(failure), []).append(failure)
    return places


def _spot(members: Sequence[WorkerFailure]) -> Spot:
    ranks, activity = tuple(sorted(f.rank for f in members)), activity_of(members[0])
    if len({activity_of(member).collective for member in members}) > 1:
        activity = evolve(activity, collective=None)
    return Spot(ranks, activity)


def _cause(failure: WorkerFailure) -> NoProgress:
    if not isinstance(failure.cause, NoProgress):
        raise ValueError(f"rank {failure.rank} has made progress")
    return failure.cause
