"""How often an agent acts, how much it holds, and how soon the fence falls (L3 and `fence`)."""

from __future__ import annotations

from math import inf

from reknit.app.testing.checked_proc import MOST_WOKEN, WOKEN_S, CheckedProc
from reknit.app.testing.checked_world import CheckedWorld
from reknit.app.testing.violation import demand
from reknit.core.agent import timers
from reknit.core.agent.commands import SIGKILL, Beat
from reknit.core.agent.events import EntriesRead, Event, StopRequested, Woken
from reknit.core.agent.reasons import CutOff, StopReason
from reknit.core.job.entries import Node
from reknit.core.job.job import Gathering, Job
from reknit.core.text import codec

SLACK = 1e-6
REPEAT_S = 0.5
"""The same signal again within this time is the same request."""
HURRY_S = 5.0
"""What a second request leaves of the grace."""
MOST_SAID = 12
"""Entries that one agent waits to see at once."""
MOST_TIMERS = 9
MOST_TEXT = 4000
"""Bytes of the job and of the agent's own maps that do not depend on the number of nodes and failures."""
PER_NODE = 1200


def keeps(world: CheckedWorld, proc: CheckedProc, event: Event) -> None:
    """What must hold after every step."""
    if isinstance(event, Woken):
        if len(proc.woken) == MOST_WOKEN:
            apart_s = world.now - proc.woken[0]
            demand(apart_s >= WOKEN_S, "L3", f"{proc.name} was woken {MOST_WOKEN} times in {apart_s:.2f} s")
        proc.woken.append(world.now)
    if isinstance(event, StopRequested):
        _is_hurried(proc)
    _is_fenced_in_time(world, proc)


def _is_hurried(proc: CheckedProc) -> None:
    """The first request leaves the whole grace. The second leaves at most 5 s of it, and each later one leaves nothing.
    No request makes the time longer."""
    kill_at, requests, most_s = inf, list[StopRequested](), proc.spec.grace_s
    for event in (traced.event for traced in proc.trace):
        if not isinstance(event, StopRequested):
            continue
        if requests and event.signal == requests[-1].signal and event.at - requests[-1].at < REPEAT_S:
            continue
        left_s = 0.0 if event.signal == SIGKILL else [most_s, min(HURRY_S, most_s), 0.0][min(len(requests), 2)]
        kill_at = min(kill_at, event.at + left_s)
        requests.append(event)
    request = proc.agent.causes.request
    ok = request is not None and (request.count, request.kill_at) == (len(requests), kill_at)
    demand(ok, "stop", f"{proc.name} was asked {requests}, and makes of it {request}")


def beats(world: CheckedWorld, proc: CheckedProc, event: Event, beat: Beat) -> None:
    """Each incarnation beats once per interval. A read may renew an incarnation that has not joined: it begins anew."""
    last, at = proc.beat
    apart_s = proc.felt(world.now - at)
    is_early = apart_s < proc.spec.terms.beat_s - SLACK and last == beat.node and not isinstance(event, EntriesRead)
    demand(not is_early, "L3", f"{proc.name} beats again after {apart_s:.2f} s")
    demand(beat.node == proc.agent.me, "L3", f"{proc.name} beats for {beat.node}")
    is_still = last == beat.node and beat.count == proc.beaten
    demand(not is_still or _may_stand_still(world, proc), "beat", f"{proc.name} repeats count {beat.count}")
    proc.beat, proc.beaten = (beat.node, world.now), beat.count
    watched = _watched(proc.agent.job, beat.node)
    is_in = [node for node in proc.agent.job.ring if node.id == beat.node.id] == [beat.node]
    demand(not is_in or list(beat.watch) == watched, "L2", f"{proc.name} watches {beat.watch}, not {watched}")


def _may_stand_still(world: CheckedWorld, proc: CheckedProc) -> bool:
    """Rule 6, from scratch: the node does not take part. A check of how long an entry was not read back is not needed,
    because entries are read back at once unless something keeps them."""
    agent, terms = proc.agent, proc.spec.terms
    is_unread = proc.felt(world.now - proc.read_at) > 3 * terms.silence_s
    kill_at = agent.workers.kill_at
    is_hung = kill_at is not None and agent.at > kill_at + proc.spec.stop_s
    return agent.contact.count != agent.contact.sent or is_unread or is_hung or bool(agent.unread)


def _watched(job: Job, node: Node) -> list[Node]:
    """Rule 7, from scratch: two nodes, or as many as it takes to come to the second that is back."""
    place = job.ring.index(node) if node in job.ring else -1  # who is not in the ring yet watches anybody
    others = [*job.ring[place + 1 :], *job.ring[:place]][:66]
    expected = job.phase.expected if isinstance(job.phase, Gathering) else frozenset()
    back = [i for i, other in enumerate(others) if other not in expected]
    is_back = bool(expected) and node not in expected
    return others[: back[1] + 1 if len(back) > 1 else 66] if is_back else others[:2]


def _is_fenced_in_time(world: CheckedWorld, proc: CheckedProc) -> None:
    """The workers of an agent that nobody has heard for the length of the fence are killed, without a grace."""
    agent, group, fence_s = proc.agent, proc.group, proc.spec.terms.fence_s
    if fence_s is None or group is None or not group.running or group.is_stuck or group.node != agent.me:
        return
    if agent.workers.kill_at is not None and agent.workers.kill_at <= agent.at:
        return
    falls_at = world.moved.get(agent.me, -1e9) + fence_s / proc.rate
    demand(world.now < falls_at + SLACK, "fence", f"{proc.name} runs workers, though its fence fell at {falls_at:.2f}")
    wakes_at = timers.next_wake(agent)
    ok = wakes_at is not None and proc.true(wakes_at) <= falls_at + SLACK
    demand(ok, "fence", f"{proc.name} sleeps over the fall of its fence at {falls_at:.2f}")


def has_a_fence(proc: CheckedProc, why: StopReason) -> None:
    """Rule 15: without a fence, workers run through an outage of the store."""
    ok = not isinstance(why, CutOff) or why.seconds == proc.spec.terms.fence_s
    demand(ok, "fence", f"{proc.name} stops its workers for {why}, and its fence is {proc.spec.terms.fence_s}")


def is_small(world: CheckedWorld, proc: CheckedProc) -> None:
    """The state of an agent is bounded by the nodes that it has met and the failures of one round."""
    agent = proc.agent
    ids = {p.id for p in world.procs}
    demand(len(agent.said) <= MOST_SAID + len(ids), "L3", f"{proc.name} remembers {len(agent.said)} sayings")
    demand(len(agent.since) <= MOST_TIMERS, "L3", f"{proc.name} runs {len(agent.since)} timers")
    heard = agent.silence.heard
    demand(len(heard) <= len(world.procs), "L3", f"{proc.name} remembers {len(heard)} counters")
    demand(set(agent.workers.exits) <= set(range(agent.spec.local_world_size)), "L3", f"{proc.name}: exits of nobody")


def job_is_small(world: CheckedWorld) -> None:
    """The job that all share, as text."""
    job = world.jobs[-1]
    ids = {p.id for p in world.procs}
    size = len(codec.dumps(job))
    most = MOST_TEXT + PER_NODE * len(ids) * max(1, *world.setup.sizes) * (1 + len(job.past))
    demand(size <= most, "L3", f"the job of {len(ids)} nodes has {size} bytes, more than {most}")
