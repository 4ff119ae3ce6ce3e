"""What can go wrong in a simulated world: one function for each fault, and one for its end.

A fault that is there already does not begin again, and one that is not there does not end. To make a fault happen
later: `Scene.after`, as in `after(5.0, partial(faults.cut, world, proc))`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from . import store

if TYPE_CHECKING:
    from .hosts import Proc
    from .world import World


def suspend(proc: Proc) -> None:
    """The agent stands still, as after SIGSTOP or in a debugger. What happens to it meanwhile waits in its inbox."""
    proc.suspended = proc.was_suspended = True


def resume(proc: Proc) -> None:
    """The agent goes on. Everything in its inbox happens now, in order."""
    if proc.suspended:
        proc.suspended = False
        inbox, proc.inbox = proc.inbox, []
        for happen in inbox:
            happen()


def cut(world: World, proc: Proc) -> None:
    """The node can no longer reach the store."""
    if not proc.cut:
        proc.cut = proc.was_cut = True
        store.hang_up(world, proc)


def mend(proc: Proc) -> None:
    """The node can reach the store again."""
    proc.cut = False


def wipe(world: World) -> None:
    """The store loses everything. The agents found the journal again."""
    for proc in world.procs:
        proc.was_cut = True
    store.wipe(world)


def begin_outage(world: World) -> None:
    """The store answers no node."""
    if not world.outage:
        for proc in world.procs:
            proc.was_cut = True
        world.outage, world.outage_at = True, world.now
        for proc in world.procs:
            store.hang_up(world, proc)


def end_outage(world: World) -> None:
    """The store answers again. The nodes can reach it one after another."""
    if world.outage:
        store.restore(world)


def stall(world: World, away_s: float, back_s: float) -> None:
    """The store answers no node for `away_s` seconds, then all nodes for `back_s` seconds, and so on.

    Every link finds out at once that the store is back, because no call is under way for long enough to fail."""
    if not world.stalls:
        world.stalls = True
        _stall(world, away_s, back_s)


def end_stalls(world: World) -> None:
    """The store answers at all times again."""
    if world.stalls:
        world.stalls = False
        end_outage(world)


def _stall(world: World, away_s: float, back_s: float) -> None:
    def answer() -> None:
        if world.stalls:
            store.restore(world, 0.0)
            world.after(back_s, partial(_stall, world, away_s, back_s))

    if world.stalls:
        begin_outage(world)
        world.after(away_s, answer)


def fill(proc: Proc) -> None:
    """The node's disk is full. It can read, and nothing that it says gets into the journal."""
    proc.full = proc.was_full = proc.was_cut = True


def empty(proc: Proc) -> None:
    """The node's disk has room again."""
    proc.full = False
