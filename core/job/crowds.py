"""Entries that `fold_all` may fold at once.

A thousand nodes may join, fail or come back together, and each new job copies its mappings.

1. A crowd stands in the journal one entry after another. Any other entry ends it.
2. Only the last entry of a crowd can seal a round, and none ends one. So what follows from its entries is asked once,
   after the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .entries import Entry, Failed, Joined, NodeId
from .job import Gathering, Job, can_join, lacking


def newcomers(job: Job, entries: Sequence[Entry], start: int) -> dict[NodeId, Joined]:
    """The new nodes that join with the entries from index `start` on."""
    found: dict[NodeId, Joined] = {}
    for entry in islice(entries, start, min(len(entries), start + lacking(job) - 1)):
        if not isinstance(entry, Joined) or not can_join(job, entry):
            break
        if entry.node.id in job.live or entry.node.id in found:
            break
        found[entry.node.id] = entry
    return found


def returning(job: Job, entries: Sequence[Entry], start: int) -> dict[NodeId, Joined]:
    """The expected nodes that join again with the entries from index `start` on."""
    found: dict[NodeId, Joined] = {}
    phase = job.phase
    if not isinstance(phase, Gathering):
        return found
    for entry in islice(entries, start, start + len(phase.expected)):
        if not isinstance(entry, Joined) or entry.node.id in found or not comes_back(job, phase, entry):
            break
        found[entry.node.id] = entry
    return found


def comes_back(job: Job, phase: Gathering, joined: Joined) -> bool:
    """An expected node joins the gathered round."""
    known = job.live.get(joined.node.id)
    return (
        known is not None
        and joined.node == known.node
        and joined.nonce == known.nonce
        and joined.round == phase.round
        and joined.node in phase.expected
        and can_join(job, joined)
    )


def reports(job: Job, entries: Sequence[Entry], start: int) -> list[Failed]:
    """The further failures of the round that is over, from index `start` on."""
    found: list[Failed] = []
    phase = job.phase
    if not isinstance(phase, Gathering):
        return found
    told = set(phase.told)
    for entry in islice(entries, start, None):
        if not isinstance(entry, Failed) or entry.node in told or not reports_late(job, phase, entry):
            break
        told.add(entry.node)
        found.append(entry)
    return found


def reports_late(job: Job, phase: Gathering, failed: Failed) -> bool:
    """A member of the round that is over has failed in it, and has not joined the next one yet."""
    is_member = job.is_live(failed.node) and failed.node in phase.expected
    return bool(failed.failures) and is_member and failed.round == phase.round - 1
