"""Who is in the round that starts, and in which order.

Seats are sticky: a stable id keeps its place in rank order for as long as the job remembers it, newcomers come after,
and holes are not filled. So survivors keep their order, and a node that comes back has its old place among them.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve

from .entries import Joined, NodeId
from .job import Job, Running, ready, room
from .ranks import Members
from .ring import ring_of


def sealed(job: Job) -> Job:
    """Start the gathered round: of the ready, old members come first, then old seats, then the journal's order."""
    candidates, members_before, seats_before = ready(job), job.member_nodes, job.seats
    if members_before and len(candidates) > room(job):  # otherwise all are chosen, and their seats order them
        candidates.sort(key=lambda j: (j.node not in members_before, j.node.id not in seats_before))
    chosen = candidates[: room(job)]
    seats = _seated(job.seats, chosen)
    by_id = {joined.node.id: joined for joined in chosen}
    members = Members([by_id[node_id] for node_id in seats if node_id in by_id])  # later seats stand later
    return evolve(
        job,
        phase=Running(round=job.round),
        members=members,
        succeeded=frozenset(),
        seats=seats,
        ring=tuple(members.nodes) if len(members) == len(job.live) else ring_of(job.live, seats),
        size=job.size or len(members),
        largest=max(job.largest, len(members)),
    )


def _seated(seats: Mapping[NodeId, int], chosen: list[Joined]) -> Mapping[NodeId, int]:
    """Seats for all of `chosen`. A node that has a seat keeps it. In the first round `rank_hint` is a wish."""
    newcomers = [j for j in chosen if j.node.id not in seats]
    if not newcomers:
        return seats
    order = [j.node.id for j in newcomers]
    if not seats:
        wishes: dict[int, NodeId] = {}
        for joined in newcomers:
            hint = joined.rank_hint
            if hint is not None and 0 <= hint < len(newcomers):
                wishes.setdefault(hint, joined.node.id)
        placed = set(wishes.values())
        order = [node_id for node_id in order if node_id not in placed]
        for place in sorted(wishes):  # ascending, so that no later one moves it
            order.insert(place, wishes[place])
    last = [-1, *seats.values()][-1]  # later seats are higher, and stand later
    return {**seats, **{node_id: seat for seat, node_id in enumerate(order, start=last + 1)}}
