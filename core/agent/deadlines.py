"""What the agent waits for, as data: which timers run, and when the next one is due.

A timer runs while its condition holds, and is forgotten when it no longer does. So no timer is ever cancelled. A
wake-up that comes early, late or twice changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from attrs import evolve

from reknit.core.job.entries import Admission
from reknit.core.job.job import Closed, Gathering, Running, Unopened, can_seal, has_admissible, has_enough
from reknit.core.job.reasons import WorkerFailed
from reknit.core.job.restart import Cost, affords, backoff_s, is_strained

from .agent import Agent, Timer
from .states import WorkerState
from .watching import RETURN_S, beat_at, fence_at, is_beating, is_unanswered, pause_from_s

FOREVER = float("inf")
OUTAGE = (Timer.OUTAGE, 0)
"""The key of the timer of an outage."""
STAGGER_S = 0.2
"""Seconds by which one agent announces a deadline of the job later than the agent before it."""
ECHO_S = 1.0
"""Seconds for which a failure that looks like an echo waits for its cause. The worker that is the cause usually ends
within 30 ms. Some workers upload their logs before they end."""
STAGGERED = 4
"""Number of live nodes whose announcements of a deadline are staggered. Any agent may announce a deadline of the job.
The first live node announces it first, so the others usually need not."""
PAUSE_S = 0.2
"""Seconds of pause after the first quick failure. The pause doubles with each further quick failure in a row."""
LONGEST_PAUSE_S = 5.0
"""Upper bound on that pause, in seconds."""


def pause_s(agent: Agent) -> float:
    """Seconds that this node waits after a quick failure of its workers before it joins again. 0 after any other end.

    There is no time in the fold, so each agent counts its own quick failures. A round is sealed when the last member is
    back. So all nodes wait for the node with the longest pause.
    """
    job = agent.job
    if not agent.quick or agent.workers.state is not WorkerState.FAILED:
        return 0.0
    if isinstance(job.why, WorkerFailed) and not affords(job, Cost.RESTART):
        return 0.0  # no restart is left: the end of the job must not be told late
    # The exponent is capped, so that no number of failures overflows a float.
    return float(min(PAUSE_S * 2 ** min(agent.quick - 1, 64), LONGEST_PAUSE_S))


def run_timers(agent: Agent) -> Agent:
    """Start each timer whose condition has begun to hold. Forget each timer whose condition no longer holds."""
    since = {key: agent.since.get(key, agent.at) for key in _conditions(agent)}
    if since == agent.since:
        return agent
    return evolve(agent, since=since, overslept=agent.overslept and OUTAGE in since)


def after_sleep(agent: Agent, at: float) -> Agent:
    """Note the time of an event. If the agent ran much later than it wanted to, it was suspended. If its patience with
    an outage has run out meanwhile, it gets the time that a link needs to find out that the store is back. It gets this
    time once in each outage: the loop of a program that polls may be late each time.
    """
    wakes_at, since = agent.wakes_at, agent.since.get(OUTAGE)
    agent = evolve(agent, at=at)
    if wakes_at is None or since is None or at - wakes_at <= pause_from_s(agent) or agent.overslept:
        return agent
    delay_s = _delay_s(agent, Timer.OUTAGE)
    last_s = min(RETURN_S, delay_s)
    if at + last_s <= since + delay_s:
        return agent
    return evolve(agent, since={**agent.since, OUTAGE: at + last_s - delay_s}, overslept=True)


def is_due(agent: Agent, timer: Literal[Timer.OUTAGE, Timer.ECHO]) -> bool:
    """Whether the timer runs and has run out. This is asked before the timers of the step are run, so a timer of a
    round before may still be there. After that, `Situation.due` has the answer for all timers."""
    since = agent.since.get((timer, agent.workers.round if timer is Timer.ECHO else 0))
    return since is not None and agent.at >= since + _delay_s(agent, timer)


def is_out(agent: Agent) -> bool:
    """This agent is without the store, also if no adapter reports an outage: a call into a hung file system does not
    return."""
    return agent.outage is not None or not agent.was_read or is_unanswered(agent)


def deadlines(agent: Agent) -> dict[Timer, float]:
    """When each running timer runs out, on the agent's clock."""
    return {timer: since + _delay_s(agent, timer) for (timer, _), since in agent.since.items()}


