"""What several nodes need: a name of its own for each, an address, a journal that all share. Loaded only for them.

1. First the lock on this host, then the end of what an earlier agent left, and only then anything that the others see.
2. What was made first is let go of last: the workers are gone before the journal, and that before the store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from reknit.adapters.address import own_address
from reknit.adapters.clock import Clock
from reknit.adapters.envelope import Envelope
from reknit.adapters.hostlock import MARK, HostLock, Taken, take, take_free
from reknit.adapters.link import ThreadedLink
from reknit.adapters.ports import Batch, Journal, Refused, Unavailable
from reknit.core.entries import Entry, Node, NodeId
from reknit.core.job import Job
from reknit.core.reasons import JournalRefused, Refusal, Replaced
from reknit.core.values import evolve

from .config import Config
from .driver import Ports
from .rendezvous import Rendezvous
from .report import say
from .wire import Prevented, Requests, Wired, worker_processes

T = TypeVar("T")
_OPENS_AFTER_S = 3.0
"""Whose terms hold if they differ: those of the store's host, without which there is no job."""


class Host(Protocol):
    """A store that this agent hosts."""

    @property
    def pid(self) -> int: ...

    def failure(self) -> str | None:
        """Why it serves no more."""
        ...

    def close(self) -> None: ...


def wire_several(
    config: Config,
    meeting: Rendezvous,
    environ: Mapping[str, str],
    clock: Clock,
    requests: Requests,
    log_dir: str,
    nonce: str,
) -> Wired:
    """An agent of a job that may have several nodes. Raises `Prevented`."""
    try:
        with ExitStack() as stack:
            address = meeting.address or own_address(meeting.endpoints)
            lock = _locked(meeting, address)
            stack.callback(lock.release)
            if ended := lock.end_orphans():
                say(f"ended {ended} process{'es' * (ended != 1)} that an earlier agent had left behind")
            # The store's server is marked, too: one that is still dying would be taken for a store that serves.
            os.environ[MARK] = lock.mark
            host = _hosted(meeting)
            if host is not None:
                stack.callback(host.close)
            journal = open_journal(meeting, founds=host is not None or meeting.is_host is False)
            asked = journal if host is None else HostedJournal(journal, host)
            link = ThreadedLink(asked, clock, nonce, beats_apart=meeting.backend == "file")
            stack.callback(link.close)
            marked = evolve(config, env={**config.env, MARK: lock.mark})
            spared = () if host is None else (host.pid,)
            workers = worker_processes(marked, environ, clock, log_dir, spared=spared)
            stack.callback(workers.close)
            whose = "" if host is None else ", whose store it hosts"
            say(f"node {lock.node} ({address}) meets job {meeting.job} at {meeting.place}{whose}")
            spec = evolve(
                config.spec,
                node_id=NodeId(lock.node),
                address=address,
                shares_journal=True,
                hosts_journal=host is not None,
                opens_after_s=_OPENS_AFTER_S if meeting.backend == "c10d" and host is None else 0.0,
            )
            return Wired(spec, Ports(clock, link, workers, requests), workers, stack.pop_all().close)
    except Taken as e:
        raise Prevented(str(e), Replaced(Node(NodeId(meeting.node_id)))) from None
    except Refused as e:
        raise Prevented(str(e), JournalRefused(e.refusal, str(e))) from None


def _locked(meeting: Rendezvous, address: str) -> HostLock:
    if meeting.node_id:
        return take(meeting.job, meeting.place, meeting.node_id)
    name = os.uname().nodename
    return take_free(meeting.job, meeting.place, address if name in ("", "localhost") else name)


def _hosted(meeting: Rendezvous) -> Host | None:
    """The store of `c10d`, if it falls to this agent to host it."""
    if meeting.backend != "c10d":
        return None
    from reknit.adapters.tcpstore.host import host_store

    return host_store(*meeting.endpoints[0], must=meeting.is_host)


def open_journal(meeting: Rendezvous, *, founds: bool = True) -> Journal:
    """Nothing is asked of the store yet. Raises `Refused`.

    `founds`: with c10d, begin the journal. Only the store's host does, or whose secret is wrong might be the first. If
    no agent may host (is_host=false), the store is somebody else's, and anybody does.
    """
    envelope = Envelope(meeting.job, meeting.secret)
    if meeting.backend == "file":
        from reknit.adapters.journals.file import FileJournal

        return FileJournal(meeting.folder, envelope)
    if meeting.backend == "etcd":
        from reknit.adapters.journals.etcd import EtcdJournal

        return EtcdJournal(
            meeting.endpoints,
            envelope,
            protocol=meeting.protocol,
            ca_cert=meeting.ca_cert,
            cert_cert=meeting.ssl_cert,
            cert_key=meeting.ssl_cert_key,
        )
    from reknit.adapters.journals.tcpstore import TCPStoreJournal

    return TCPStoreJournal(*meeting.endpoints[0], envelope, founds=founds)


class HostedJournal:
    """Implements `ports.Journal` over one whose store this agent hosts, and knows why that has ended.

    A store that never served (torch is missing) will not: refused at once, not after the patience for an outage.
    """

    def __init__(self, journal: Journal, host: Host) -> None:
        self._journal = journal
        self._host = host
        self._has_served = False

    def append(self, token: str, entry: Entry) -> None:
        self._asked(lambda: self._journal.append(token, entry))

    def read(self, after: int, wait_s: float, least: int = 1) -> Batch:
        return self._asked(lambda: self._journal.read(after, wait_s, least))

    def beat(self, node: Node, watch: Sequence[Node]) -> Mapping[Node, int]:
        return self._asked(lambda: self._journal.beat(node, watch))

    def publish(self, position: int, job: Job) -> None:
        self._asked(lambda: self._journal.publish(position, job))

    def close(self) -> None:
        self._journal.close()

    def _asked(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except Unavailable as e:
            why = self._host.failure()
            if why is None:
                raise
            if not self._has_served:
                raise Refused(Refusal.SETUP, why) from None
            raise Unavailable(f"{e}; {why}") from None
        self._has_served = True
        return answer
