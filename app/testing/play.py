"""Plays a script: forms the cluster, makes the moves, then heals everything and demands rest (L1, L2).

`play` returns the world at its end, or raises `Violation` with the story as a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from unittest import mock

from reknit.adapters.simulated import faults, store
from reknit.adapters.simulated import workers as staff
from reknit.core.agent.commands import SIGKILL, SIGTERM
from reknit.core.agent.states import WorkerState
from reknit.core.job import memory
from reknit.core.job.entries import Aborted, Admission
from reknit.core.job.job import Closed, Job, Running, Verdict, admissible
from reknit.core.job.restart import is_strained

from .checked_proc import CheckedProc
from .checked_world import CheckedWorld
from .checks import ends, prompt, rhythm
from .checks.lasting import endure, note_out
from .checks.oracle import Oracle
from .checks.watcher import Checks
from .script import Move, Script, Setup
from .transcript import tell
from .violation import CHECKS, Violation, asking, demand, violated

SIGINT = 2
SETTLE_S = 15.0
REST_S = 160.0
"""Two rounds given up, an outage borne, and everybody found lost one after another."""
NOTICE_S = 30.0
"""A dead node is noticed within this, whatever was going on before (L2)."""
STALL_S, ANSWER_S = 3.5, 2.5
"""Nobody's silence, counted as time goes by, would reach the limit in any of the times in which the store answers."""


def play(
    script: Script, *, checks: Iterable[str] = CHECKS, oracle: bool = False, is_ending: bool = True
) -> CheckedWorld:
    """Play a history to its end, and return the world. The same script plays the same history.

    `checks`: names of those that are asked, of `CHECKS`. `oracle`: the fold is compared with its second implementation
    after every entry. Without it a wrong fold must be found by what it does to the world. A policy of your own decides
    otherwise than the oracle. `is_ending`: at the end all faults stop, and all must come to rest (L1, L2).
    Raises `Violation`, whose notes hold the script and the story.
    """
    history = History(script.setup, checks=checks, oracle=oracle)
    history.form()
    for move in script.moves:
        history.make(move)
    if is_ending:
        history.conclude()
    return history.world


class History:
    """A history that is made move by move. After an exception it cannot go on."""

    def __init__(self, setup: Setup, *, checks: Iterable[str] = CHECKS, oracle: bool = False) -> None:
        self.world = CheckedWorld(setup, oracle=Oracle(setup.remembers) if oracle else None)
        self.world.watchers.append(Checks(self.world))
        self.checks = frozenset(checks)
        self.moves: list[Move] = []
        """Those that were made."""

    @property
    def script(self) -> Script:
        """The history so far."""
        return Script(self.world.setup, tuple(self.moves))

    def form(self) -> None:
        """Start the first agents, and let them meet."""
        setup = self.world.setup
        with self._told():
            for host in range(min(setup.formed, setup.nodes)):
                self.world.start(host)
            if setup.formed:
                settle(self.world)

    def make(self, move: Move) -> None:
        """Let this happen."""
        self.moves.append(move)
        with self._told():
            make(self.world, move)

    def conclude(self) -> None:
        """All faults stop, and everything must come to rest. Then all workers succeed, and the job must end."""
        with self._told():
            endure(self.world)
            heal(self.world)
            finish(self.world)
            end(self.world)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """A violation within the block has the story."""
        try:
            with asking(self.checks), mock.patch.object(memory, "REMEMBERED", self.world.setup.remembers):
                yield
        except Violation as violation:
            violation.add_note(f"{self.script}\n\n{tell(self.world)}")
            raise
        except Exception as error:
            if "S8" not in self.checks:
                raise
            crash = Violation("S8", f"raised at {self.world.now:.2f}: {error!r}")
            crash.add_note(f"{self.script}\n\n{tell(self.world)}")
            raise crash from error


def make(world: CheckedWorld, move: Move) -> None:
    """Let this happen in a world. A move that makes no sense now does nothing."""
    world.story.append((world.now, str(move), "", ()))
    _note_out(world)
    world.was_troubled = world.was_troubled or move.name not in prompt.CALM
    if move.name == "wait":
        world.run_for(move.number)
    else:
        MOVES[move.name](world, min(move.who, world.setup.nodes - 1))


def _note_out(world: CheckedWorld) -> None:
    for proc in world.procs:
        note_out(world, proc)


# ---- moves -----------------------------------------------------------------------------------------------------------


def settle(world: CheckedWorld, *_: int) -> None:
    world.run_for(SETTLE_S, until=lambda: unrest(world) is None)


