"""What an agent of a job with several nodes needs: a name, an address and a shared journal. Imported only for such
jobs.

1. The order of the start: (1) take the lock of this node on this host, (2) end the processes that an earlier agent has
   left, (3) do what other nodes can see.
2. The order of the end is the opposite: (1) the workers, (2) the journal, (3) the store, (4) the lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.host.address import is_here, own_address
from reknit.adapters.host.lock import HostLock, Taken, take, take_free
from reknit.adapters.host.orphans import MARK
from reknit.adapters.journals.envelope import Envelope
from reknit.adapters.journals.tcpstore.hosted import Host, HostedJournal
from reknit.adapters.link import ThreadedLink
from reknit.adapters.runtime.loop import Ports
from reknit.adapters.runtime.ports import CannotStart, Journal, NoJournal, Refused
from reknit.app.input.meeting import SILENCE
from reknit.app.limits import limit_text
from reknit.app.settings import Meeting, Settings
from reknit.core.agent.reasons import JournalRefused, Replaced
from reknit.core.job.entries import Node, NodeId, Terms
from reknit.core.job.fold import fold_all
from reknit.core.job.job import Job, Unopened

from .surroundings import Prevented, Surroundings, Wired, end_left, ended_text, open_workers, spec_of

if TYPE_CHECKING:
    from reknit.adapters.journals.etcd.gateway import Cluster
    from reknit.adapters.journals.etcd.reading import EtcdRecords

_HOSTS = "hosts the store"
"""The note in the lock of an agent that hosts the job's store."""
_FEWEST_ROUND_TRIPS, _ROUND_TRIPS = 3, 4
"""A healthy node may be silent for so many round trips to the store: (1) it beats and waits for the answer, (2) it
reads, (3) it beats again. The second number leaves a reserve."""
_ETCD_S = 5.0
"""Least bound of a call of etcd, for all of its servers together. Seconds."""
_OPENS_AFTER_S = 3.0
"""How long an agent leaves it to the host of the store to say `Opened`. So if terms differ, those of the host hold:
without the host there is no job. Seconds."""


def wire_several(settings: Settings, meeting: Meeting, world: Surroundings, nonce: str) -> Wired:
    """An agent of a job that may have several nodes. Raises `Prevented` and `CannotStart`."""
    try:
        with ExitStack() as stack:
            address = settings.address or own_address(meeting.endpoints)
            lock = _locked(settings, _lock_place(meeting), address)
            stack.callback(lock.release)
            workers = open_workers(settings, world, nonce, mark=f"{lock.mark}/workers")
            stack.callback(workers.close)
            notes = end_left()
            if ended := lock.end_orphans():
                notes.append(ended_text(ended))
            if settings.warm or settings.start_method == "forkserver":
                from .warm_workers import warm_up

                warm_up(workers, settings)
            # The store's server carries a mark as well. An old server that is still ending would be taken for a store
            # that serves.
            host = _hosted(meeting, {**world.environ, MARK: f"{lock.mark}/store"})
            if host is not None:
                stack.callback(host.close)
                world.children.add(host.pid)
                lock.note(_HOSTS)
            notes += _complaints(meeting, settings.run_id)
            journal = open_journal(
                meeting,
                settings.run_id,
                founds=host is not None or meeting.is_host is False,
                has_elders=lock.left_note == _HOSTS,
                silence_s=settings.terms.silence_s,
                on_slow=partial(_tell_if_slow, settings.terms, world.say),
                on_doubt=partial(_tell, world.say),
            )
            asked = journal if host is None else HostedJournal(journal, host, world.children.add)
            link = ThreadedLink(asked, world.clock, nonce)
            stack.callback(link.close)
            stack.callback(workers.close)  # a second time, so that the workers are ended before the journal is closed
            whose = "" if host is None else "; this node hosts the job's store"
            notes.append(f'node {lock.node} ({address}) joins job "{settings.run_id}" at {meeting.shown}{whose}')
            spec = evolve(
                spec_of(settings, world, lock.node, address),
                hosts_journal=host is not None,
                opens_after_s=_OPENS_AFTER_S if meeting.backend == "c10d" and host is None else 0.0,
            )
            ports = Ports(world.clock, link, workers, world.requests)
            return Wired(spec, ports, stack.pop_all().close, notes)
    except Taken as e:
        raise Prevented(str(e), Replaced(Node(NodeId(settings.node_id or os.uname().nodename)))) from None
    except Refused as e:
        raise Prevented(str(e), JournalRefused(e.refusal, str(e))) from None


def _locked(settings: Settings, place: str, address: str) -> HostLock:
    """Raises `Taken`, `Refused`, and `CannotStart` for a limit of the machine, for example a full disk."""
    try:
        if settings.node_id:
            try:
                return take(settings.run_id, place, settings.node_id)
            except Taken as e:
                raise Taken(f"{e}; give this one another --node-id, or end that one") from None
        name = os.uname().nodename
        return take_free(settings.run_id, place, address if name in ("", "localhost") else name)
    except Refused as e:
        if limit := limit_text(e):
            raise CannotStart(f"no lock for this node: {limit}") from None
        raise


