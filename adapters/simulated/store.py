"""The journal and the counters of the simulated world, and what becomes of the calls of each agent's link.

The link is the real one (`adapters/link/machine.py`). So what is said again, held back and read again is not decided
here. Here are the store and the network, and what is wrong with them.

1. A call takes its way to the store, and its answer the way back. If the process cannot reach the store at one of the
   two times, the call fails. What it has done at the store is done.
2. A world with troubles is worse than any real journal: what the store has acknowledged gets lost, lands late, or lands
   twice.
3. The store may lose everything (`wipe`). Which process founds the journal again, and which may go on in it, is decided
   by core/job/founding.py, as for a TCPStore. A new journal begins only when no process is left that remembers one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, assert_never

from attrs import evolve

from reknit.adapters.link.machine import step
from reknit.adapters.link.messages import (
    LANES,
    Appended,
    BatchRead,
    Beaten,
    Call,
    CallFailed,
    Folded,
    Forbidden,
    Input,
    Lane,
    Read,
    SendBeat,
    SendEntry,
)
from reknit.adapters.runtime.ports import Batch
from reknit.core.job.entries import Entry
from reknit.core.job.fold import fold
from reknit.core.job.founding import (
    Candidate,
    Choice,
    FoundingMove,
    Held,
    Life,
    Origin,
    choice,
    looked,
    moved,
    next_life,
    offer_of,
)
from reknit.core.job.job import Job
from reknit.core.job.reasons import Refusal

if TYPE_CHECKING:
    from .hosts import Proc
    from .scene import Scene

RETURN_S = 8.0
"""Upper bound, in seconds, on the time after an outage in which a node cannot reach the store. After a shorter outage
it is at most the length of the outage."""
RETRY_S = 2.0
"""Upper bound, in seconds, on the time in which a call has failed, is made again, and reaches the store."""
LOOK_S = 1.0
"""Seconds after which a read that finds nothing returns."""
_FAILS_S = 0.3
"""Seconds after which a call has failed."""
_LOOKS_S = 0.05
"""Seconds between two looks of a process that offers to found the journal again."""


def is_unreachable(world: Scene, proc: Proc) -> bool:
    return proc.cut or proc.refused or world.outage or world.store_dead or world.now < proc.returns_at


# ---- the store and the network ----


def kill(world: Scene) -> None:
    """The store is gone for ever, with everything in it."""
    world.store_dead = True
    for proc in world.procs:
        hang_up(world, proc)


def wipe(world: Scene) -> None:
    """The store loses everything, and answers on."""
    if world.origin is None or world.store_dead:
        return
    world.origin, world.best = None, None
    world.counters.clear()
    for proc in world.procs:
        hang_up(world, proc)


def refuse(world: Scene, proc: Proc) -> None:
    """The link of this process finds that trying again does not help."""
    proc.refused = True
    world.after(0.0, partial(answer, world, proc, Forbidden(Refusal.IDENTITY, "another journal than before")))


def hang_up(world: Scene, proc: Proc) -> None:
    """The connection on which this process waits for news is gone."""
    call, proc.parked = proc.parked, None
    if call is not None:
        _fail(world, proc, call)


def restore(world: Scene, most_s: float = RETURN_S) -> None:
    """The outage is over. What was on its way to the store arrives. The nodes can reach it one after another, the last
    one `most_s` seconds later at most."""
    world.outage = False
    held, world.held = world.held, []
    for entry, life in held:
        world.after(0.01, partial(land, world, entry, life))
    waiting, world.waiting = world.waiting, []
    for send in waiting:
        world.after(0.01, send)
    most_s = min(most_s, world.now - world.outage_at)
    for proc in world.procs:
        proc.returns_at = world.now + most_s / 4 * world.luck("return", 5)


def outlive(world: Scene, proc: Proc) -> None:
    """The process has died with appends in its link. A proxy or a kernel still carries them, and they land late."""
    if "outlive" in world.troubles and not world.calm:
        for call in proc.link.saying.queue:
            if call.token not in world.tokens:
                world.after(8.0 + 9.0 * world.luck("outlive", 4), partial(land, world, call.entry, call.life))


def land(world: Scene, entry: Entry, life: Life | None = None) -> None:
    """`life`: of the journal in which it was said. None: that which is there now."""
    if world.store_dead or world.origin is None or life not in (None, world.origin.life):
        return
    if world.outage:
        world.held.append((entry, world.origin.life))
        return
    before = world.jobs[-1]
    world.journal.append(entry)
    world.jobs.append(fold(before, entry))
    for watcher in world.watchers:
        watcher.landed(entry, before)
    for proc in world.procs:
        call, proc.parked = proc.parked, None
        if call is not None:
            world.after(0.02 + 0.1 * world.luck("read", 5), partial(_look, world, proc, call, world.now))


# ---- calls ----


def feed(world: Scene, proc: Proc, happened: Input) -> None:
    """The link of this process makes a step, and its calls are made."""
    if isinstance(happened, BatchRead):
        happened = _given(proc, happened)
    elif isinstance(happened, Folded) and proc.given is not None:
        proc.held, proc.given = Held(proc.given, proc.cursor, happened.job), None
    proc.link, calls = step(proc.link, happened, proc.clock(world.now))
    if isinstance(happened, BatchRead) and not proc.link.reading.is_told and proc.given is not None:
        proc.given, proc.held = None, proc.held and evolve(proc.held, has_unfolded=False)  # the link has dropped it
    make(world, proc, calls)


def answer(world: Scene, proc: Proc, outcome: Input, then: Callable[[], None] | None = None) -> None:
    """Tell the link of this process what has become of a call, now or when the process is no longer suspended.
    `then`: called before the agent is told."""
    if not proc.up:
        return
    if proc.suspended:
        proc.inbox.append(partial(answer, world, proc, outcome, then))
        return
    feed(world, proc, outcome)
    if then is not None:
        then()
    if proc.link.news:
        world.turn(proc, proc.clock(world.now))


def _given(proc: Proc, found: BatchRead) -> Input:
    """What the agent is given. Nothing if another life was found since the read."""
    origin, batch = proc.origin, found.batch
    if origin is None or origin.life != batch.life:
        return CallFailed(Lane.READ, "the journal has begun another life")
    if batch.entries or batch.base is not None:
        proc.given = origin
        proc.held = evolve(proc.held or Held(origin, 0, Job()), has_unfolded=True)
    return found


def make(world: Scene, proc: Proc, calls: Iterable[Call]) -> None:
    for call in calls:
        if call.pause_s:
            world.after(call.pause_s, partial(_send, world, proc, call))
        else:
            _send(world, proc, call)


def _send(world: Scene, proc: Proc, call: Call) -> None:
    if not proc.up:
        return
    if proc.suspended:
        proc.inbox.append(partial(_send, world, proc, call))
        return
    match call:
        case SendEntry():
            _say(world, proc, call)
        case SendBeat():
            world.after(0.02 + 0.05 * world.luck("beat", 4), partial(_beat, world, proc, call))
        case Read():
            world.after(0.02, partial(_look, world, proc, call, world.now + call.wait_s))
        case _:
            assert_never(call)


def _reply(
    world: Scene, proc: Proc, call: Call, outcome: Input, delay: float, then: Callable[[], None] | None = None
) -> None:
    """The answer is on its way. `then`: called when the process has it."""

    def arrive() -> None:
        if is_unreachable(world, proc) or proc.host in world.deaf:
            _fail(world, proc, call)
        else:
            answer(world, proc, outcome, then)

    world.after(delay, arrive)


def _fail(world: Scene, proc: Proc, call: Call) -> None:
    if world.stalls and world.outage and not proc.cut:
        # The stall is over before the call is given up. A read has waited for its time then.
        late = call._replace(wait_s=0.0) if isinstance(call, Read) else call
        world.waiting.append(partial(_send, world, proc, late))
        return
    world.after(_FAILS_S, partial(answer, world, proc, CallFailed(LANES[type(call)], "unreachable")))


def _say(world: Scene, proc: Proc, call: SendEntry) -> None:
    token, entry = call.token, call.entry
    world.excess += proc.host in world.blind  # it says again what it does not read
    if is_unreachable(world, proc) or proc.full:
        if not call.pause_s:
            world.excess += 1
            if "lose" in world.troubles and world.luck("held", 2):
                world.lost.add(token)
        _fail(world, proc, call)
        return
    if not _enters(world, proc, call):
        return
    if call.life != _life(proc):
        _reply(world, proc, call, Appended(is_taken=False), 0.03)
        return
    world.excess += proc.host in world.blind  # it says again what it does not read
    delay = 0.03 + 0.1 * world.luck("land", 4)
    if token not in world.tokens:  # otherwise the answer was lost
        world.tokens.add(token)
        fault = "lose" if token in world.lost else _fault(world, proc)
        if proc.host in world.mute:
            fault = "lose"
        if fault is not None:
            world.excess += 20  # the agent says the entry again for as long as it does not land
        if fault != "lose":
            late_s = 9.0 * (1 + world.luck("long", 3)) if fault == "lag" else 0.0
            world.after(delay + late_s, partial(land, world, entry, call.life))
        if fault == "again":
            world.after(delay + 6.0 + 9.0 * world.luck("long", 3), partial(land, world, entry, call.life))
    _reply(world, proc, call, Appended(), delay + 0.01)


def _fault(world: Scene, proc: Proc) -> str | None:
    """What goes wrong with this append: lose, lag or again. None: nothing."""
    if proc.faults and not world.calm:
        return proc.faults.pop(0)
    if not world.troubles or world.luck("fault", 6) != 5:
        return None
    trouble = ("lose", "lag", "again")[world.luck("which", 3)]
    return trouble if ("double" if trouble == "again" else trouble) in world.troubles else None


def _beat(world: Scene, proc: Proc, call: SendBeat) -> None:
    # A full disk may have no room for a counter either.
    if is_unreachable(world, proc) or (proc.full and proc.link.saying.failures and world.luck("behind", 2)):
        _fail(world, proc, call)
        return
    if not _enters(world, proc, call):
        return
    if proc.host in world.stale:
        _reply(world, proc, call, Beaten(proc.counts), 0.05)
        return
    node, count, watch = call.beat.node, call.beat.count, call.beat.watch
    counters = world.counters
    if world.beaten.get(node) != (proc.number, count):
        world.moved[node] = world.now
    counters[node], world.beaten_by[node], world.beaten[node] = count, proc, (proc.number, count)
    counts = {n: counters[n] for n in (node, *watch) if n in counters}
    quiet = {n: world.now - world.moved[n] for n in counts}

    def note() -> None:
        proc.quiet, proc.counts = quiet, counts

    _reply(world, proc, call, Beaten(counts), 0.02 + 0.1 * world.luck("counts", 4), note)


def _look(world: Scene, proc: Proc, call: Read, until: float) -> None:
    if is_unreachable(world, proc):
        _fail(world, proc, call)
        return
    if proc.host in world.blind and proc.up:
        world.after(LOOK_S, partial(_look, world, proc, call, until))
        return
    if not _enters(world, proc, call):
        return
    origin, base = proc.origin or Origin(), None
    start, end = call.after, len(world.journal)
    is_news = proc.held is not None and proc.held.origin.life != origin.life
    if is_news or start < origin.position:
        start, until = origin.position, world.now
        base = world.jobs[start]
    if start >= end and world.now < until:
        proc.parked = call
        world.after(until - world.now, partial(_give_up, world, proc, call))
        return
    troubles = world.troubles
    if "partial" in troubles and end - start > 1 and world.luck("piece", 2):
        end = min(end, start + 1 + world.luck("pieces", 3))
    if "skip" in troubles and end - start > 1 and world.luck("skip", 2):
        start += 1 + world.luck("skipped", end - start)
        base = world.jobs[start]
    is_anew = is_news and proc.is_anew
    batch = Batch(max(start, end), tuple(world.journal[start:end]), base, origin.life, is_anew)
    _reply(world, proc, call, BatchRead(batch), 0.01 + 0.05 * world.luck("answer", 4))


# ---- a store that has lost everything ----


def _life(proc: Proc) -> Life:
    return Life() if proc.origin is None else proc.origin.life


def _enters(world: Scene, proc: Proc, call: Call) -> bool:
    """The process takes part in the journal that is in the store. Otherwise the call fails, or is made again later."""
    found = world.origin
    if found is not None and _life(proc) == found.life:
        return True
    if proc.candidate is not None:
        world.after(2 * _LOOKS_S, partial(_send, world, proc, call))  # another thread of it finds out
        return False
    what = choice(proc.held, found)
    match what:
        case Choice.ENTER | Choice.ANEW:
            proc.origin, proc.is_anew = found, what is Choice.ANEW
            return True
        case Choice.FOUND if proc.held is not None:
            world.names += 1
            proc.candidate = Candidate(offer_of(proc.held, f"{world.names}"))
            _offer(world, proc, call)
        case Choice.BEGIN if not any(p.up and p.held is not None and p.held.position for p in world.procs):
            world.names += 1
            world.live_on(Origin(Life(f"j{world.names}")), [], [Job()])
            world.after(0.0, partial(_send, world, proc, call))
        case Choice.BEGIN | Choice.WAIT:
            _fail(world, proc, call)
        case _:
            proc.refused = True
            world.after(0.0, partial(answer, world, proc, Forbidden(Refusal.LEFT_BEHIND, "left behind")))
    return False


def _offer(world: Scene, proc: Proc, call: Call) -> None:
    candidate, held = proc.candidate, proc.held
    if not proc.up or proc.suspended or is_unreachable(world, proc) or world.origin is not None:
        proc.candidate = None
        _send(world, proc, call)
        return
    if candidate is None or held is None:
        raise AssertionError("a process that offers to found a journal has read one")
    proc.candidate, move = looked(candidate, world.best, proc.clock(world.now))
    if move is FoundingMove.FOUND:
        _found(world, held, candidate)
    elif move is FoundingMove.OFFER:
        world.best = candidate.offer
    world.after(_LOOKS_S, partial(_offer, world, proc, call))


def _found(world: Scene, held: Held, candidate: Candidate) -> None:
    """The journal goes on from what this agent has folded."""
    _, entries, jobs = world.lives[held.origin.life]
    at = held.position
    world.live_on(next_life(held, candidate.offer.name), entries[:at], [*jobs[:at], moved(held.job)])


def _give_up(world: Scene, proc: Proc, call: Read) -> None:
    """Nothing has come for as long as the read was to wait."""
    if proc.parked is call:
        proc.parked = None
        _look(world, proc, call, world.now)