def next_wake(agent: Agent, timers: Iterable[float]) -> float | None:
    """When the agent must be woken at the latest. None: no deadline is ahead, and only another event can change
    anything.

    `timers`: the deadlines of the running timers.
    """
    if agent.result is not None:
        return None
    times: list[float | None] = [*timers, *(at + agent.spec.resay_s for at in agent.said.values())]
    if is_beating(agent):
        times += [beat_at(agent), fence_at(agent)]
    # A deadline may have passed without an effect, because something else holds it back. It must not make the loop
    # spin. An infinite deadline stands for "never", and no clock can wait for it.
    return min((at for at in times if at is not None and at > agent.at and at < FOREVER), default=None)


def _conditions(agent: Agent) -> Iterator[tuple[Timer, int]]:
    job = agent.job
    if is_out(agent):
        yield OUTAGE
    if agent.was_read and isinstance(job.phase, Unopened):
        yield Timer.OPEN, 0
    if agent.is_departing and not agent.workers.alive:
        yield (Timer.LINGER if agent.outcome is None else Timer.PART), 0
    if agent.workers.state is WorkerState.FAILED and agent.workers.alive:
        yield Timer.ECHO, agent.workers.round
    if agent.epoch is None and isinstance(job.phase, Closed):
        yield Timer.REOPEN, 0
    if agent.epoch != job.epoch:
        return
    yield from _of_the_job(agent)


def _of_the_job(agent: Agent) -> Iterator[tuple[Timer, int]]:
    job = agent.job
    if isinstance(job.phase, Gathering):
        if not has_enough(job):
            yield Timer.GIVE_UP, job.round
        elif can_seal(job):
            yield Timer.LAST_CALL, job.round
        if job.is_expected(agent.me):
            yield Timer.BACKOFF, job.round
    elif isinstance(job.phase, Running):
        if job.terms.admission is Admission.SOON and has_admissible(job):
            yield Timer.ADMIT, job.round
        if is_strained(job):
            yield Timer.STEADY, job.round


def _delay_s(agent: Agent, timer: Timer) -> float:
    terms = agent.job.terms
    match timer:
        case Timer.LAST_CALL:
            return terms.last_call_s + _stagger_s(agent)
        case Timer.GIVE_UP:
            return terms.join_timeout_s + _stagger_s(agent)
        case Timer.ADMIT:
            return terms.settle_s + _stagger_s(agent)
        case Timer.STEADY:
            return terms.restarts.steady_s + _stagger_s(agent)
        case Timer.BACKOFF:
            return max(backoff_s(agent.job), pause_s(agent))
        case Timer.ECHO:
            return ECHO_S
        case Timer.OPEN:
            return agent.spec.opens_after_s
        case Timer.REOPEN:
            # Nodes of the epoch before may still be stopping their workers. A node that is dead will never say goodbye,
            # so the wait has an end.
            others = agent.job.live.keys() - {agent.me.id}  # an earlier agent of this host has ended
            return agent.spec.grace_s + terms.silence_s if others else 0.0
        case Timer.OUTAGE if not agent.was_read:
            return agent.spec.terms.join_timeout_s  # the host of the store may not be up yet
        case Timer.OUTAGE | Timer.LINGER | Timer.PART:
            return agent.spec.store_timeout_s


def _stagger_s(agent: Agent) -> float:
    first = islice(agent.job.live, STAGGERED)
    return STAGGER_S * next((i for i, node_id in enumerate(first) if node_id == agent.me.id), STAGGERED)
