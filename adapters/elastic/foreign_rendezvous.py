"""A rendezvous handler of torch in the place of the journal: reknit's agent among agents of torchrun.

The core knows journals only. So the agent gets a private journal of its own, in which it is the only node, and its
entries are shown when the handler has done its part:

| the agent says | the handler's part | then the journal shows |
|---|---|---|
| `Joined` | `next_rendezvous` returns | `Joined` |
| | `next_rendezvous` raises an error | `Aborted`; `error` holds the error |
| | `num_nodes_waiting` is above 0 while the workers run | the end of the round: another node is admitted, and goes |
| | `num_nodes_waiting` raises an error | an outage of the journal |
| anything else | | the entry |

1. One thread makes all calls to the handler, because they wait, and because no handler promises more.
2. `next_rendezvous` cannot be interrupted. If the agent ends meanwhile, the thread is abandoned.
3. `is_closed` is never asked. The first agent that is done closes the rendezvous for all, and the others work on.
4. A `Joined` that ends the job is shown at once. The judgement of a round's end waits for this entry, and a node whose
   budget is spent must not join at the handler again.
5. The handler's numbers are not the journal's. `WorkersStarted` brings the ranks that the workers really got.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import evolve

from reknit.adapters.runtime.threads import Thread
from reknit.core.agent.events import EntriesRead, Event, JournalFailed
from reknit.core.job.entries import (
    Aborted,
    Admit,
    Entry,
    Failed,
    Joined,
    Leaving,
    Left,
    Node,
    NodeId,
    RestartPolicy,
    Succeeded,
    Terms,
)
from reknit.core.job.fold import fold
from reknit.core.job.job import Closed, Job, Running

if TYPE_CHECKING:
    from reknit.adapters.runtime.loop import Ports
    from reknit.adapters.runtime.ports import Clock, Link
    from reknit.core.agent.agent import Spec

_FOR_EVER = 10**9
"""Seconds, or rounds. The handler has limits of its own."""
_OTHERS = NodeId("another node")
"""The name under which the nodes that wait at the handler are admitted."""
CLOSE_S = 1.0
"""How long `close` waits for a call to the handler to return. Seconds."""


class Wiring(Protocol):
    """The wiring of an agent that has not begun yet: what of it is changed here."""

    spec: Spec
    ports: Ports
    close: Callable[[], None]


def private_terms(max_restarts: int) -> Terms:
    """The terms of the private journal. `max_restarts`: failures that this node survives. As with torch, each node has
    a budget of its own."""
    return Terms(
        min_nodes=1,
        max_nodes=2,  # the node itself, and room for one that waits: otherwise nobody could be admitted
        restarts=RestartPolicy(max_restarts=max_restarts, max_unspent=_FOR_EVER),
        join_timeout_s=float(_FOR_EVER),
        last_call_s=0.0,
        settle_s=float(_FOR_EVER),
    )


class ForeignRendezvous:
    """Makes the wiring of an agent with one node use a torch handler. Implements `ports.Link` for that agent.

    `info`, `error` and `be_started` are for the thread that runs the agent.
    """

    def __init__(self, handler: Any, max_restarts: int, poll_s: float) -> None:
        """`handler`: torch's `RendezvousHandler`, or an object with its methods. `poll_s`: time between two looks at
        the number of waiting nodes. Seconds."""
        self._handler = handler
        self._terms = private_terms(max_restarts)
        self._poll_s = poll_s
        self.info: Any = None
        """torch's `RendezvousInfo` of the present round. None: there was no round yet."""
        self.error: BaseException | None = None
        """What `next_rendezvous` has raised. The agent ends, and `run` should raise it again. None: nothing."""
        self._clock: Clock
        self._link: Link
        self._changed = threading.Condition()
        """Guards the three fields below."""
        self._asked: Joined | None = None
        """The `Joined` for which the handler has a part to do. None: there is none."""
        self._looks = False
        """The workers run, and the number of waiting nodes matters."""
        self._is_closing = False
        self._said: Joined | None = None
        """The latest `Joined` that the agent has said since the last call of `events`. What it means is judged there,
        because the link is told the fold after the commands of a step."""
        self._joined: tuple[Node, int] | None = None
        """Incarnation and round of the last `Joined` that was shown. None: there was none."""
        self._shown: deque[Entry] = deque()
        """Entries that the handler has done its part for."""
        self._told: deque[Event] = deque()
        self._are_waiting = False
        """Nodes wait at the handler for a new round."""
        self._outage = ""
        """Why the number of waiting nodes is not known. Empty: it is."""
        self._job = Job()
        self._peers = 0
        """How many nodes were admitted so far."""
        self._thread = Thread(self._serve, name="reknit rendezvous")

    def rewire(self, wiring: Wiring) -> None:
        """Put this in the place of the link, and start. To be called once, before the agent begins."""
        self._clock, self._link = wiring.ports.clock, wiring.ports.link
        wiring.spec = evolve(wiring.spec, terms=self._terms)
        wiring.ports = evolve(wiring.ports, link=self)
        close = wiring.close

        def close_all() -> None:
            close()
            self.close()

        wiring.close = close_all
        self._thread.start()

    def be_started(self) -> None:
        """The workers of the round run: from now on, nodes that wait at the handler end the round.

        Not before: the agents of the round still exchange ranks, and would wait in vain for one that has gone."""
        self._look(True)

    # ---- the side of the loop: ports.Link ----

    def append(self, entry: Entry) -> None:
        if isinstance(entry, Joined):
            self._said = entry
            return
        if isinstance(entry, Failed | Succeeded | Leaving | Left):
            self._look(False)
        self._link.append(entry)

    def beat(self, node: Node, count: int, watch: Sequence[Node]) -> None:
        self._link.beat(node, count, watch)

    def events(self, now: float) -> list[Event]:
        while self._shown:
            entry = self._shown.popleft()
            if isinstance(entry, Joined):
                self._joined = entry.node, entry.round
            self._link.append(entry)
        said, self._said = self._said, None
        if said is not None:
            self._join(said)
        if self._are_waiting:
            self._are_waiting = False
            self._admit()
        told = []
        while self._told:
            told.append(evolve(self._told.popleft(), at=now))
        return [*self._link.events(now), *told]

    def _join(self, said: Joined) -> None:
        if (said.node, said.round) == self._joined:
            return  # the agent has said it again while the handler was doing its part
        if isinstance(fold(self._job, said).phase, Closed):
            self._link.append(said)
            return
        with self._changed:
            self._asked = said
            self._changed.notify()

    def _admit(self) -> None:
        """End the round, so that the nodes that wait get their place. The node that stands for them goes at once."""
        job = self._job
        if not isinstance(job.phase, Running):
            return  # the round has ended for another reason
        self._look(False)
        peer, round_ = Node(_OTHERS, self._peers), job.round + 1
        self._peers += 1
        self._link.append(Joined(peer, str(peer), round_, address="?", port=0, seen=peer.incarnation - 1))
        self._link.append(Admit(round_, job.epoch))
        self._link.append(Left(peer))

    def folded(self, job: Job) -> None:
        self._job = job
        self._link.folded(job)

    def _look(self, looks: bool) -> None:
        with self._changed:
            self._looks = looks
            self._changed.notify()

    def close(self) -> None:
        """End the thread, and drop what is the handler's. If the thread waits for the handler, it is abandoned after a
        second. May be repeated."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.wait(CLOSE_S)
        # The error knows the calls in which it was raised, and these know this object. The handler has torch's store,
        # whose end belongs to the end of the agent: in a fork of this program it would end the process.
        self._handler = self.info = self.error = None

    # ---- the thread that calls the handler ----

    def _serve(self) -> None:
        while True:
            with self._changed:
                if self._asked is None and not self._is_closing:
                    self._changed.wait(self._poll_s if self._looks else None)
                if self._is_closing:
                    return
                asked, looks = self._asked, self._looks
            if asked is not None:
                self._rendezvous(asked)
            elif looks:
                self._count_waiting()

    def _rendezvous(self, asked: Joined) -> None:
        try:
            self.info = self._handler.next_rendezvous()
        except BaseException as error:  # whatever a handler raises ends the agent, and `run` raises it again
            self.error = error
            self._shown.append(Aborted(f"{type(error).__name__}: {error}"))
        else:
            self._shown.append(asked)
        with self._changed:
            self._asked = None
        self._clock.wake()

    def _count_waiting(self) -> None:
        at = time.monotonic()
        try:
            count = self._handler.num_nodes_waiting()
        except Exception as error:
            # torch would end healthy workers here. The core keeps them, for as long as it bears an outage.
            self._outage = f"{type(error).__name__}: {error}"
            self._told.append(JournalFailed(at, self._outage))
        else:
            if self._outage:
                self._outage = ""
                self._told.append(EntriesRead(at))
            elif not count:
                return
            self._are_waiting = bool(count)
        self._clock.wake()
