"""Finding workers that are hung, and ending them.

1. A source, for example `Hangs` or a timer, finds that a worker is hung. `Watchdog.expire` is the only way to end a
   worker for that reason.
2. The stacks of the worker are taken, if py-spy is there. Workers that hang at the same time are all looked at before
   any of them is ended: what the others do tells why one of them waits. Which of them is to blame is decided by the
   core, over all nodes (core/job/hanging.py).
3. The worker gets a signal, and SIGKILL a second later. If it survives SIGKILL for another second, its exit is reported
   all the same. The stop of the round then finds out whether it is stuck.
4. The exits of workers that hang together are reported together, when the last of them has ended. Otherwise the first
   exit would end the round, and the others would be no failures.
5. A worker of another node may be found hung first. Then this node gets a stop that says so (`StopWorkers.hangs`). The
   workers of this node that make no progress either are looked at and ended as hung before the stop begins: one of them
   may be what the others wait for.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from reknit.adapters.host.children import signal_process
from reknit.core.job.workers import Collective, NoProgress, TimerExpired

from .hangs import Hangs, Limits

if TYPE_CHECKING:
    from reknit.adapters.keeper.common.guard import Guard
    from reknit.adapters.keeper.common.spawn import Leader
    from reknit.adapters.runtime.ports import Clock

    from .activity import Kernel, ThreadStack
    from .flight_recorder import RecorderAnswer, RecorderSockets
    from .page import Page
    from .thread_stacks import Dump
    from .timerpipe import TimerPipe

KILL_AFTER_S = 1.0
"""Seconds between the signal to a hung worker and SIGKILL."""
GIVE_UP_AFTER_S = 1.0
"""Seconds for which a hung worker may survive SIGKILL before its exit is reported all the same."""
_AT_ONCE = 0.0


class Hung:
    """A worker that is being ended because it is hung."""

    def __init__(self, leader: Leader, cause: NoProgress | TimerExpired, signum: int) -> None:
        self.leader = leader
        self.cause = cause
        self.signum = signum
        """The signal that the worker gets first."""
        self.threads: tuple[ThreadStack, ...] = ()
        """What the worker did when it was found hung, as py-spy has seen it. Empty: this is not known."""
        self.kernel: Kernel | None = None
        """What the kernel said of it at that time. None: nobody has looked yet."""
        self.collective: Collective | None = None
        """The last one that it has entered, as torch's flight recorder says. None: this is not known."""
        self.dumps: list[Dump] = []
        self.answers: list[RecorderAnswer] = []
        self.look_until: float | None = None
        """Until when py-spy may take. None: the worker was not looked at yet."""
        self.signalled_at: float | None = None
        self.is_signalled = False
        """The signal went to the worker's first process. Else it went to Pythons that this shell or launcher has
        started. The shell or launcher may end with any status then."""
        self.killed_at: float | None = None
        self.has_survived = False
        """The worker has survived SIGKILL for `GIVE_UP_AFTER_S`."""

    @property
    def is_over(self) -> bool:
        """The end of the worker can be reported."""
        return self.leader.exitcode is not None or self.has_survived

    @property
    def is_looked_at(self) -> bool:
        return bool(self.dumps or self.answers)

    @property
    def has_ended_itself(self) -> bool:
        """The worker was ending when the signal came: nobody exits with such a status because of these signals. For
        example, a time limit of torch has ended it at the same moment."""
        is_deadly = self.signum in (signal.SIGKILL, signal.SIGABRT)
        return self.is_signalled and is_deadly and 0 < (self.leader.exitcode or 0) < 128

    @property
    def wakes_at(self) -> float | None:
        if self.is_over:
            return None
        if self.signalled_at is None:
            if self.look_until is None:
                return _AT_ONCE
            return self.look_until if self.is_looked_at else None  # otherwise it waits for what others show
        return self.signalled_at + KILL_AFTER_S if self.killed_at is None else self.killed_at + GIVE_UP_AFTER_S

    def press(self, now: float) -> None:
        """Do what is due now to end the worker."""
        if self.is_over:
            return
        if self.signalled_at is None:
            self.signalled_at = now
            self._signal()
        elif self.killed_at is None:
            if now >= self.signalled_at + KILL_AFTER_S:
                self.killed_at = now
                self.leader.signal(signal.SIGKILL)
        elif now >= self.killed_at + GIVE_UP_AFTER_S:
            self.has_survived = True

    def _signal(self) -> None:
        from .thread_stacks import pythons_of

        if self.signum == signal.SIGABRT and self.threads:
            self.signum = signal.SIGKILL  # SIGABRT would only write the same stacks once more
        # Not the whole group: each child of a DataLoader would write its stacks as well. The stop ends the children.
        pids = pythons_of(self.leader.pid) or [self.leader.pid]
        self.is_signalled = self.leader.pid in pids
        for pid in pids:
            if self.signum == signal.SIGABRT:
                _forbid_core(pid)
            signal_process(pid, self.signum)
            signal_process(pid, signal.SIGCONT)  # a stopped process cannot obey