def _start(world: CheckedWorld, host: int, *, other: bool = False) -> None:
    if world.proc_of(host) is not None:
        return
    groups = [p.group for p in world.procs if p.host == host and not p.twin and p.group is not None]
    if any(g.running and g.is_stuck for g in groups):
        return  # the sweep of orphans ends that agent
    if any(g.running for g in groups):
        world.run_for(1.0)  # its warden is quicker than its successor
    if not any(g.running for g in groups):
        world.start(host, other=other)


def _twin(world: CheckedWorld, host: int) -> None:
    if world.proc_of(host, twin=True) is None:
        world.start(host, twin=True)


def _each(change: Callable[[CheckedWorld, CheckedProc], None]) -> Callable[[CheckedWorld, int], None]:
    def move(world: CheckedWorld, host: int) -> None:
        proc = world.proc_of(host) or world.proc_of(host, twin=True)
        if proc is not None:
            change(world, proc)

    return move


def _crash(world: CheckedWorld, proc: CheckedProc) -> None:
    world.kill(proc)
    prompt.is_noticed(world, proc)


def _told(signal: int) -> Callable[[CheckedWorld, CheckedProc], None]:
    def move(world: CheckedWorld, proc: CheckedProc) -> None:
        world.ask_to_leave(proc, signal)
        world.run_for(0.0)

    return move


def _abort(world: CheckedWorld, _: int) -> None:
    world.excess += 1  # no agent has said it
    store.land(world, Aborted("because", world.jobs[-1].epoch))


def _finish(world: CheckedWorld, _: int) -> None:
    for proc in world.procs:
        if not proc.dead:
            staff.succeed(world, proc, proc.group)


def _toggle(name: str) -> Callable[[CheckedWorld, int], None]:
    def move(world: CheckedWorld, host: int) -> None:
        hosts: set[int] = getattr(world, name)
        hosts ^= {host}

    return move


def _deafen(name: str) -> Callable[[CheckedWorld, int], None]:
    toggle = _toggle(name)

    def move(world: CheckedWorld, host: int) -> None:
        toggle(world, host)
        for proc in world.procs:
            if proc.host == host:
                proc.was_cut = True
                if name == "deaf":
                    store.hang_up(world, proc)

    return move


def _stall(world: CheckedWorld, _: int) -> None:
    if world.stalls:
        faults.end_stalls(world)
    else:
        faults.stall(world, STALL_S, ANSWER_S)


def _fault(name: str) -> Callable[[CheckedWorld, int], None]:
    return _each(lambda _, proc: proc.faults.append(name) if len(proc.faults) < 3 else None)


MOVES: dict[str, Callable[[CheckedWorld, int], None]] = {
    "settle": settle,
    "outage": lambda world, _: faults.begin_outage(world),
    "restore": lambda world, _: faults.end_outage(world),
    "wipe": lambda world, _: faults.wipe(world),
    "stall": _stall,
    "abort": _abort,
    "finish": _finish,
    "start": _start,
    "crash": _each(_crash),
    "fail": _each(staff.fail),
    "freeze": _each(staff.freeze),
    "succeed": _each(lambda world, proc: staff.succeed(world, proc, proc.group)),
    "part": _each(lambda world, proc: staff.succeed(world, proc, proc.group, 1)),
    "suspend": _each(lambda _, proc: faults.suspend(proc)),
    "resume": _each(lambda _, proc: faults.resume(proc)),
    "cut": _each(faults.cut),
    "mend": _each(lambda _, proc: faults.mend(proc)),
    "full": _each(lambda _, proc: faults.fill(proc)),
    "empty": _each(lambda _, proc: faults.empty(proc)),
    "refuse": _each(store.refuse),
    "stop": _each(_told(SIGTERM)),
    "interrupt": _each(_told(SIGINT)),
    "halt": _each(_told(SIGKILL)),
    "twin": _twin,
    "other": lambda world, host: _start(world, host, other=True),
    "slow": _toggle("slow"),
    "stuck": _toggle("stuck"),
    "stale": _deafen("stale"),
    "deaf": _deafen("deaf"),
    "blind": _deafen("blind"),
    "mute": _deafen("mute"),
    "hang": _toggle("hung"),
    "lose": _fault("lose"),
    "lag": _fault("lag"),
    "again": _fault("again"),
}


# ---- the end ---------------------------------------------------------------------------------------------------------


