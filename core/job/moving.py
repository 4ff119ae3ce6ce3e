"""The job as it goes on in another journal, if it needs a majority. Rule 17 of docs/protocol.md says why.

1. A node that has joined the gathered round is gone there. It has said so in the journal before, and may be counted
   there. Its agent joins again with another nonce, so that it counts in one journal only.
2. All other nodes go on as they are.
"""

from __future__ import annotations

from .fold import departed
from .job import Gathering, Job, ready
from .reasons import Departure, NodeGone


def moved(job: Job) -> Job:
    """The fold with which the other journal begins."""
    if not job.terms.needs_majority or not job.members or not isinstance(job.phase, Gathering):
        return job
    for joined in ready(job):
        job = departed(job, joined.node, NodeGone(joined.node, Departure.REPLACED))
    return job
