"""What goes wrong in a simulated world. Each does nothing where there is nothing to do.

To make a fault happen at its time: `world.after(5.0, partial(faults.cut, world, proc))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import store

if TYPE_CHECKING:
    from .hosts import Proc
    from .world import World


def suspend(proc: Proc) -> None:
    """The agent stands still (SIGSTOP, a debugger). What happens meanwhile waits for it."""
    proc.suspended = proc.was_suspended = True


def resume(proc: Proc) -> None:
    if proc.suspended:
        proc.suspended = False
        inbox, proc.inbox = proc.inbox, []
        for happen in inbox:
            happen()


def cut(world: World, proc: Proc) -> None:
    """The node reaches the store no more."""
    if not proc.cut:
        proc.cut = proc.was_cut = True
        store.tell_outage(world, proc)


def mend(world: World, proc: Proc) -> None:
    if proc.cut:
        proc.cut = False
        store.back(world)


def begin_outage(world: World) -> None:
    """The store answers nobody."""
    if not world.outage:
        for proc in world.procs:
            proc.was_cut = True
        world.outage, world.outage_at = True, world.now
        for proc in world.procs:
            store.tell_outage(world, proc)


def end_outage(world: World) -> None:
    if world.outage:
        store.restore(world)


def fill(proc: Proc) -> None:
    """The node's disk is full: it can read, and nothing that it says gets into the journal."""
    proc.full = proc.was_full = proc.was_cut = True


def empty(world: World, proc: Proc) -> None:
    if proc.full:
        proc.full = False
        store.back(world)