def _lock_place(meeting: Meeting) -> str:
    """The same text for all agents on this host that name this store, in whichever order and by whichever name. The
    lock on this host is named by it."""
    endpoints = sorted(("localhost" if is_here(host, port) else host, port) for host, port in meeting.endpoints)
    return evolve(meeting, endpoints=tuple(endpoints), folder=meeting.folder and os.path.realpath(meeting.folder)).place


def _hosted(meeting: Meeting, env: Mapping[str, str]) -> Host | None:
    """The store of `c10d` that this agent is to host. None: it is to host none. `env`: the environment of the server's
    process."""
    if meeting.backend != "c10d":
        return None
    from reknit.adapters.journals.tcpstore.host import host_store

    return host_store(*meeting.endpoints[0], must=meeting.is_host, env=env)


def _tell(say: Callable[[str], None], line: str) -> None:
    from reknit.app.report import PREFIX  # only now: it is slow to import

    say(f"{PREFIX}{line}")


def _complaints(meeting: Meeting, job: str) -> list[str]:
    """What the operator should know about a place that was made before."""
    if meeting.backend != "file":
        return []
    from reknit.adapters.journals.file.folder import complaint

    return [line for line in [complaint(meeting.folder, job, meeting.group)] if line]


def _tell_if_slow(terms: Terms, say: Callable[[str], None], took_s: float) -> None:
    """One line for the operator if nodes will be taken for dead because the store is far away."""
    if took_s * _FEWEST_ROUND_TRIPS <= terms.silence_s:
        return
    limit, heartbeat_s = f"{terms.silence_s:.1f} s", ceil(took_s * _ROUND_TRIPS / SILENCE)
    from reknit.app.report import PREFIX  # only now: it is slow to import

    say(
        f"{PREFIX}the store answers after {took_s:.1f} s, and a node that is silent for {limit} counts as lost: "
        f"give --rdzv-conf=heartbeat={heartbeat_s} on all nodes"
    )


def open_journal(
    meeting: Meeting,
    job: str,
    *,
    founds: bool = True,
    has_elders: bool = False,
    silence_s: float = 0.0,
    on_slow: Callable[[float], None] = lambda _: None,
    on_doubt: Callable[[str], None] = lambda _: None,
) -> Journal:
    """The journal of the job. The store is not asked for anything yet. Raises `Refused`.

    `founds`: with c10d, this agent begins the journal if there is none. Usually only the host of the store does so.
    Otherwise an agent with a wrong secret might be first. If no agent hosts the store (is_host=false), each agent may
    begin the journal.

    `has_elders`: with c10d, an earlier agent of this node hosted the store and has not ended in order. Other agents may
    remember the journal. So this agent waits some seconds for them before it begins another one.

    `on_slow`: with c10d, called with the seconds that the store took for an answer, when these are many.

    `on_doubt`: with etcd, called with a line about an etcd that may lose writes, or that its history will fill.
    """
    envelope = Envelope(job, meeting.secret)
    if meeting.backend == "file":
        from reknit.adapters.journals.file.journal import FileJournal

        return FileJournal(meeting.folder, envelope, group=meeting.group)
    if meeting.backend == "etcd":
        from reknit.adapters.journals.etcd.doubts import Doubts
        from reknit.adapters.journals.etcd.journal import EtcdJournal

        # Half of the silence limit for each server: a node with a later beat is taken for dead anyway.
        timeout_s = max(_ETCD_S, len(meeting.endpoints) * silence_s / 2)
        look = Doubts(on_doubt, silence_s / SILENCE).look
        return EtcdJournal(cluster_of(meeting), envelope, timeout_s=timeout_s, on_slow=on_slow, on_read=look)
    from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal

    return TCPStoreJournal(*meeting.endpoints[0], envelope, founds=founds, has_elders=has_elders, on_slow=on_slow)


def read_job(meeting: Meeting, job: str) -> Job:
    """The job as its journal tells it now. Nothing is written. Raises `Refused`, `Unavailable`, and `NoJournal` if the
    job has not begun."""
    envelope = Envelope(job, meeting.secret)
    journal: Journal | EtcdRecords
    if meeting.backend == "file":
        from reknit.adapters.journals.file.journal import FileJournal

        journal = FileJournal(meeting.folder, envelope, group=meeting.group, reads_only=True)
    elif meeting.backend == "c10d":
        from reknit.adapters.journals.tcpstore.journal import TCPStoreJournal

        journal = TCPStoreJournal(*meeting.endpoints[0], envelope, reads_only=True)
    else:
        from reknit.adapters.journals.etcd.reading import EtcdRecords

        journal = EtcdRecords(cluster_of(meeting), envelope, timeout_s=_ETCD_S)
    try:
        folded, position = Job(), 0
        while (batch := journal.read(position, 0.0)).position != position:
            folded = fold_all(folded if batch.base is None else batch.base, batch.entries)
            position = batch.position
        if isinstance(folded.phase, Unopened):
            raise NoJournal(f"the journal of job {job} is empty")
        return folded
    finally:
        journal.close()


def cluster_of(meeting: Meeting) -> Cluster:
    """The etcd cluster of the meeting, and how it is spoken to."""
    from reknit.adapters.journals.etcd.gateway import Cluster

    files = meeting.ca_cert, meeting.ssl_cert, meeting.ssl_cert_key
    user = meeting.user, meeting.password, meeting.password_file
    return Cluster(meeting.endpoints, meeting.protocol, *files, *user)
