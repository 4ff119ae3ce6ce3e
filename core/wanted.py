"""What this agent wants to have said: derived from its state at every step and compared with what the journal shows.

1. Nothing remembers "already said" as a fact: an entry is wanted until the journal shows its effect, and said again
   if it does not within `Spec.resay_s`. So a lost append costs time, never the job.
2. One thing at a time where order matters: `Failed` and `Succeeded` must be seen before the next `Joined` is said.
3. `Joined` promises that no worker runs on this host.
"""

from __future__ import annotations

from collections.abc import Iterator

from .agent import Agent, Timer
from .commands import SIGKILL, Append, Command, ReservePort
from .deadlines import is_due
from .entries import (
    Admit,
    Entry,
    Failed,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Opened,
    Succeeded,
    WorkerFailure,
)
from .job import Closed, Gathering, Running, Verdict
from .reasons import Replaced, TermsDiffer
from .restart import root_cause_of
from .states import WorkerState
from .values import evolve
from .watching import are_guests_dead, is_fresh
from .working import failures, is_held

TOLD = 16_000
"""Characters of traceback and last lines that a node journals beside those of the failure to blame."""


def drive_sayings(agent: Agent, accusations: tuple[Lost, ...]) -> tuple[Agent, list[Command]]:
    """Say what is wanted and was not said lately."""
    if not agent.was_read or agent.pulse.gap:
        return agent, []
    # An accusation is wanted at a fresh read only, and is not forgotten between two of them.
    recent = agent.at - agent.spec.resay_s
    said: dict[Entry, float] = {e: at for e, at in agent.said.items() if isinstance(e, Lost) and at > recent}
    commands: list[Command] = []
    offered, is_used = agent.offered, False
    for entry in (*_wanted(agent), *accusations):
        if isinstance(entry, Joined):
            # A round may have been sealed with that port, and be over before it began here: a, b join 0, it is sealed
            # and ended, a reads all that at once. Then b's workers dial a's port, where round 1 must not answer.
            is_used = offered not in (None, (entry.node, entry.round))
            if is_used:
                continue
            offered = entry.node, entry.round
        at = agent.said.get(entry)
        if at is None or agent.at >= at + agent.spec.resay_s:
            at = agent.at
            commands.append(Append(entry))
        said[entry] = at
    if is_used:
        agent = evolve(agent, port=None)
        commands.append(ReservePort())
    if said == agent.said:
        return agent, commands
    joined = agent.joined or any(isinstance(e, Joined) for e in said)
    return evolve(agent, said=said, joined=joined, offered=offered), commands


def owed(agent: Agent) -> Failed | Succeeded | None:
    """The report on its last round that this node still owes the others."""
    job, workers, me = agent.job, agent.workers, agent.me
    if workers.node != me or workers.epoch != job.epoch or not job.is_live(me) or me in job.succeeded:
        return None
    phase = job.phase
    if isinstance(phase, Running):
        in_time = phase.round == workers.round
    else:
        in_time = job.is_expected(me) and job.round - 1 == workers.round
    if not in_time:
        return None
    if workers.state is WorkerState.SUCCEEDED:
        return Succeeded(me, workers.round)
    failed = failures(workers)
    if not failed or is_held(agent) or (isinstance(phase, Gathering) and any(f.node == me for f in phase.ledger)):
        return None
    return Failed(me, workers.round, _brief(failed))


def _brief(failures: tuple[WorkerFailure, ...]) -> tuple[WorkerFailure, ...]:
    """The whole story of the one to blame and of a few others. That of a hundred would fit into no journal."""
    root, left, brief = root_cause_of(failures), TOLD, []
    for f in failures:
        size = 0 if f is root else len(f.message) + len(f.traceback) + sum(map(len, f.stderr))
        if size > left:
            f = evolve(f, message=f.message[:200], traceback="", stderr=())
        else:
            left -= size
        brief.append(f)
    return tuple(brief)


