"""Between the agent's loop, which must not wait, and a journal, which has to: two threads and an inbox.

1. One thread reads. The other says what is to be said, in order, and beats. Both try again for as long as it takes:
   who ends the wait is the agent (`Spec.store_timeout_s`), never an adapter. Where an append may wait for long while
   all is well (its turn for a file), a third one beats: a node that waits is not a silent one.
2. What happened is put into the inbox, and the clock is woken.
3. A beat or an entry that is asked for while the same one is still on its way adds nothing: the agent may be speaking
   into an outage, and the store must not be flooded when it is back.
4. While something cannot be said, nothing that is read is told: the agent sees one outage and not a flicker. It is
   read again afterwards, as what was read before may be long out of date. Beats go on, if they can.
5. A beat that was acknowledged, but for the first, and an outage that is over, are followed by a read that is told
   even if it is empty. Nothing else tells the agent that the journal answers again.
6. A reader that had much to read publishes the fold of it, for those behind it. That is tried once: nobody needs it,
   and what the agent has to say must not wait for it.
"""

from __future__ import annotations

import _thread
import os
import time
from _queue import SimpleQueue
from collections import deque
from collections.abc import Sequence
from functools import partial

from reknit.core.entries import Entry, Node
from reknit.core.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job import Job, lacking
from reknit.core.values import TYPE_CHECKING

from .ports import Refused, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .ports import Batch, Clock, Journal

    T = TypeVar("T")

