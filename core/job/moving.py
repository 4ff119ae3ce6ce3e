"""The job as it goes on in another journal, if it needs a majority. Rule 17 of docs/protocol.md says why.

What was said in the journal before may count there still. So it must not count in the other journal as well.

1. A node that has joined the gathered round is gone there. Its agent joins again with another nonce.
2. The same holds for a node that stands by while a round runs, if its agent process is a member's.
3. A goodbye that was said before does not count there.
4. All other nodes go on as they are.
"""

from __future__ import annotations

from attrs import evolve

from .fold import departed
from .job import Gathering, Job
from .majority import asks_for_majority
from .reasons import Departure, NodeGone


def moved(job: Job) -> Job:
    """The fold with which the other journal begins."""
    if not asks_for_majority(job):
        return job
    phase, nonces = job.phase, {member.nonce for member in job.members}
    for joined in job.live.values():
        if isinstance(phase, Gathering):
            has_spoken = joined.node not in phase.expected
        else:
            has_spoken = joined.nonce in nonces and joined.node not in job.member_nodes
        if has_spoken:
            job = departed(job, joined.node, NodeGone(joined.node, Departure.REPLACED))
    return evolve(job, farewells=frozenset()) if job.farewells else job