def farewell(agent: Agent) -> Left | None:
    """The last word that the others need: this node is no longer waited for, nor watched."""
    job, me = agent.job, agent.me
    if agent.workers.alive or job.is_gone(me) or not agent.joined or is_abandoning(agent):
        return None
    if isinstance(job.phase, Closed):
        # A `Joined` that is still on its way is ignored now, so an unseen node owes nothing.
        if not job.is_live(me) or is_serving(agent):
            return None
    return Left(me, agent.workers.stuck)


def has_guests(agent: Agent) -> bool:
    """The journal ends with this agent, and somebody still lives by it."""
    return agent.spec.hosts_journal and len(agent.job.live) > agent.job.is_live(agent.me)


def is_serving(agent: Agent) -> bool:
    """Its work is over, or it has no part in the job, and it stays for the sake of those who live by its journal.

    Even if it was told to leave: it says goodbye like any node, the others regroup, and need the journal for that. Who
    tells it a second time, or while it only waits for the others to end, wants it gone.
    """
    request, waits_since = agent.leaving, agent.since.get((Timer.LINGER, 1))
    is_out = isinstance(agent.end, Replaced | TermsDiffer)
    if agent.end is not None and not is_out:
        return False
    if request is not None:
        is_told_again = is_out or request.count > 1 or request.latest == SIGKILL
        if is_told_again or (waits_since is not None and request.at >= waits_since):
            return False
    return has_guests(agent) and (agent.is_departing or is_out) and not are_guests_dead(agent)


def is_abandoning(agent: Agent) -> bool:
    """The journal's host must be gone at once, and the journal with it. It says nothing: the others would stop good
    workers for a goodbye, and could not regroup. As it is they run on for as long as they bear an outage."""
    return agent.leaving is not None and agent.leaving.latest == SIGKILL and has_guests(agent)


def _wanted(agent: Agent) -> Iterator[Entry]:
    job = agent.job
    if agent.end is not None:
        return
    if agent.is_departing:
        yield from _goodbye(agent)
        return
    if is_due(agent, Timer.OPEN):
        yield Opened(agent.spec.terms, agent.nonce)
    elif is_due(agent, Timer.REOPEN) and job.outcome is not None and job.outcome.verdict is not Verdict.SUCCEEDED:
        yield Opened(agent.spec.terms, agent.nonce, epoch=job.epoch + 1)
    if agent.epoch is None or agent.epoch != job.epoch:
        return
    report = owed(agent)
    if report is not None:
        yield report
    else:
        yield from _joining(agent)
    if agent.was_live:
        yield from _announcements(agent)


def _goodbye(agent: Agent) -> Iterator[Entry]:
    job, me = agent.job, agent.me
    if is_abandoning(agent):
        return
    report = owed(agent)
    if report is not None:
        yield report  # what it knew before it was told to leave
    if agent.leaving is not None and agent.outcome is None and job.is_live(me) and me not in job.leaving:
        yield Leaving(me)
    last = farewell(agent)
    if last is not None and report is None:
        yield last


def _joining(agent: Agent) -> Iterator[Joined]:
    job, me = agent.job, agent.me
    if agent.workers.alive or agent.port is None or job.is_gone(me):
        return
    if agent.is_renewed and not is_fresh(agent):
        return  # one that reads but cannot be heard would be counted out, and join again, for ever
    if job.is_expected(me):
        if not is_due(agent, Timer.BACKOFF):
            return
    elif job.is_live(me):
        return
    spec = agent.spec
    yield Joined(
        node=me,
        nonce=agent.nonce,
        round=job.round + isinstance(job.phase, Running),
        address=spec.address,
        port=agent.port,
        role=spec.role,
        local_world_size=spec.local_world_size,
        rank_hint=spec.rank_hint,
    )


def _announcements(agent: Agent) -> Iterator[Entry]:
    """Deadlines of the job that have passed here."""
    job, round = agent.job, agent.job.round
    if is_due(agent, Timer.LAST_CALL):
        yield LastCall(round, job.epoch)
    if is_due(agent, Timer.GIVE_UP):
        yield GaveUp(round, job.epoch)
    if is_due(agent, Timer.ADMIT):
        yield Admit(round + 1, job.epoch)
