"""The workers of the simulated world: how they start, fail, succeed and stop.

When a worker of a round dies, the collectives of its peers crash a little later.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.core.agent.commands import StopWorkers
from reknit.core.agent.worker_words import (
    MOST_AWAITED,
    PortReserved,
    StartWorkers,
    WorkerExit,
    WorkersExited,
    WorkersStarted,
    WorkersStopped,
)
from reknit.core.job.workers import Activity, NoProgress, Stance, WorkerFailure

from .hosts import Group, Proc

if TYPE_CHECKING:
    from .scene import Scene

ECHO = "RuntimeError: Connection closed by peer [10.0.0.2]:4242"
"""The message of a worker that fails because a peer has died."""
OWN = "ValueError: my own"
"""The message of a worker that fails without another's failure."""
LOOK_S = 0.03
"""Seconds between a worker's end and the moment when its agent notices it."""
STUCK_S = 5.0
"""Seconds after SIGKILL after which a keeper reports processes that survive it."""


def start(world: Scene, proc: Proc, command: StartWorkers) -> None:
    ranks = {w.local_rank for w in command.assignment.workers}
    group = Group(proc.agent.job.epoch, proc.agent.me, command, ranks)
    proc.group = group
    world.groups.append(group)
    delay = 0.1 + 0.3 * world.luck("start", 4)
    world.tell(proc, delay, lambda at: WorkersStarted(at, command.round))
    if world.finishing:
        world.after(delay + 1.0, lambda: succeed(world, proc, group))


def fail(world: Scene, proc: Proc) -> None:
    """One worker raises an exception. No other worker is the cause."""
    group = proc.group
    if group is None or not group.running or group.gone_at is not None:
        return
    local = sorted(group.running)[world.luck("local", len(group.running))]
    world.blows.append(group)
    _die(world, proc, group, [group.failure(local, 1, OWN)])


def freeze(world: Scene, proc: Proc) -> None:
    """All workers of this round, on all nodes, hang. Each node ends its own, one node a little after the other."""
    frozen = proc.group
    for other in world.procs:
        group = other.group
        if frozen is not None and group is not None and group.hosts == frozen.hosts:
            world.after(0.2 * world.luck("freeze", 4), partial(_hang, world, other, group))


def _hang(world: Scene, proc: Proc, group: Group) -> None:
    if not group.running or group.gone_at is not None or group.is_stuck or proc.dead:
        return
    world.blows.append(group)
    running = sorted(group.running)
    hung = [evolve(group.failure(i, -9, ""), cause=_no_progress(world)) for i in running]
    _die(world, proc, group, hung)


def _no_progress(world: Scene) -> NoProgress:
    """Most workers wait in a collective for the others."""
    place = HANGS if world.luck("hangs", 4) == 0 else WAITS
    return NoProgress(30.0, world.luck("step", 4), activity=place)


HANGS = Activity(Stance.OWN, "load", "data.py:41")
WAITS = Activity(Stance.COLLECTIVE, "all_reduce", "train.py:88")


def succeed(world: Scene, proc: Proc, group: Group | None, most: int | None = None) -> None:
    """Workers exit with 0. `most`: how many of them at most. None: all."""
    if group is None or not group.running or group.gone_at is not None:
        return
    locals_ = sorted(group.running)[:most]
    group.running -= set(locals_)
    group.exited |= set(locals_)
    exits = tuple(WorkerExit(i) for i in locals_)
    round = group.command.round
    world.tell(proc, LOOK_S + 0.1 * world.luck("look", 3), lambda at: WorkersExited(at, round, exits))


def die(world: Scene, proc: Proc) -> None:
    """The agent is gone, so nothing can be reported. Its workers end too, unless they survive SIGKILL."""
    group = proc.group
    if group is not None and group.running and proc.host not in world.stuck:
        group.running.clear()
        _drag(world, group)


def _die(world: Scene, proc: Proc, group: Group, failures: list[WorkerFailure]) -> None:
    group.running -= {failure.local_rank for failure in failures}
    exits = tuple(WorkerExit(failure.local_rank, failure) for failure in failures)
    round = group.command.round
    delay = LOOK_S + 0.1 * world.luck("look", 3)
    if len(exits) > 1 and world.luck("looks", 2):
        world.tell(proc, delay, lambda at: WorkersExited(at, round, exits[:1]))
        world.tell(proc, delay + 0.2, lambda at: WorkersExited(at, round, exits[1:]))
    else:
        world.tell(proc, delay, lambda at: WorkersExited(at, round, exits))
    _drag(world, group)


def _drag(world: Scene, dead: Group) -> None:
    """The peers of a dead worker crash, one node after another."""
    if not world.echo:
        return
    for proc in world.procs:
        group = proc.group
        if group is not None and group.running and group.hosts == dead.hosts and group.gone_at is None:
            delay = 0.1 + 0.4 * world.luck("echo", 5)
            world.after(delay, partial(_echo, world, proc, group))


def _echo(world: Scene, proc: Proc, group: Group) -> None:
    if group.running and not group.is_stuck and not proc.dead:
        _die(world, proc, group, [group.failure(i, 1, ECHO) for i in sorted(group.running)])


def stop(world: Scene, proc: Proc, command: StopWorkers) -> None:
    group = proc.group
    if group is None or group.command.round != command.round:
        return
    if proc.host in world.hung:
        world.after(1.0, partial(stop, world, proc, command))
        return
    is_slow, is_stuck = proc.host in world.slow, proc.host in world.stuck and group.running
    # Workers that end one by one make the wait for exits as long as it may be.
    awaits_s = command.await_exits_s * (MOST_AWAITED if world.luck("await", 3) == 2 else 1)
    takes = awaits_s + 0.1 + 0.4 * world.luck("stop", 4)
    killed = awaits_s + command.grace_s + 0.05
    takes = killed if is_slow or is_stuck else min(takes, killed)
    at = world.now + takes
    if group.gone_at is not None and group.gone_at <= at:
        return
    group.gone_at = at
    world.after(at - world.now, lambda: _gone(world, proc, group, at))


def _gone(world: Scene, proc: Proc, group: Group, at: float) -> None:
    if group.gone_at != at or not proc.up:
        return
    if proc.suspended and proc.host in world.slow and group.running:
        # The agent would have to send SIGKILL, and it is suspended.
        proc.inbox.append(lambda: _gone(world, proc, group, at))
        return
    was_stuck, group.is_stuck = group.is_stuck, proc.host in world.stuck and bool(group.running)
    if group.is_stuck and not was_stuck:
        group.gone_at = at + STUCK_S
        world.after(STUCK_S, lambda: _gone(world, proc, group, at + STUCK_S))
        return
    stuck: tuple[int, ...] = ()
    round = group.command.round
    if group.is_stuck:
        stuck = tuple(1000 + i for i in sorted(group.running))
    elif group.running:
        group.running.clear()
        _drag(world, group)
    port = world.free_port()
    world.tell(proc, 0.01, lambda at: WorkersStopped(at, round, port, stuck))


def renew_port(world: Scene, proc: Proc) -> None:
    port = world.free_port()
    world.tell(proc, 0.01, lambda at: PortReserved(at, port))