def heal(world: CheckedWorld) -> None:
    """No more faults: then the job runs or ends, and whoever died is noticed."""
    world.story.append((world.now, "heal", "", ()))
    _note_out(world)
    world.calm = True
    faults.end_stalls(world)
    faults.end_outage(world)
    for hosts in (world.slow, world.stale, world.deaf, world.blind, world.mute, world.hung):
        hosts.clear()
    world.stuck = {h for h in world.stuck if any(p.host == h and p.group and p.group.is_stuck for p in world.procs)}
    for proc in world.procs:
        proc.cut = proc.full = False
        proc.returns_at = min(proc.returns_at, world.now)
        faults.resume(proc)
    longer = 100 / min(world.setup.rates)  # for agents whose clocks are slow
    world.run_for(NOTICE_S * longer, until=lambda: unrest(world) is None)
    job = world.jobs[-1]
    live = [p for p in world.procs if p.up and job.is_live(p.agent.me)]
    if live and not isinstance(job.phase, Closed) and not world.store_dead:
        here = ends.nodes_alive(world)
        ghosts = [str(j.node) for j in job.live.values() if j.node not in here]
        demand(not ghosts, "L2", f"nobody has noticed that {', '.join(ghosts)} is dead")
    world.run_for(6.0)  # what is on its way already (a crash, a fence) may still end the round
    if not world.run_for(REST_S, until=lambda: unrest(world) is None):
        violated("L1", f"no rest at {world.now:.1f}: {unrest(world)}")
    round = world.jobs[-1].round
    world.run_for(6.0)
    # Two more rounds are allowed: something said long ago may have landed only now. A `Lost` takes a node out, and the
    # node comes back.
    demand(world.jobs[-1].round <= round + 2, "L1", f"never at rest: round {world.jobs[-1].round} after {round}")
    job = world.jobs[-1]
    is_same = isinstance(job.phase, Running) and job.round == round and any(p.up for p in world.procs)
    is_owed = is_same and not world.store_dead and is_strained(job)
    demand(not is_owed, "steady", f"round {round} is at rest and not said to be steady")
    world.run_for(REST_S, until=lambda: unrest(world) is None)


def finish(world: CheckedWorld) -> None:
    """All workers succeed from now on: then the job must end, and everybody with it."""
    world.story.append((world.now, "all succeed", "", ()))
    world.finishing = True
    was_running = isinstance(world.jobs[-1].phase, Running) and any(p.up for p in world.procs)
    _finish(world, 0)
    if not world.run_for(REST_S, until=lambda: not any(p.up for p in world.procs)):
        violated("L1", f"no end at {world.now:.1f}: {unrest(world) or 'the job runs on'}")
    if was_running and not world.store_dead:
        outcome = world.jobs[-1].outcome
        ok = outcome is not None and outcome.verdict is Verdict.SUCCEEDED
        demand(ok, "L1", f"all workers succeeded, but the job ended with {outcome}")


def end(world: CheckedWorld) -> None:
    ends.agree(world)
    rhythm.job_is_small(world)
    if world.procs:
        ends.replays(world, world.procs[len(world.journal) % len(world.procs)])


def unrest(world: CheckedWorld) -> str | None:
    """Why the world is not at rest: neither a running job with everybody in it, nor everybody gone."""
    procs = [p for p in world.procs if p.up]
    if not procs:
        return None
    job = world.jobs[-1]
    if world.store_dead:
        return f"{procs[0].name} waits for a journal that is gone"
    if world.origin is None:
        return "the store has lost the journal"
    life = world.origin.life
    behind = next((p for p in procs if p.cursor < len(world.journal) or p.suspended or p.cut or p.full), None)
    behind = behind or next((p for p in procs if p.link.life != life), None)
    if behind is not None:
        return f"{behind.name} has not read all"
    if not isinstance(job.phase, Running):
        return f"{procs[0].name} waits: the job is {job.phase}"
    nodes = ends.nodes_alive(world)
    nodes -= {p.agent.me for p in procs if ends.is_serving(world, p)}
    for node in {j.node for j in job.live.values()} ^ nodes:
        return f"{node} is {'not in the job' if node in nodes else 'dead and not noticed'}"
    if job.terms.admission is Admission.SOON and admissible(job):
        return "standbys wait"
    causes = [(p, p.agent.causes) for p in procs]
    if any((c.why_leaving or c.unable or c.stuck) and not ends.is_serving(world, p) for p, c in causes):
        return "somebody is leaving"
    return next((why for proc in procs if (why := _lacks(proc, job))), None)


def _lacks(proc: CheckedProc, job: Job) -> str | None:
    """What the workers of this process lack."""
    node, group = proc.agent.me, proc.group
    if node not in job.member_nodes or node in job.succeeded:
        return None
    if group is None or group.key != (job.epoch, job.round) or not group.is_whole:
        return f"{proc.name} lacks workers"
    if proc.agent.workers.state is not WorkerState.HEALTHY:
        return f"{proc.name}'s workers are {proc.agent.workers.state}"
    return None
