"""Faults that last must hold nobody but those that have them: L1 and L2, asked before the faults end.

A node that takes part no more is noticed by the others within `NOTICED_S`. Then the others have a round, or the job
ends, within `ROUND_S`. Both may take longer while the store stalls. Then the node's own agent ends within `ENDS_S`, if
its round trips to the store fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from reknit.app.testing.checked_proc import CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand, violated
from reknit.core.job.job import Closed, Running

NOTICED_S = 40.0
"""An entry or a read is late after 16 s. The silence limit follows, and what is spared: `RETURN_S` and two beats. A
keeper that hangs is noticed earlier."""
ROUND_S = 60.0
"""A round is given up, others are noticed, all back off, and some stop slowly."""
STALLED_NOTICED_S, STALLED_ROUND_S = 120.0, 1200.0
"""The two while the store stalls. A stall is almost as long as the silence limit, so each one makes gaps in the beats
of some nodes. (1) In a gap nobody is accused. With eight nodes, one of them blind, that node was noticed after 36 s in
the median of 68 histories, and after 52 s at most. (2) After a gap a node without workers joins as a new incarnation.
So a round forms only when all of them join and start between two stalls: after 30 s in the median of 73 histories, and
after 310 s at most."""
ENDS_S = 75.0
"""An entry is late after 16 s, and the node counts as lost 8 s later. Then it is a new incarnation, and waits anew: an
entry is late, and the store timeout of 20 s follows."""

MOST_TURNS = 5
"""So many nodes may come to take part no more, one after the other. An agent may want an entry only later."""


def is_faulty(world: CheckedWorld, proc: CheckedProc) -> bool:
    """Its messages to the store, or the answers, go one way only."""
    return proc.host in world.deaf | world.blind | world.mute | world.stale


def note_out(world: CheckedWorld, proc: CheckedProc) -> None:
    """Remember when this agent was last without the store. It is asked before each move, because an agent that is
    suspended makes no step, and moves end the faults."""
    is_out = is_faulty(world, proc) or proc.cut or proc.full or proc.refused
    if proc.host in world.hung:
        proc.hung_at = world.now
    if is_out or world.outage or world.stalls or world.store_dead or _is_awaited(world):
        proc.out_at = world.now


def _is_awaited(world: CheckedWorld) -> bool:
    """There is no journal, and a process that remembers one cannot found it again now. Nobody begins another one."""
    rememberers = (p for p in world.procs if p.up and p.held is not None and p.held.position)
    return world.origin is None and any(p.suspended or p.cut or p.refused or is_faulty(world, p) for p in rememberers)


def endure(world: CheckedWorld) -> None:
    lasting = world.deaf | world.blind | world.mute | world.hung | world.stale
    if not (lasting or world.stalls) or (world.outage and not world.stalls):
        return
    world.story.append((world.now, "endure", "", ()))
    longer = 100 / min(world.setup.rates)  # for agents whose clocks are slow
    noticed_s, round_s = (STALLED_NOTICED_S, STALLED_ROUND_S) if world.stalls else (NOTICED_S, ROUND_S)
    _within(world, noticed_s * longer, _unnoticed, "L2", "nobody has noticed that {} take part no more")
    if not world.run_for(round_s * longer, until=lambda: _holdup(world) is None):
        violated("L1", f"the others are held up at {world.now:.1f}: {_holdup(world)}")
    _within(world, ENDS_S * longer, _patient, "L1", "{} go on, though they reach nobody any more")


def _hears(world: CheckedWorld, proc: CheckedProc) -> bool:
    """It is up, and its beats and reads work."""
    is_out = proc.suspended or proc.cut or proc.refused or proc.host in world.deaf | world.blind | world.stale
    return proc.up and not is_out


def _takes_part(world: CheckedWorld, proc: CheckedProc) -> bool:
    is_held = proc.agent.unread if proc.host in world.mute else proc.agent.workers.stopping
    return _hears(world, proc) and not (proc.host in world.mute | world.hung and is_held)


def _is_nobody_there(world: CheckedWorld) -> bool:
    """The job has ended, or no live node could say that another one is lost."""
    job, silenced = world.jobs[-1], world.mute | world.hung
    able = (p for p in world.procs if _hears(world, p) and not p.full and p.host not in silenced)
    return world.store_dead or isinstance(job.phase, Closed) or not any(job.is_live(p.agent.me) for p in able)


def _within(
    world: CheckedWorld, limit_s: float, found: Callable[[CheckedWorld], Sequence[str]], rule: str, why: str
) -> None:
    """Go on until nothing is found any more. Each thing may be found for so many seconds in a row. Others may follow,
    and have the same time."""
    since: dict[str, float] = {}

    def is_over() -> bool:
        nonlocal since
        since = {each: since.get(each, world.now) for each in found(world)}
        late = [each for each, at in since.items() if world.now - at > limit_s]
        demand(not late, rule, f"{why.format(late)} at {world.now:.1f}")
        return not since

    world.run_for(MOST_TURNS * limit_s, until=is_over)


def _unnoticed(world: CheckedWorld) -> list[str]:
    """The live nodes of the journal that do not take part. Empty if nobody could notice them."""
    if _is_nobody_there(world):
        return []
    here = {p.agent.me for p in world.procs if _takes_part(world, p)}
    return [str(joined.node) for joined in world.jobs[-1].live.values() if joined.node not in here]


def _holdup(world: CheckedWorld) -> str | None:
    """Why the nodes that take part do not work. None: they do, or there are none."""
    job = world.jobs[-1]
    if _is_nobody_there(world):
        return None
    if not isinstance(job.phase, Running):
        return f"the job is {job.phase}"
    for proc in world.procs:
        node, group = proc.agent.me, proc.group
        is_member = any((m.node, m.nonce) == (node, proc.agent.nonce) for m in job.members)  # and not its twin
        if not proc.up or not is_member or node in job.succeeded:
            continue
        if group is None or group.key != (job.epoch, job.round) or not group.running or not group.is_whole:
            return f"{proc.name} lacks workers"
    return ", ".join(_unnoticed(world)) or None


def _patient(world: CheckedWorld) -> list[str]:
    """The agents whose round trips fail, and which have not ended."""
    found: list[str] = []
    for proc in world.procs:
        if proc.agent.causes.unable is not None:
            continue  # it has no part in the job, and stays only because it hosts the store of others (rule 12)
        # Stalls make gaps in the beats. After each gap it is a new incarnation, and its wait for entries begins anew.
        is_waiting = proc.agent.unread and not (world.stalls and proc.agent.is_renewed)
        is_cut_off = proc.host in world.deaf | world.blind | world.stale or (proc.host in world.mute and is_waiting)
        if is_cut_off and proc.up and not (proc.suspended or proc.host in world.hung):
            found.append(proc.name)
    return found
