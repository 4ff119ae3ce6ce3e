"""When the agent that hosts the store must stay for the other nodes.

The journal ends with the process that hosts its store. Its guests are the other nodes that are live in that journal.

1. A host whose own part is over stays while it has guests. Its part is over when the job has ended, or when this node
   was told to leave, or cannot stop its workers.
2. A host that has no part in the job stays likewise: its terms differ, or another agent took its node id.
3. It stays until the guests have left or are dead, or until it is told to stop while it does nothing else. A request
   that comes while its workers are being stopped hurries them only: whoever is impatient with the workers of this node
   does not mean the other nodes.
4. A host that must end at once ends without a goodbye.
"""

from __future__ import annotations

from reknit.core.job.ring import NEIGHBOURS, after

from .agent import Agent, StopRequest, Timer
from .commands import SIGKILL
from .reasons import Replaced, TermsDiffer

DEAD = 3
"""A guest that was silent for this many silence limits is dead. By then any other node has called it lost."""


def has_guests(agent: Agent) -> bool:
    """This agent hosts the journal, and other nodes are live in it."""
    return agent.spec.hosts_journal and len(agent.job.live) > agent.job.is_live(agent.me)


def is_serving(agent: Agent) -> bool:
    """The agent's own work is over, and it stays because other nodes use its store.

    A host that is told to leave says goodbye like any node. The others then regroup, and need the journal for that.
    """
    request, is_out = agent.leaving, isinstance(agent.end, Replaced | TermsDiffer)
    if agent.end is not None and not is_out:
        return False
    if request is not None and (is_out or request.latest == SIGKILL or _came_late(agent, request)):
        return False
    return has_guests(agent) and (agent.is_departing or is_out) and not are_guests_dead(agent)


def is_only_serving(agent: Agent) -> bool:
    """The agent serves, and none of its workers is left. The next stop request ends it at once."""
    return is_serving(agent) and not agent.workers.alive


def _came_late(agent: Agent, request: StopRequest) -> bool:
    """The latest request came when no worker was left, and the agent only waited for the other nodes to end."""
    waits_since = agent.since.get((Timer.LINGER if agent.outcome is None else Timer.PART, 0))
    return waits_since is not None and request.at > waits_since


def is_abandoning(agent: Agent) -> bool:
    """The host was told to end at once while other nodes are live. It ends without a goodbye.

    After a goodbye the other nodes would stop their workers to form a new round, and no journal would be left to form
    it in. Without a goodbye their workers run on for as long as their agents bear an outage.
    """
    return agent.leaving is not None and agent.leaving.latest == SIGKILL and has_guests(agent)


def must_hear_guests(agent: Agent) -> bool:
    """The host goes on beating, although it takes no part in the job, or does not any more.

    The answers to its beats show whether its guests are still alive.
    """
    return agent.spec.hosts_journal and (agent.end is not None or (agent.is_departing and has_guests(agent)))


def are_guests_dead(agent: Agent) -> bool:
    """Every watched guest has been silent for `DEAD` silence limits.

    The last live nodes can die without an entry `Lost`: no other node is left to say it. A host that has said goodbye
    may not say it. A guest that has just joined was not heard yet, and lives.
    """
    job, heard = agent.job, agent.pulse.heard
    if any(node not in heard for node in after(job.ring, agent.me, job.seats, NEIGHBOURS)):
        return False
    silences = [h.silent_s - h.spared_s for node, h in agent.pulse.heard.items() if agent.job.is_live(node)]
    return bool(silences) and min(silences) >= DEAD * agent.job.terms.silence_s