LOOK_S = 1.0
"""A read that finds nothing returns after this: but for a crowd, a fresh look is never further away."""
MANY = 32
"""More entries than this in one read are worth publishing the fold of, and looking for one first."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0


class ThreadedLink:
    """Implements `ports.Link`."""

    def __init__(
        self, journal: Journal, clock: Clock, nonce: str, *, look_s: float = LOOK_S, beats_apart: bool = False
    ) -> None:
        """`nonce`: unique to this agent; the tokens of its entries begin with it. `beats_apart`: the journal can beat
        while an append waits."""
        self._journal = journal
        self._clock = clock
        self._nonce = nonce
        self._look_s = look_s
        self._inbox: deque[Event] = deque()
        self._reads: deque[tuple[int, int, bool]] = deque()
        """Of those that the agent has not taken in yet: where each ended, after how many entries, and is its fold worth
        publishing."""
        self._count_read = 0
        self._enough_at = 0
        """Entries that have to be read before anything can change for the agent, as far as it knows."""
        self._is_folded = _thread.allocate_lock()
        """Held by the reader until the agent has taken in what it has told."""
        self._is_folded.acquire()
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._beats: SimpleQueue[Callable[[], None]] = SimpleQueue() if beats_apart else self._todo
        self._count = 0
        self._underway: set[Entry] = set()
        """Said, and not read back yet."""
        self._beat: tuple[Node, Sequence[Node]] | None = None
        """The one that is asked for and not acknowledged."""
        self._has_beaten = False
        self._owes_read = True
        self._stuck: set[str] = set()
        """The threads that cannot say what they are to say."""
        self._is_closed = False
        self._crash: Exception | None = None
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        clock.watch(self._read_end)
        _thread.start_new_thread(self._read_all, ())
        _thread.start_new_thread(self._say_all, (self._todo, "todo"))
        if beats_apart:
            _thread.start_new_thread(self._say_all, (self._beats, "beats"))

    # ---- the agent's side ----

    def append(self, entry: Entry) -> None:
        if entry in self._underway:
            return  # it is not lost, only slow
        self._underway.add(entry)
        self._count += 1
        token = f"{self._nonce}-{self._count}"
        self._todo.put(lambda: self._journal.append(token, entry))

    def beat(self, node: Node, watch: Sequence[Node]) -> None:
        if self._beat is None:
            self._beat = node, watch
            self._beats.put(self._beat_now)

    def events(self, now: float) -> list[Event]:
        _drain(self._read_end)
        if self._crash is not None:
            raise self._crash  # a bug in a journal: this thread reports it
        events = []
        while self._inbox:
            events.append(self._inbox.popleft())
        return events

    def folded(self, job: Job) -> None:
        position, count_read, is_worth = self._reads.popleft()
        self._enough_at = count_read + lacking(job)
        self._read_on()
        if is_worth:
            self._todo.put(lambda: self._offer(position, job))

    def close(self) -> None:
        self._is_closed = True
        self._read_on()
        self._todo.put(_nothing)
        self._beats.put(_nothing)
        self._journal.close()
        self._clock.unwatch(self._read_end)
        # The descriptors stay open: the threads may be about to write, and the number must not be somebody else's.

    # ---- the threads' side ----

    def _read_all(self) -> None:
        position = 0
        owes_read = False
        while not self._is_closed:
            if self._owes_read:
                self._owes_read = False  # before the read: what is owed from now on, it may be too early for
                owes_read = True
            batch = self._tried(partial(self._read, position, owes_read))
            if batch is None:
                continue
            if self._stuck:
                time.sleep(_FIRST_RETRY_S)  # nobody is waiting for this thread
                continue
            position = batch.position
            if batch.entries or batch.base is not None or batch.is_awaited or owes_read:
                owes_read = False
                self._underway.difference_update(batch.entries)
                if batch.base is not None:
                    self._underway.clear()  # what was skipped may have been among it
                self._count_read += len(batch.entries)
                is_worth = batch.is_awaited or len(batch.entries) > MANY
                self._reads.append((batch.position, self._count_read, is_worth))
                self._is_folded.acquire(blocking=False)  # released late, for the one before
                self._tell(EntriesRead(self._clock.now(), batch.entries, batch.base))
                # How much is worth waiting for is known then. It may also be stopped in a debugger, or have ended.
                self._is_folded.acquire(timeout=self._look_s)

    def _read(self, position: int, owes_read: bool) -> Batch:
        wait_s = 0.0 if owes_read or self._owes_read else self._look_s
        return self._journal.read(position, wait_s, max(1, self._enough_at - self._count_read))

    def _say_all(self, queue: SimpleQueue[Callable[[], None]], name: str) -> None:
        while not self._is_closed:
            self._tried(queue.get(), name)

    def _tried(self, call: Callable[[], T], saying: str = "") -> T | None:
        """Its value, however often it takes. None if there is no use in trying, and nothing will follow. `saying`: the
        thread that does; empty for the one that reads."""
        pause_s = 0.0
        while not self._is_closed:
            try:
                value = call()
            except Unavailable as e:
                if saying:
                    self._stuck.add(saying)
                else:
                    self._owes_read = True  # the next try is not to wait
                # Each time: a read that ended in the same moment may have told the agent that all is well.
                self._tell(JournalFailed(self._clock.now(), str(e)))
                if saying and self._beats is self._todo:
                    self._keep_beating(call)
                pause_s = min(max(_FIRST_RETRY_S, 2 * pause_s), _LAST_RETRY_S)
                time.sleep(pause_s)
            except Refused as e:
                self._is_closed = True
                self._tell(JournalFailed(self._clock.now(), str(e), e.refusal))
            except Exception as e:
                self._crashed(e)
            else:
                if pause_s:
                    self._owes_read = True
                self._stuck.discard(saying)
                return value
        return None

    def _offer(self, position: int, job: Job) -> None:
        try:
            self._journal.publish(position, job)
        except Unavailable:
            pass  # if there is an outage, the next beat finds it

    def _beat_now(self) -> None:
        if self._beat is None:
            return  # it went ahead of something that could not be said
        node, watch = self._beat
        counts = self._journal.beat(node, watch)
        self._beat = None
        self._tell(Counters(self._clock.now(), counts))
        if self._has_beaten:
            self._owes_read = True
        self._has_beaten = True

    def _keep_beating(self, stuck: object) -> None:
        """On a full disk nothing can be said, and the node lives all the same."""
        try:
            if stuck != self._beat_now:
                self._beat_now()
        except (Unavailable, Refused):
            pass  # it is tried again in its turn
        except Exception as e:
            self._crashed(e)

    def _crashed(self, error: Exception) -> None:
        self._is_closed, self._crash = True, error
        self._wake()

    def _tell(self, event: Event) -> None:
        self._inbox.append(event)
        self._wake()

    def _read_on(self) -> None:
        if self._is_folded.locked():
            self._is_folded.release()

    def _wake(self) -> None:
        try:
            os.write(self._write_end, b".")
        except BlockingIOError:
            pass  # full: it is being woken already


def _drain(fd: int) -> None:
    try:
        while len(os.read(fd, 512)) == 512:
            pass
    except BlockingIOError:
        pass


def _nothing() -> None:
    """Wakes a thread up, which sees that it is to end."""
