"""What the agent waits for, as data: which timers run, and when the agent must be woken.

1. A timer runs as long as its condition holds. It is forgotten in the step in which the condition is false. So no timer
   is ever cancelled. A wake-up that comes early, late or twice changes nothing.
2. The timers are started and forgotten once in a step, right after the event was taken in.
3. `_thresholds` lists every future time with which the core compares `Agent.at`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from attrs import evolve

from reknit.core.job.entries import Admission
from reknit.core.job.job import Closed, Gathering, Running, Unopened, can_seal, has_admissible, has_enough
from reknit.core.job.reasons import WorkerFailed
from reknit.core.job.restart import Cost, affords, backoff_s, is_strained

from . import contact
from .agent import Agent, Done, Ending, Stopping, Timer
from .contact import FOREVER
from .silence import RETURN_S, pause_from_s
from .states import WorkerState

LEAST_S = 0.1
"""Every agent bears an outage for so many seconds, also with a timeout of 0. Without this time it would end before the
store could give its first answer."""
STAGGER_S = 0.2
"""Seconds by which one agent announces a deadline of the job later than the one before it in `Job.live`."""
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
    since, contact = {timer: _since(agent, timer, round) for timer, round in _conditions(agent)}, agent.contact
    if contact.overslept and Timer.OUTAGE not in since:
        contact = evolve(contact, overslept=False)
    if since == agent.since and contact is agent.contact:
        return agent
    return evolve(agent, since=since, contact=contact)


def _since(agent: Agent, timer: Timer, round: int) -> tuple[int, float]:
    """The round of this timer, and since when it runs for this round. It starts now if it does not run yet."""
    running = agent.since.get(timer)
    return running if running is not None and running[0] == round else (round, agent.at)


def is_due(agent: Agent, timer: Timer) -> bool:
    """The time of this timer is over, and its condition still holds."""
    return timer in agent.since and agent.at >= _deadline(agent, timer)


def due(agent: Agent) -> list[Timer]:
    """The timers whose time is over, and whose conditions still hold."""
    return [timer for timer in agent.since if is_due(agent, timer)]


def _deadline(agent: Agent, timer: Timer) -> float:
    """When the time of this timer is over. It must be running."""
    return agent.since[timer][1] + _delay_s(agent, timer)


def after_sleep(agent: Agent, at: float) -> Agent:
    """Note the time of an event. If the agent ran much later than it wanted to, it was suspended. If its patience with
    an outage has run out meanwhile, it gets the time that a link needs to find out that the store is back. It gets this
    time once in each outage: the loop of a program that polls may be late each time.
    """
    running = agent.since.get(Timer.OUTAGE)
    wanted_at = None if running is None else next_wake(agent)
    agent = evolve(agent, at=at)
    if running is None or wanted_at is None or at - wanted_at <= pause_from_s(agent) or agent.contact.overslept:
        return agent
    delay_s = _delay_s(agent, Timer.OUTAGE)
    last_s = min(RETURN_S, delay_s)
    if at + last_s <= running[1] + delay_s:
        return agent
    since = {**agent.since, Timer.OUTAGE: (0, at + last_s - delay_s)}
    return evolve(agent, since=since, contact=evolve(agent.contact, overslept=True))


# ---- when to wake ----------------------------------------------------------------------------------------------------


def next_wake(agent: Agent) -> float | None:
    """When the agent must be woken at the latest, after the step that has made it. None: no deadline is ahead, and only
    another event can change anything."""
    if isinstance(agent.lifecycle, Done):
        return None
    now = agent.at
    # A deadline may have passed without an effect, because something else holds it back. It must not make the loop
    # spin. An infinite deadline stands for "never", and no clock can wait for it.
    return min((at for at in _thresholds(agent) if now < at < FOREVER), default=None)


def _thresholds(agent: Agent) -> list[float]:
    """All times at which this agent decides anew if no event comes before. They may be past."""
    return [*lasting_thresholds(agent), *contact.pulse_thresholds(agent)]


def lasting_thresholds(agent: Agent) -> list[float]:
    """The part of them that no beat of this agent puts off."""
    return [
        *(_deadline(agent, timer) for timer in agent.since),
        *(said_at + agent.spec.resay_s for said_at in agent.said.values()),
        waits_until(agent),
        *contact.lasting_thresholds(agent),
    ]


def waits_until(agent: Agent) -> float:
    """When an agent without workers stops waiting for the other nodes: to see its goodbye, or to end as well. FOREVER
    if it is not waiting."""
    lifecycle = agent.lifecycle
    if not isinstance(lifecycle, Ending) or isinstance(lifecycle.phase, Stopping) or not lifecycle.causes.is_departing:
        return FOREVER
    if agent.is_serving and lifecycle.causes.outcome is None:
        return FOREVER  # before the job is closed the others may go on for days
    return lifecycle.phase.since + agent.spec.store_timeout_s


# ---- which timers run, and for how long ------------------------------------------------------------------------------


def _conditions(agent: Agent) -> Iterator[tuple[Timer, int]]:
    """The timers that run now, each with the round that it is about. 0 if it is about none."""
    job = agent.job
    if contact.is_out(agent):
        yield Timer.OUTAGE, 0
    if agent.was_read and isinstance(job.phase, Unopened):
        yield Timer.OPEN, 0
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
        case Timer.OUTAGE:
            # The host of the store may not be up yet, before the first read.
            patience_s = agent.spec.store_timeout_s if agent.was_read else agent.spec.terms.join_timeout_s
            return max(LEAST_S, patience_s)


def _stagger_s(agent: Agent) -> float:
    first = islice(agent.job.live, STAGGERED)
    return STAGGER_S * next((i for i, node_id in enumerate(first) if node_id == agent.me.id), STAGGERED)
