"""Which entries this agent wants in the journal. They are derived from its state at every step.

1. An entry is wanted until the journal shows its effect. If the journal does not show it within `Spec.resay_s` seconds,
   the agent says the entry again. So a lost append costs time, and never the job.
2. The order matters in one place. The agent must have read its own `Failed` or `Succeeded` before it says the next
   `Joined` or goodbye: afterwards the fold would ignore the report.
3. `Joined` promises that no worker of this node runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from reknit.core.job.entries import (
    Admit,
    Entry,
    Failed,
    GaveUp,
    Joined,
    LastCall,
    Leaving,
    Left,
    Lost,
    Node,
    Opened,
    Steady,
    Succeeded,
)
from reknit.core.job.job import Closed, Gathering, Job, Running
from reknit.core.job.restart import root_cause_of
from reknit.core.job.workers import WorkerFailure

from .agent import Agent, Stage, Timer
from .commands import SIGKILL, Append, Command
from .contact import has_guests, is_entry_late, is_fresh
from .silence import is_silent
from .states import WorkerState
from .timers import due
from .worker_words import ReservePort
from .workers import failures, is_held

TOLD = 16_000
"""Upper bound, in characters, on the messages, tracebacks and last lines of all failures that a node journals beside
the failure to blame."""


def drive_sayings(agent: Agent) -> tuple[Agent, list[Command]]:
    """Say each wanted entry that was not said within the last `Spec.resay_s` seconds."""
    is_gap = agent.contact.gap
    if not agent.was_read or (is_gap and not is_entry_late(agent)):
        return agent, []
    # A `Lost` is wanted only at the time of a read of the counters. The agent remembers a `Lost` that it has said
    # until the next such read, so that it is not said too often.
    recent = agent.at - agent.spec.resay_s
    said: dict[Entry, float] = {e: at for e, at in agent.said.items() if isinstance(e, Lost) and at > recent}
    new: list[Entry] = []
    offered, is_used = agent.offered, False
    for entry in (*_wanted(agent), *_accusations(agent)):
        if is_gap and entry not in agent.unread:
            continue  # a late entry is said again: as long as it is late, no new count is sent, and the gap cannot end
        if isinstance(entry, Joined):
            # A port that was offered for one round must not be offered for another: (1) a and b join round 0. (2) The
            # round is sealed, and ends. (3) a reads all that at once and starts no worker. (4) The workers of b connect
            # to the port of a. The store of round 1 must not answer there.
            is_used = offered not in (None, (entry.node, entry.round))
            if is_used:
                continue
            offered = entry.node, entry.round
        at = agent.said.get(entry)
        if at is None or agent.at >= at + agent.spec.resay_s:
            at = agent.at
            new.append(entry)
        said[entry] = at
    commands: list[Command] = [Append(entry) for entry in new]
    if is_used:
        agent = evolve(agent, port=None)
        commands.append(ReservePort())
    unread = _unread(agent, said, new)
    if said == agent.said and unread == agent.unread:
        return agent, commands
    stage = agent.stage
    if stage is Stage.OUTSIDE and any(isinstance(e, Joined) for e in said):
        stage = Stage.JOINING
    return evolve(agent, said=said, unread=unread, stage=stage, offered=offered), commands


def _unread(agent: Agent, said: Mapping[Entry, float], new: Sequence[Entry]) -> Mapping[Entry, float]:
    """The entries that are still wanted, and were not read back since this agent said them first.

    A node that is not live may want to join one round after the other, and the job goes on without it. All its `Joined`
    count as one entry, said when the first was said.
    """
    joins = [at for e, at in agent.unread.items() if isinstance(e, Joined)]
    joins_again = any(isinstance(e, Joined) for e in new)

    def is_wanted(entry: Entry) -> bool:
        if isinstance(entry, Joined) and entry not in said:
            return not joins_again and not agent.job.is_live(entry.node)
        # `said` may have forgotten a `Lost` that was said in vain.
        return entry in said or (isinstance(entry, Lost) and is_silent(agent, entry.node))

    def since(entry: Entry) -> float:
        return agent.unread.get(entry, min(joins, default=agent.at) if isinstance(entry, Joined) else agent.at)

    return {e: since(e) for e in (*agent.unread, *new) if is_wanted(e)}


# ---- what is wanted --------------------------------------------------------------------------------------------------


def _wanted(agent: Agent) -> Iterator[Entry]:
    job, causes = agent.job, agent.causes
    if causes.unable is not None:
        return
    if causes.is_departing:
        yield from _goodbye(agent)
        return
    run_out = due(agent)
    if Timer.OPEN in run_out:
        yield Opened(agent.spec.terms, agent.speaker)
    elif Timer.REOPEN in run_out:
        yield Opened(agent.spec.terms, agent.speaker, epoch=job.epoch + 1)
    if agent.epoch is None or agent.epoch != job.epoch:
        return
    report = owed(agent)
    if report is not None:
        yield report
    else:
        yield from _joining(agent, run_out)
    if agent.was_live:
        yield from _announcements(agent.job, run_out)


def owed(agent: Agent) -> Failed | Succeeded | None:
    """The report on its last round that this node still owes the others. None: it owes none."""
    job, workers, me = agent.job, agent.workers, agent.me
    if not workers.exits or (workers.node, workers.epoch) != (me, job.epoch):
        return None
    if not job.is_live(me) or me in job.succeeded:
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
    if not failed or is_held(agent):
        return None
    told = phase.told.get(me) if isinstance(phase, Gathering) else None
    if told is not None and (workers.alive or len(told.failures) >= len(failed)):
        return None
    if workers.alive:  # further failures are said once, when no worker is left
        said = next((e for e in agent.said if isinstance(e, Failed) and (e.node, e.round) == (me, workers.round)), None)
        if said is not None:
            return said
    return Failed(me, workers.round, _brief(failed))


def _brief(failures: tuple[WorkerFailure, ...]) -> tuple[WorkerFailure, ...]:
    """The failures, shortened so that they fit into a journal.

    The failure to blame keeps its whole text. The others keep theirs while `TOLD` is not used up. The rest keep the
    start of their message.
    """
    root, left, brief = root_cause_of(failures), TOLD, []
    for f in failures:
        size = 0 if f is root else len(f.message) + len(f.traceback) + sum(map(len, f.stderr))
        if size > left:
            f = evolve(f, message=f.message[:200], traceback="", stderr=())
        else:
            left -= size
        brief.append(f)
    return tuple(brief)


def _goodbye(agent: Agent) -> Iterator[Entry]:
    job, me, causes = agent.job, agent.me, agent.causes
    if is_abandoning(agent):
        return
    report = owed(agent)
    if report is not None:
        yield report  # the report comes before the goodbye: afterwards the fold would ignore it
    if causes.why_leaving is not None and causes.outcome is None and job.is_live(me) and me not in job.leaving:
        yield Leaving(me)
    last = farewell(agent)
    if last is not None and report is None:
        yield last


def farewell(agent: Agent) -> Left | None:
    """This node's goodbye. None: it owes none. After a goodbye the others neither wait for this node nor watch it."""
    job, me = agent.job, agent.me
    if agent.workers.alive or job.is_gone(me) or not agent.has_joined or is_abandoning(agent):
        return None
    if isinstance(job.phase, Closed):
        # The fold now ignores a `Joined` that is still on its way. So a node that is not live owes no goodbye.
        if not job.is_live(me) or agent.is_serving:
            return None
    return Left(me, agent.causes.stuck, seen=_seen(job, me))


