"""What is true of an agent in one step. It is derived once, and the later drivers of the step read it.

It is derived after the workers were driven and the timers were run. The later drivers change what was said, and the
beats. The situation depends on neither.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

from reknit.core.job.entries import Failed, Succeeded
from reknit.core.job.job import Gathering, Running
from reknit.core.job.restart import root_cause_of
from reknit.core.job.workers import WorkerFailure

from .agent import Agent, Timer
from .deadlines import deadlines
from .hosting import is_serving
from .states import WorkerState
from .working import failures, is_held

TOLD = 16_000
"""Upper bound, in characters, on the messages, tracebacks and last lines of all failures that a node journals beside
the failure to blame."""


@frozen
class Situation:
    deadlines: Mapping[Timer, float]
    """When each running timer runs out, in seconds of the agent's clock."""
    due: frozenset[Timer]
    """The timers that have run out."""
    owed: Failed | Succeeded | None
    """The report on its last round that this node still owes the others."""
    is_serving: bool
    """This agent hosts the store, and stays for the other nodes that use it (see `hosting`)."""


def situation_of(agent: Agent) -> Situation:
    """The situation of an agent whose timers were run in this step."""
    running = deadlines(agent)
    return Situation(
        deadlines=running,
        due=frozenset(timer for timer, at in running.items() if agent.at >= at),
        owed=owed(agent),
        is_serving=agent.spec.hosts_journal and is_serving(agent),
    )


def owed(agent: Agent) -> Failed | Succeeded | None:
    """The report on its last round that this node still owes the others. None: it owes none."""
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
