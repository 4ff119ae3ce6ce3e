"""The link between the agent's loop, which never waits, and a journal, which waits: two threads and an inbox.

1. One thread reads. The other thread appends, in order, and beats. Both try again for as long as it takes. When to stop
   trying is the agent's decision (`Spec.store_timeout_s`), never an adapter's.
2. With a journal in a file, an append may wait for its turn while all is well. So a third thread beats. A node that
   waits for its turn is not silent.
3. The threads put what happened into the inbox, and wake the clock.
4. If the agent asks for an entry or a beat that is still on its way, nothing is added. During an outage the agent says
   the same things again and again, and the store must not be flooded when it is back.
5. While something cannot be said, the agent is told nothing that is read. So it sees one outage, and not many short
   ones. Afterwards the journal is read again, because what was read before may be out of date. Beats go on if they can.
6. After an acknowledged beat, the agent is told of the next read even if it is empty. The first beat is the exception.
   The same holds at the end of an outage. Nothing else tells the agent that the journal answers again.
7. A reader that had much to read publishes the fold, for readers that are far behind. It tries once: nobody depends on
   the fold, and the agent's own entries must not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from reknit.core.agent.events import Counters, EntriesRead, Event, JournalFailed
from reknit.core.job.entries import Entry, Node
from reknit.core.job.job import Job, lacking

from .ports import Refused, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from .ports import Batch, Clock, Journal

    T = TypeVar("T")

LOOK_S = 1.0
"""A read that finds nothing returns after this. So the next look is at most this far away, except in a large crowd of
nodes. Seconds."""
MANY = 32
"""After a read of more entries than this, a reader publishes their fold. A reader that is further behind than this
looks for a published fold first."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_CLOSE_S = 5.0
"""How long `close` waits for the threads. Seconds. A call into a hung file system ends later, or never."""


