"""The socket between a keeper and its zygote."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from reknit.adapters.keeper.zygote.zygote_line import Line

Pair = tuple[Line, Line]


@pytest.fixture
def lines() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.0)
        yield Line(ours), Line(theirs)


def test_messages_arrive_one_by_one(lines: Pair) -> None:
    """Two of them may lie in the socket, or a part of one."""
    ours, theirs = lines
    theirs.send({"one": 1})
    theirs.send([2, "zwei\n"])
    assert [ours.receive(), ours.receive()] == [({"one": 1}, []), ([2, "zwei\n"], [])]
    theirs.socket.sendall(b'{"a"')
    with pytest.raises(BlockingIOError):
        ours.receive()
    theirs.socket.sendall(b": 1}\n")
    assert ours.receive()[0] == {"a": 1}


def test_files_come_with_their_message(lines: Pair) -> None:
    """A worker gets its streams this way."""
    ours, theirs = lines
    read_end, write_end = os.pipe()
    theirs.send("take", [write_end])
    os.close(write_end)
    message, (received,) = ours.receive()
    os.write(received, b"through")
    os.close(received)
    with open(read_end, "rb") as file:
        assert (message, file.read()) == ("take", b"through")


def test_the_end_of_the_other_side_is_none(lines: Pair) -> None:
    """Also in the middle of a message."""
    ours, theirs = lines
    theirs.socket.sendall(b'{"a"')
    theirs.socket.close()
    assert ours.receive()[0] is None
