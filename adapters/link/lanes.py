"""The link of an agent's loop: threads, which carry out the calls of the machine.

What is called and told is decided in `adapters/link/machine.py`. Here is only what waits.

One thread reads. The others append and beat: whichever is free takes the next of these calls. There is one of them at
first. A second one is started when a call has waited for `_LATE_S` while the first is busy, for example with an append
that waits for its turn. Appends are quick in most jobs, and a thousand nodes that meet at once then need a thousand
threads and connections less.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, assert_never

from reknit.adapters.runtime.ports import Refused, Remembers, Unavailable
from reknit.adapters.runtime.threads import Thread
from reknit.core.agent.commands import Append, Beat

from . import machine, messages
from .machine import LOOK_S
from .messages import LANES, Call, Input, Read, SendBeat, SendEntry

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Clock, Journal
    from reknit.core.agent.events import Event
    from reknit.core.job.entries import Entry, Node
    from reknit.core.job.job import Job

_LATE_S = 0.5
"""How long a beat may wait for an append, and an append for a beat, before there is a thread for each. Seconds."""
CLOSE_S = 5.0
"""How long `close` waits for the threads. Seconds. A call into a hung file system ends later, or never."""


class ThreadedLink:
    """Implements `ports.Link`."""

    def __init__(
        self,
        journal: Journal,
        clock: Clock,
        nonce: str,
        *,
        look_s: float = LOOK_S,
    ) -> None:
        """`journal`: if it has `remember` (`ports.Remembers`), it is told of every fold.
        `nonce`: unique to this agent. The tokens of its entries begin with it.
        `look_s`: a read that finds nothing returns after so many seconds."""
        self._journal = journal
        self._remembers = journal if isinstance(journal, Remembers) else None
        self._clock = clock
        self._stepping = threading.Lock()
        """Held while `_link` makes a step."""
        self._closing = threading.Event()
        self._crash: Exception | None = None
        # The calls that the threads are to carry out. None: nothing comes any more.
        self._reads: SimpleQueue[Call | None] = SimpleQueue()
        self._changes: SimpleQueue[Call | None] = SimpleQueue()
        self._busy_since: float | None = None
        """When the first thread that appends and beats took the call that it carries out. None: it has none."""
        self._link, calls = machine.begun(nonce, look_s)
        self._threads = [
            Thread(self._serve, self._reads, name=f"reknit {nonce} reads"),
            Thread(self._serve_first, self._changes, name=f"reknit {nonce} appends and beats"),
        ]
        self._second = Thread(self._serve, self._changes, name=f"reknit {nonce} appends and beats too")
        self._put(calls)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()  # a thread that runs already must not be left behind
            raise

    # ---- the agent's side ----

    def append(self, entry: Entry) -> None:
        self._feed(Append(entry))

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        self._feed(Beat(node, count, tuple(watch)))

    def folded(self, job: Job) -> None:
        if self._remembers is not None:
            self._remembers.remember(self._link.reading.position, job)  # before the next read begins
        self._feed(messages.Folded(job))

    def events(self, now: float) -> list[Event]:
        if self._crash is not None:
            raise self._crash  # a journal has a bug, and the loop's thread reports it
        with self._stepping:
            self._link, news = machine.taken(self._link)
        return list(news)

    def close(self) -> None:
        """Close the journal, which ends the calls that the threads wait in. Then wait for the threads. May be repeated.

        Bounded in time: a thread that hangs in a file system is left behind.
        """
        with self._stepping:  # no thread is started after this
            self._closing.set()
        for queue in (self._reads, self._changes, self._changes):
            queue.put(None)
        self._journal.close()
        give_up_at = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.wait(give_up_at - time.monotonic())

    # ---- the threads' side ----

    def _serve(self, queue: SimpleQueue[Call | None]) -> None:
        while (call := queue.get()) is not None:
            self._carry_out(call)

    def _serve_first(self, queue: SimpleQueue[Call | None]) -> None:
        while (call := queue.get()) is not None:
            self._busy_since = time.monotonic()
            self._carry_out(call)
            self._busy_since = None

    def _carry_out(self, call: Call) -> None:
        if self._closing.wait(call.pause_s):
            return
        try:
            self._feed(self._outcome(call))
        except Exception as error:
            self._crash = error
            self._feed(messages.LinkClosed())
            self._clock.wake()

    def _outcome(self, call: Call) -> Input:
        try:
            return self._made(call)
        except Unavailable as e:
            return messages.CallFailed(LANES[type(call)], str(e), e.answers)
        except Refused as e:
            return messages.Forbidden(e.refusal, str(e))

    def _made(self, call: Call) -> Input:
        match call:
            case Read(after, wait_s, least):
                return messages.BatchRead(self._journal.read(after, wait_s, least))
            case SendEntry(token, entry, life):
                return messages.Appended(self._journal.append(token, entry, life))
            case SendBeat(beat):
                return messages.Beaten(self._journal.beat(beat.node, beat.count, beat.watch))
            case _:
                assert_never(call)

    # ---- both ----

    def _feed(self, happened: Input) -> None:
        with self._stepping:
            if self._closing.is_set():
                return  # nobody is told anything any more
            before = self._link.news
            self._link, calls = machine.step(self._link, happened, self._clock.now())
            if (
                self._remembers is not None
                and isinstance(happened, messages.BatchRead)
                and not self._link.reading.is_told
            ):
                self._remembers.take_back()
            self._put(calls)
            self._relieve()
            has_news = self._link.news is not before
        if has_news:
            self._clock.wake()

    def _put(self, calls: Iterable[Call]) -> None:
        for call in calls:
            (self._reads if isinstance(call, Read) else self._changes).put(call)

    def _relieve(self) -> None:
        """Start the second thread that appends and beats, if a call has waited for the first one. This is asked at
        every wish of the agent and after every read, so about once a second or more often."""
        since = self._busy_since
        is_late = since is not None and time.monotonic() - since >= _LATE_S
        if not is_late or self._changes.empty() or self._second in self._threads:
            return
        self._threads.append(self._second)
        try:
            self._second.start()
        except RuntimeError:
            # The system has no thread to give: the first one goes on alone, and this is tried again.
            self._threads.remove(self._second)