class ThreadedLink:
    """Implements `ports.Link`."""

    def __init__(
        self, journal: Journal, clock: Clock, nonce: str, *, look_s: float = LOOK_S, beats_apart: bool = False
    ) -> None:
        """`nonce`: unique to this agent. The tokens of its entries begin with it.
        `look_s`: a read that finds nothing returns after so many seconds.
        `beats_apart`: a third thread beats, because an append to this journal may wait while all is well."""
        self._journal = journal
        self._clock = clock
        self._nonce = nonce
        self._look_s = look_s
        self._inbox: deque[Event] = deque()
        self._reads: deque[tuple[int, int, bool]] = deque()
        """Batches that were handed to the agent and are not folded yet. For each batch: the journal position after it,
        the number of entries read so far, and whether to publish the fold for other readers."""
        self._count_read = 0
        self._enough_at = 0
        """The count of read entries from which on something can change for the agent, as far as its fold tells."""
        self._is_folded = threading.Event()
        """Set when the agent has folded what the reader has told it."""
        self._todo: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._beats: SimpleQueue[Callable[[], None]] = SimpleQueue() if beats_apart else self._todo
        self._count = 0
        self._underway: set[Entry] = set()
        """Entries that the agent has said and that were not read back yet."""
        self._beat: tuple[Node, Sequence[Node]] | None = None
        """The beat that is on its way. None: the last one was acknowledged."""
        self._has_beaten = False
        self._owes_read = True
        self._stuck: set[str] = set()
        """The names of the threads whose last try to say something has failed."""
        self._closing = threading.Event()
        """Set by `close`, by a refusal and by a bug: the threads end."""
        self._crash: Exception | None = None
        self._threads = [self._thread("reads", self._read_all), self._thread("says", self._say_all, self._todo, "todo")]
        if beats_apart:
            self._threads.append(self._thread("beats", self._say_all, self._beats, "beats"))
        for thread in self._threads:
            thread.start()

    def _thread(self, does: str, call: Callable[..., None], *args: object) -> threading.Thread:
        # A daemon: a call into a hung file system must not keep the process from ending.
        return threading.Thread(target=call, args=args, name=f"reknit {self._nonce} {does}", daemon=True)

    # ---- the agent's side ----

    def append(self, entry: Entry) -> None:
        if entry in self._underway:
            return  # the entry is still on its way
        self._underway.add(entry)
        self._count += 1
        token = f"{self._nonce}-{self._count}"
        self._todo.put(lambda: self._journal.append(token, entry))

    def beat(self, node: Node, watch: Sequence[Node]) -> None:
        if self._beat is None:
            self._beat = node, watch
            self._beats.put(self._beat_now)

    def events(self, now: float) -> list[Event]:
        if self._crash is not None:
            raise self._crash  # a journal has a bug, and the loop's thread reports it
        events = []
        while self._inbox:
            events.append(self._inbox.popleft())
        return events

    def folded(self, job: Job) -> None:
        position, count_read, is_worth = self._reads.popleft()
        self._enough_at = count_read + lacking(job)
        self._is_folded.set()
        if is_worth:
            self._todo.put(lambda: self._offer(position, job))

    def close(self) -> None:
        """Close the journal, which ends the calls that the threads wait in. Then wait for the threads. May be repeated.

        Bounded in time: a thread that hangs in a file system is left behind.
        """
        self._closing.set()
        self._is_folded.set()
        self._todo.put(_nothing)
        self._beats.put(_nothing)
        self._journal.close()
        give_up_at = time.monotonic() + _CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, give_up_at - time.monotonic()))

    # ---- the threads' side ----

    def _read_all(self) -> None:
        position = 0
        owes_read = False
        while not self._closing.is_set():
            if self._owes_read:
                self._owes_read = False  # reset before the read: what is owed later needs a later read
                owes_read = True
            batch = self._tried(partial(self._read, position, owes_read))
            if batch is None:
                continue
            if self._stuck:
                self._closing.wait(_FIRST_RETRY_S)  # what was read may not be told now: see the top of this file
                continue
            position = batch.position
            if batch.entries or batch.base is not None or batch.is_awaited or owes_read:
                owes_read = False
                self._underway.difference_update(batch.entries)
                if batch.base is not None:
                    self._underway.clear()  # these entries may be among those that were skipped
                self._count_read += len(batch.entries)
                is_worth = batch.is_awaited or len(batch.entries) > MANY
                self._reads.append((batch.position, self._count_read, is_worth))
                self._is_folded.clear()  # it may be set for the batch before, after the wait for it was over
                if self._closing.is_set():
                    return  # `close` may have set it just before, and would not set it again
                self._tell(EntriesRead(self._clock.now(), batch.entries, batch.base))
                # Wait for the fold, because only the fold tells how many entries are worth waiting for. The wait has a
                # limit, because the agent may have ended or be stopped in a debugger.
                self._is_folded.wait(self._look_s)

    def _read(self, position: int, owes_read: bool) -> Batch:
        wait_s = 0.0 if owes_read or self._owes_read else self._look_s
        return self._journal.read(position, wait_s, max(1, self._enough_at - self._count_read))

    def _say_all(self, queue: SimpleQueue[Callable[[], None]], name: str) -> None:
        while not self._closing.is_set():
            self._tried(queue.get(), name)

    def _tried(self, call: Callable[[], T], saying: str = "") -> T | None:
        """Repeat the call until it succeeds, and return its value. None: the link ends, so the call was given up.

        `saying`: the name of the thread that says something. Empty: the thread that reads."""
        pause_s = 0.0
        while not self._closing.is_set():
            try:
                value = call()
            except Unavailable as e:
                if saying:
                    self._stuck.add(saying)
                else:
                    self._owes_read = True  # the next try must not wait for news
                # Told after each try. A read that ended at the same moment may have told the agent that all is well.
                self._tell(JournalFailed(self._clock.now(), str(e)))
                if saying and self._beats is self._todo:
                    self._keep_beating(call)
                pause_s = min(max(_FIRST_RETRY_S, 2 * pause_s), _LAST_RETRY_S)
                self._closing.wait(pause_s)
            except Refused as e:
                self._closing.set()
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
            pass  # if there is an outage, the next beat finds that out

    def _beat_now(self) -> None:
        if self._beat is None:
            return  # `_keep_beating` has sent this beat already
        node, watch = self._beat
        counts = self._journal.beat(node, watch)
        self._beat = None
        self._tell(Counters(self._clock.now(), counts))
        if self._has_beaten:
            self._owes_read = True
        self._has_beaten = True

    def _keep_beating(self, stuck: object) -> None:
        """Beat while something else cannot be said. On a full disk nothing can be appended, and the node lives all the
        same."""
        try:
            if stuck != self._beat_now:
                self._beat_now()
        except (Unavailable, Refused):
            pass  # the thread tries again
        except Exception as e:
            self._crashed(e)

    def _crashed(self, error: Exception) -> None:
        self._crash = error
        self._closing.set()
        self._clock.wake()

    def _tell(self, event: Event) -> None:
        self._inbox.append(event)
        self._clock.wake()


def _nothing() -> None:
    """Does nothing. It wakes a thread, which then sees that the link is closed."""
