"""What can go wrong in a simulated world: one function for each fault, and one for its end.

A fault that is there already does not begin again, and one that is not there does not end. To make a fault happen
later: `world.after(5.0, partial(faults.cut, world, proc))`.
"""

from __future__ import annotations

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
        store.tell_outage(world, proc)


def mend(world: World, proc: Proc) -> None:
    """The node can reach the store again."""
    if proc.cut:
        proc.cut = False
        store.back(world)


def begin_outage(world: World) -> None:
    """The store answers no node."""
    if not world.outage:
        for proc in world.procs:
            proc.was_cut = True
        world.outage, world.outage_at = True, world.now
        for proc in world.procs:
            store.tell_outage(world, proc)


def end_outage(world: World) -> None:
    """The store answers again. The links find that out one after another."""
    if world.outage:
        store.restore(world)


def fill(proc: Proc) -> None:
    """The node's disk is full. It can read, and nothing that it says gets into the journal."""
    proc.full = proc.was_full = proc.was_cut = True


def empty(world: World, proc: Proc) -> None:
    """The node's disk has room again. What its link has held back gets into the journal."""
    if proc.full:
        proc.full = False
        store.back(world)