def is_abandoning(agent: Agent) -> bool:
    """The host of the store was told to end at once while other nodes are live. It ends without a goodbye.

    After a goodbye the other nodes would stop their workers to form a new round, and no journal would be left to form
    it in. Without a goodbye their workers run on for as long as their agents bear an outage.
    """
    request = agent.causes.request
    return request is not None and request.latest == SIGKILL and has_guests(agent)


def _joining(agent: Agent, run_out: Sequence[Timer]) -> Iterator[Joined]:
    job, me = agent.job, agent.me
    if agent.workers.alive or agent.port is None or job.is_gone(me):
        return
    if agent.is_renewed and not job.is_live(me) and not is_fresh(agent):
        return  # a node that reads, and whose beats do not arrive, would be declared lost and join again, for ever
    if job.is_expected(me):
        if Timer.BACKOFF not in run_out:
            return
    elif job.is_live(me):
        return
    spec = agent.spec
    yield Joined(
        node=me,
        nonce=agent.speaker,
        round=job.round + isinstance(job.phase, Running),
        address=spec.address,
        port=agent.port,
        role=spec.role,
        local_world_size=spec.local_world_size,
        rank_hint=spec.rank_hint,
        seen=_seen(job, me),
    )


def _seen(job: Job, me: Node) -> int:
    """What a new incarnation says of the others of its id. Nobody asks an incarnation that the journal shows."""
    return -1 if job.is_live(me) else job.highest_incarnation(me.id)


def _announcements(job: Job, run_out: Sequence[Timer]) -> Iterator[Entry]:
    """One entry for each deadline of the job that has passed on this agent's clock."""
    round = job.round
    if Timer.LAST_CALL in run_out:
        yield LastCall(round, job.epoch)
    if Timer.GIVE_UP in run_out:
        yield GaveUp(round, job.epoch)
    if Timer.ADMIT in run_out:
        yield Admit(round + 1, job.epoch)
    if Timer.STEADY in run_out:
        yield Steady(round, job.epoch)


def _accusations(agent: Agent) -> Iterator[Lost]:
    """A `Lost` for each node to declare lost, at the time of a fresh read of the counters. At the time of another read,
    the agent repeats a `Lost` that is late, unless the counter of the accused has moved.

    If it did not, the `Lost` would stay late, and this node would never take part again.
    """
    if agent.silence.heard_at != agent.at:
        return
    is_fresh_read = agent.contact.acked_at == agent.at
    if is_fresh_read or is_entry_late(agent):
        accused = (Lost(node, agent.me) for node in agent.silence.heard if is_silent(agent, node))
        yield from (lost for lost in accused if is_fresh_read or lost in agent.unread)
