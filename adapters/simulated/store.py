"""The journal and the counters of the simulated world, and each agent's link to them.

1. A link says its entries in order, and holds back those that it cannot say. They land when the store is back. By then
   they may be stale, or the agent may have said them again.
2. While a link holds back an entry, it reports nothing that it reads. Beats may go on, or wait behind the entry.
3. A world with troubles is worse than any real link: appends get lost, are doubled, or overtake each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job.entries import Entry, Node
from reknit.core.job.fold import fold
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from .hosts import Proc
    from .world import World

RETURN_S = 8.0
"""Upper bound, in seconds, on the time that a link needs to find out that the store is back. After a shorter outage it
needs at most the length of the outage."""
POLL_S = 3.0
"""Seconds after which a read that finds nothing returns."""
RETRY_S = 5.0
"""Seconds between two reports that the store cannot be reached."""


def is_unreachable(world: World, proc: Proc) -> bool:
    return proc.cut or proc.refused or world.outage or world.store_dead or world.now < proc.returns_at


def is_stuck(world: World, proc: Proc) -> bool:
    """The link cannot say something that it was told, so it reports nothing that it reads."""
    return is_unreachable(world, proc) or (proc.full and bool(proc.held))


def kill(world: World) -> None:
    """The store is gone for ever, with everything in it."""
    world.store_dead = True
    for proc in world.procs:
        tell_outage(world, proc)


def refuse(world: World, proc: Proc) -> None:
    """The link of this process finds that trying again does not help. It is closed."""
    proc.refused = True
    world.tell(proc, 0.0, lambda at: JournalFailed(at, "another journal than before", Refusal.IDENTITY))


def tell_outage(world: World, proc: Proc) -> None:
    """The link of this process notices an outage after a moment. It reports it every `RETRY_S` until its end."""

    def look() -> None:
        if proc.up and not proc.refused and is_stuck(world, proc):
            world.happen(proc, lambda at: JournalFailed(at, "unreachable"))
            world.after(RETRY_S, look)

    world.after(0.3, look)


def restore(world: World) -> None:
    """The outage is over. The links find out one after another."""
    world.outage = False
    most_s = min(RETURN_S, world.now - world.outage_at)
    for proc in world.procs:
        wait_s = most_s / 4 * world.luck("return", 5)
        proc.returns_at = world.now + wait_s
        world.after(wait_s, partial(back, world))


def back(world: World) -> None:
    """Each link that can reach the store again sends what it has held back, in order, and reads."""
    if world.outage or world.store_dead:
        return
    held, world.held = world.held, []
    for entry in held:
        world.after(0.01, partial(land, world, entry))
    for proc in world.procs:
        if not proc.up or proc.full or is_unreachable(world, proc):
            continue
        for i, entry in enumerate(proc.held):
            world.after(0.05 + 0.02 * i, partial(land, world, entry))
        proc.held = []
        late, proc.late_beat = proc.late_beat, None
        if late is not None:
            beat(world, proc, late)
        read_soon(world, proc, 0.1)


def say(world: World, proc: Proc, entry: Entry) -> None:
    if is_unreachable(world, proc) or proc.full:
        world.excess += 1
        if "lose" in world.troubles and world.luck("held", 2):
            return  # the entry gets lost, as if the process of the link had crashed
        proc.held.append(entry)
        if proc.full and len(proc.held) == 1:
            tell_outage(world, proc)
        return
    fault = proc.faults.pop(0) if proc.faults and not world.calm else None
    troubles = world.troubles
    if fault is None and troubles and world.luck("fault", 6) == 5:
        trouble = ("lose", "lag", "again")[world.luck("which", 3)]
        fault = trouble if ("double" if trouble == "again" else trouble) in troubles else None
    if fault is not None:
        world.excess += 20  # the agent says the entry again for as long as it does not land
    delay = 0.03 + 0.1 * world.luck("land", 4)
    if fault != "lose":
        world.after(delay + 9.0 * (fault == "lag") * (1 + world.luck("long", 3)), lambda: land(world, entry))
    if fault == "again":
        world.after(delay + 6.0 + 9.0 * world.luck("long", 3), lambda: land(world, entry))


def land(world: World, entry: Entry) -> None:
    if world.store_dead:
        return
    if world.outage:
        world.held.append(entry)
        return
    before = world.jobs[-1]
    world.journal.append(entry)
    world.jobs.append(fold(before, entry))
    for watcher in world.watchers:
        watcher.landed(entry, before)
    for proc in world.procs:
        if proc.up:
            read_soon(world, proc, 0.02 + 0.1 * world.luck("read", 5))


def send_beat(world: World, proc: Proc, node: Node, watch: Sequence[Node]) -> None:
    world.after(0.02 + 0.05 * world.luck("beat", 4), partial(beat, world, proc, (node, watch)))


def beat(world: World, proc: Proc, sent: tuple[Node, Sequence[Node]]) -> None:
    if is_unreachable(world, proc) or (proc.full and proc.held and world.luck("behind", 2)):
        proc.late_beat = proc.late_beat or sent  # the first beat still waits in the link. A second adds nothing
        return
    if proc.host in world.stale:
        world.tell(proc, 0.05, lambda at: Counters(at, proc.counts))
        return
    node, watch = sent
    counters = world.counters
    counters[node] = counters.get(node, 0) + 1
    world.moved[node] = world.now
    counts = {n: counters[n] for n in (node, *watch) if n in counters}
    quiet = {n: world.now - world.moved[n] for n in counts}

    def make(at: float) -> Event:
        proc.quiet, proc.counts = quiet, counts
        return Counters(at, counts)

    world.tell(proc, 0.02 + 0.1 * world.luck("counts", 4), make)


def read_soon(world: World, proc: Proc, delay: float) -> None:
    """Read in `delay` seconds, unless a read is under way. The next read finds what has come since."""
    proc.idle += 1
    if not proc.reading:
        proc.reading = True
        world.after(delay, lambda: _read(world, proc))


def _read(world: World, proc: Proc) -> None:
    if not proc.up or is_stuck(world, proc):
        proc.reading = False
        return
    start, end = proc.cursor, len(world.journal)
    troubles = world.troubles
    if "partial" in troubles and end - start > 1 and world.luck("piece", 2):
        end = min(end, start + 1 + world.luck("pieces", 3))
    base = None
    if "skip" in troubles and end - start > 1 and world.luck("skip", 2):
        start += 1 + world.luck("skipped", end - start)
        base = world.jobs[start]
    entries = tuple(world.journal[start:end])
    cursor = start + len(entries)

    def taken() -> None:
        proc.reading, idle = False, proc.idle
        if proc.cursor < len(world.journal):
            read_soon(world, proc, 0.01)
        else:
            world.after(POLL_S, lambda: read_soon(world, proc, 0.0) if proc.idle == idle else None)

    def make(at: float) -> Event:
        proc.cursor = cursor
        return EntriesRead(at, entries, base)

    delay = 0.01 + 0.05 * world.luck("answer", 4)
    world.after(delay, lambda: world.happen(proc, make, taken))