class Watchdog:
    """Finds and ends the hung workers of one keeper. Nothing here waits."""

    def __init__(
        self,
        clock: Clock,
        *,
        hang_after_s: float | None = None,
        start_timeout_s: float | None = None,
        timer_file: str | None = None,
        run_id: str = "",
    ) -> None:
        """`hang_after_s`: a worker without progress for so many seconds is hung. None: not after its first progress.
        `start_timeout_s`: a worker that has made no progress so many seconds after its start is hung. None: as
        `hang_after_s` says.
        `timer_file`: workers can set timers through a pipe at this path. Empty: at a new path. None: they cannot.
        `run_id`: the name of the job.

        Raises `CannotMake` if the pipe cannot be made."""
        self._clock = clock
        self.say: Callable[[str], None] = lambda line: None
        """Shows a line on the console, and never waits. The owner of this watchdog sets it."""
        limits = Limits(hang_after_s, start_timeout_s)
        self._hangs = Hangs(limits) if limits.are_watched else None
        self._sockets: RecorderSockets | None = None
        if self._hangs is not None:
            from .flight_recorder import RecorderSockets

            self._sockets = RecorderSockets()
        self._unread: dict[str, set[int]] = {}
        """For each reason: the ranks whose flight recorder is on but was not read. A line names them after all hung
        workers were looked at."""
        self._timers: TimerPipe | None = None
        if timer_file is not None:
            from .timerpipe import TimerPipe

            self._timers = TimerPipe(clock, timer_file, run_id, self._tell)
        self._guard: Guard | None = None
        """Ends py-spy if this process dies."""
        self._hung: dict[int, Hung] = {}
        """By local rank."""
        self._reported: set[int] = set()

    # ---- the workers of a round ----

    def variables(self, local_rank: int, env: Mapping[str, str]) -> dict[str, str]:
        """What a worker gets in its environment besides `env`."""
        own = {} if "PYTHONFAULTHANDLER" in env else {"PYTHONFAULTHANDLER": "1"}
        return own if self._sockets is None else own | self._sockets.variables(local_rank, env)

    def watch(self, leader: Leader, page: Page) -> None:
        """This worker was started. `page`: where it writes its progress."""
        if self._hangs is not None:
            self._hangs.watch(leader, page, self._clock.now())

    def progressed(self, leader: Leader) -> None:
        """This worker has made progress: a source other than `reknit.progress` says so."""
        if self._hangs is not None:
            self._hangs.progressed(leader, self._clock.now())

    def _tell(self, line: str) -> None:
        self.say(line)  # its owner sets it after this object was made

    def begin(self) -> None:
        """A round begins."""
        if self._timers is not None:
            self._timers.renew()

    def hear(self, leaders: Sequence[Leader], now: float) -> None:
        """Take what comes through the pipe, and find the workers whose timers have expired. To be called at `hears_at`,
        and whenever the clock has woken up. `leaders`: the workers. Empty: none runs, or the round is being stopped."""
        if self._timers is None:
            return
        live = {leader.pid: leader for leader in leaders if leader.exitcode is None}
        ranks = {pid: leader.rank for pid, leader in live.items()}
        for timer in self._timers.look(now, ranks, lambda pid: self.progressed(live[pid])):
            # The worker shows its stacks at SIGABRT, if py-spy cannot look into it. SIGKILL follows.
            signum = signal.SIGABRT if timer.signal == signal.SIGKILL else timer.signal
            self.expire(live[timer.client.worker], TimerExpired(timer.scope), signum)

    @property
    def timer_file(self) -> str:
        """The path of the pipe through which workers set timers. Empty: there is none."""
        return "" if self._timers is None else self._timers.path

    @property
    def hears_at(self) -> float | None:
        """When `hear` must be called at the latest, on the clock's time. None: there is no such time."""
        return None if self._timers is None else self._timers.wakes_at

    def expire(self, leader: Leader, cause: NoProgress | TimerExpired, signum: int = signal.SIGABRT) -> None:
        """End this worker, because it is hung. No effect if it is dead, or is being ended already.

        `cause`: why it counts as hung. `signum`: the signal that it gets first. The next `look` begins.
        """
        if leader.exitcode is None and leader.local_rank not in self._hung:
            self._hung[leader.local_rank] = Hung(leader, cause, signum)

    def find_last(self, now: float, *, hangs: bool) -> None:
        """The round is to be stopped: find the workers that hang, and no further ones. The stop may begin when
        `is_ending` is False. `hangs`: as in `StopWorkers`."""
        if self._hangs is not None:
            for leader, cause in self._hangs.last(now, hangs=hangs):
                self.expire(leader, cause)
            self._hangs.forget()

    def look(self, now: float) -> None:
        """Do what is due now. To be called at `wakes_at`, and when a worker was found dead."""
        if self._hangs is not None:
            for leader, cause in self._hangs.found(now):
                self.expire(leader, cause)
        for local_rank, hung in list(self._hung.items()):
            if hung.signalled_at is None and hung.leader.exitcode is not None:
                _end_dumps(hung)
                del self._hung[local_rank]  # it has ended by itself, just in time
        looked_at = [hung for hung in self._hung.values() if hung.signalled_at is None]
        for hung in looked_at:
            self._look_into(hung, now)
        is_seen = not any(hung.is_looked_at for hung in looked_at)
        if is_seen:
            self._tell_of_records()
            self._announce([hung for hung in looked_at if hung.signum == signal.SIGABRT and not hung.threads])
        for hung in self._hung.values():
            if is_seen or hung.signalled_at is not None:
                hung.press(now)

    def _look_into(self, hung: Hung, now: float) -> None:
        """Take the stacks of a worker and its flight recorder, step by step. It is not looked at any more when that is
        done."""
        from . import thread_stacks as stacks

        if hung.look_until is None:
            hung.look_until = now + stacks.DUMP_S
            pids = stacks.pythons_of(hung.leader.pid)
            hung.kernel = stacks.kernel_of(pids[0] if pids else hung.leader.pid)
            hung.dumps, hung.answers = self._dumps_of(pids), self._answers_of(hung.leader)
            return
        # All are read: a full pipe would wake the clock for ever.
        are_over = [dump.is_over() for dump in hung.dumps] + [answer.is_over() for answer in hung.answers]
        if hung.is_looked_at and (all(are_over) or now >= hung.look_until):
            hung.threads = tuple(thread for dump in hung.dumps for thread in dump.threads)
            self._read_records(hung)
            _end_dumps(hung)

    def _announce(self, hung: Sequence[Hung]) -> None:
        """Say that these workers are about to get SIGABRT. What they write then does not say why, nor by which rank."""
        if hung:
            from reknit.core.text.describe import cause_text

            told = ", ".join(f"rank {one.leader.rank} (pid {one.leader.pid}): {cause_text(one.cause)}" for one in hung)
            self.say(f"reknit: {told}; each gets SIGABRT, and shows its stacks on stderr")

    def _dumps_of(self, pids: Sequence[int]) -> list[Dump]:
        from reknit.adapters.keeper.common.guard import Guard

        from .thread_stacks import Dump, py_spy_for

        made: list[Dump] = []
        try:
            for python in pids:
                if py_spy := py_spy_for(python):
                    self._guard = self._guard or Guard()
                    made.append(Dump(py_spy, python, self._clock, self._guard))
        except (OSError, ValueError):
            pass  # no descriptor is free, for example: the worker is ended without this look
        return made

    def _answers_of(self, leader: Leader) -> list[RecorderAnswer]:
        if self._sockets is None or not self._sockets.is_expected(leader.local_rank):
            return []
        from .flight_recorder import NOT_ASKED, NOT_SERVED

        try:
            answers = self._sockets.ask(leader.local_rank, self._clock)
        except OSError:
            self._unread.setdefault(NOT_ASKED, set()).add(leader.rank)
            return []
        if not answers:
            self._unread.setdefault(NOT_SERVED, set()).add(leader.rank)
        return answers

    def _read_records(self, hung: Hung) -> None:
        if hung.answers:
            from .flight_recorder import NOT_READ, last_collective

            hung.collective = last_collective(*(answer.record for answer in hung.answers))
            if hung.collective is None and not all(answer.is_whole for answer in hung.answers):
                self._unread.setdefault(NOT_READ, set()).add(hung.leader.rank)

    def _tell_of_records(self) -> None:
        for why, ranks in self._unread.items():
            from reknit.core.text.describe import ranks_text

            self.say(f"reknit: no flight record of {ranks_text(sorted(ranks))}: {why} (docs/watchdog.md#recorder)")
        self._unread.clear()

    # ---- what is reported ----

    def hung(self, leader: Leader) -> Hung | None:
        """What is known of this worker, if it was ended because it was hung. None: it was not."""
        hung = self._hung.get(leader.local_rank)
        return None if hung is None or hung.signalled_at is None or hung.has_ended_itself else hung

    def reportable(self, dead: Sequence[Leader], *, is_last: bool = False) -> list[Leader]:
        """The workers whose end is to be reported now, each once.

        `dead`: the workers that were found dead since the last call. Of these, hung ones are held back while another
        hung worker is still being ended. A hung worker that survives SIGKILL is added. `is_last`: nothing is held back.
        """
        found = [leader for leader in dead if leader.local_rank not in self._hung]
        over = [rank for rank, hung in self._hung.items() if hung.is_over]
        if is_last or len(over) == len(self._hung):
            found += [self._hung[rank].leader for rank in over if rank not in self._reported]
            self._reported.update(over)
        return found

    @property
    def wakes_at(self) -> float | None:
        """When `look` must be called at the latest, on the clock's time. None: there is no such time."""
        times = [hung.wakes_at for hung in self._hung.values()]
        if self._hangs is not None:
            times.append(self._hangs.wakes_at)
        return min((at for at in times if at is not None), default=None)

    @property
    def is_ending(self) -> bool:
        """A hung worker is being looked at or ended. This takes some seconds at most."""
        return any(not hung.is_over for hung in self._hung.values())

    @property
    def children(self) -> list[int]:
        """Children of this process that are no workers and no strays."""
        return [dump.pid for hung in self._hung.values() for dump in hung.dumps]

    def forget(self) -> None:
        """The round is over, or is being stopped: end nobody any more. May be repeated."""
        for hung in self._hung.values():
            _end_dumps(hung)
        self._hung.clear()
        self._reported.clear()
        if self._sockets is not None:
            self._sockets.forget()
        self._unread.clear()
        if self._hangs is not None:
            self._hangs.forget()
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def close(self) -> None:
        """Remove the pipe for timers and the sockets. May be repeated."""
        if self._sockets is not None:
            self._sockets.close()
        if self._timers is not None:
            self._timers.close()


def _end_dumps(hung: Hung) -> None:
    for dump in hung.dumps:
        dump.close()
    for answer in hung.answers:
        answer.close()
    hung.dumps, hung.answers = [], []


def _forbid_core(pid: int) -> None:
    """Let this process write no core when SIGABRT ends it. A limit of 1 byte also keeps the kernel from starting the
    program that takes cores, which a limit of 0 does not (core(5))."""
    import resource

    try:
        resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))
    except (AttributeError, OSError, ValueError):
        pass  # another system than Linux, a dead process, or one whose limit is 0 and cannot be raised
