"""Open files between an agent and its keeper."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from attrs import evolve

from reknit.adapters.keeper.protocol.files import Receiver, Sender, WithFiles
from reknit.adapters.keeper.protocol.wire import StartProcesses
from tests.support.leaks import nothing_left

MESSAGE = StartProcesses(0, ())
Ends = tuple[Sender, Receiver]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    ours.setblocking(False)
    sender, receiver = Sender(ours), Receiver(theirs.detach())
    yield sender, receiver
    sender.close()
    sender.close()
    os.close(receiver.fd)
    receiver._sock.detach() if receiver._sock else None


def content(fd: int) -> bytes:
    found = os.pread(fd, 100, 0)
    os.close(fd)
    return found


def files(count: int) -> list[int]:
    found = []
    for i in range(count):
        found.append(os.memfd_create("test"))
        os.write(found[-1], b"%d" % i)
    return found


def close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def test_a_message_follows_its_files(ends: Ends) -> None:
    """The keeper finds the files when it reads the message. A message behind a parcel does not overtake it."""
    sender, receiver = ends
    sent = files(3)
    sender.add(WithFiles(MESSAGE, sent))
    sender.add("second")
    assert sender.ready() == [evolve(MESSAGE, descriptors=3), "second"]
    assert not sender.is_waiting
    close(sent)
    assert [content(fd) for fd in receiver.take(2)] == [b"0", b"1"]
    assert [content(fd) for fd in receiver.take(2)] == [b"2"], "fewer than the agent has sent"


def test_more_files_than_the_socket_takes_are_sent_as_it_is_read(ends: Ends) -> None:
    """The kernel limits what is on its way. Nobody waits for that."""
    sender, receiver = ends
    sent = files(2)
    sender.add(WithFiles(MESSAGE, sent * 1_000))
    messages, taken = sender.ready(), 0
    assert messages == []
    assert sender.is_waiting
    while not messages:
        receiver.receive()
        taken += len(list(map(os.close, receiver.take(1_000))))
        messages = sender.ready()
    receiver.receive()
    taken += len(list(map(os.close, receiver.take(2_000))))
    close(sent)
    assert (messages, taken) == ([evolve(MESSAGE, descriptors=2_000)], 2_000)


def test_the_files_are_not_inherited(ends: Ends) -> None:
    """A worker gets the files that are meant for it."""
    sender, receiver = ends
    sent = files(1)
    sender.add(WithFiles(MESSAGE, sent))
    sender.ready()
    (fd,) = receiver.take(1)
    assert not os.get_inheritable(fd)
    close([fd, *sent])


def test_a_keeper_that_is_gone_stops_nothing() -> None:
    """The stream shows that it is gone. The message goes its way."""
    with nothing_left():
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.close()
        sender, sent = Sender(ours), files(1)
        sender.add(WithFiles(MESSAGE, sent))
        assert sender.ready() == [evolve(MESSAGE, descriptors=1)]
        sender.close()
        close(sent)


def test_a_parcel_whose_files_are_closed_sends_none(ends: Ends) -> None:
    """Their numbers may belong to other files by then."""
    sender, receiver = ends
    sent = files(1)
    sender.add(WithFiles(MESSAGE, sent))
    os.close(sent.pop())
    assert sender.ready() == [evolve(MESSAGE, descriptors=0)]
    assert receiver.take(1) == []
