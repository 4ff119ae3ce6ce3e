"""The stream between an agent and its keeper, over pipes and sockets that behave badly."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from reknit.adapters.keeper.protocol.stream import Broken, Stream
from reknit.adapters.keeper.protocol.wire import (
    VERSION,
    Flushed,
    Hello,
    Output,
    Say,
    ToAgent,
    ToKeeper,
)
from reknit.core.agent.worker_words import WorkersStarted

HELLO = b'{"kind":"Hello","version":%d,"pid":1,"host":"h"}\n' % VERSION


@pytest.fixture
def wire() -> Iterator[tuple[int, Stream]]:
    """The end that a test writes to, and the stream of an agent that reads from it."""
    read_end, write_end = os.pipe()
    stream = Stream(read_end, os.open(os.devnull, os.O_WRONLY), ToAgent, has_banner=True)
    yield write_end, stream
    stream.close()
    stream.close()
    os.close(write_end)


def test_a_message_may_come_in_pieces(wire: tuple[int, Stream]) -> None:
    """A byte stream keeps no boundaries."""
    end, stream = wire
    for byte in HELLO[:-1]:
        os.write(end, bytes([byte]))
        assert stream.receive(0.0) == []
    os.write(end, HELLO[-1:] + HELLO)
    assert stream.receive(0.0) == [Hello(VERSION, 1, "h")] * 2


def test_a_banner_is_skipped_before_the_hello_only(wire: tuple[int, Stream]) -> None:
    """A login on another host greets; later text is garbage."""
    end, stream = wire
    os.write(end, b'Welcome!\n\n{"kind": 1}\n\xff\xfe\n' + HELLO)
    assert stream.receive(0.0) == [Hello(VERSION, 1, "h")]
    os.write(end, b"Welcome again\n")
    with pytest.raises(Broken, match="Welcome again"):
        stream.receive(0.0)


@pytest.mark.parametrize(
    "garbage", [b"x", b"{}", b"[]", b"\xff", b"[" * 50_000, b'{"kind":"Shutdown"}', b'{"kind":["x"]}', b""]
)
def test_garbage_breaks_the_stream_in_one_short_line(wire: tuple[int, Stream], garbage: bytes) -> None:
    """Whatever is no message of the other side ends it, and never this process."""
    end, stream = wire
    os.write(end, HELLO + garbage + b"\n")
    assert stream.receive(0.0) == [Hello(VERSION, 1, "h")], "what came before it counts"
    with pytest.raises(Broken) as caught:
        stream.receive(0.0)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("more", ["", ',"pid":1,"host":"h","more":[]', ',"pid":1,"host":"h"'])
def test_another_version_is_named_whatever_its_fields(wire: tuple[int, Stream], more: str) -> None:
    """The operator has installed two versions, and must be told which."""
    end, stream = wire
    os.write(end, f'{{"kind":"Hello","version":77{more}}}\n'.encode())
    with pytest.raises(Broken, match=rf"version 77, .* version {VERSION}$"):
        stream.receive(0.0)


def test_a_stream_that_is_cut_in_a_line_first_gives_what_was_whole() -> None:
    """The last exits of a keeper that is killed must not be lost with its half line."""
    ours, theirs = socket.socketpair()
    stream = Stream(ours.detach(), os.open(os.devnull, os.O_WRONLY), ToAgent)
    theirs.sendall(HELLO + HELLO[:9])
    theirs.close()
    assert stream.receive(0.0) == [Hello(VERSION, 1, "h")]
    with pytest.raises(Broken, match="cut in the middle of a line"):
        stream.receive(0.0)
    stream.close()


def test_two_full_buffers_do_not_block_each_other() -> None:
    """Both sides send a lot before either reads: nobody waits, and everything arrives in order."""
    one, other = socket.socketpair()
    agent = Stream(one.fileno(), os.dup(one.detach()), ToAgent)
    keeper = Stream(other.fileno(), os.dup(other.detach()), ToKeeper)
    wishes: list[bool] = []
    agent.wants_to_write = wishes.append
    lines = [f"{i} {'x' * 10_000}" for i in range(200)]
    for line in lines:
        agent.send(Say(line))
        keeper.send(Output(1, line))
    assert agent.unsent
    assert keeper.unsent
    heard: list[list[object]] = [[], []]
    while agent.unsent or keeper.unsent or any(len(each) < 200 for each in heard):
        for stream, each in zip((agent, keeper), heard, strict=True):
            stream.flush()
            each += stream.receive(0.0)
    assert heard == [[Output(1, line) for line in lines], [Say(line) for line in lines]]
    assert wishes[0] is False  # the first line was taken at once
    assert (True in wishes, wishes[-1]) == (True, False)
    agent.close()
    keeper.close()


@pytest.mark.parametrize("text", ["\udcff\udc80", "\ud800", "\x00\x1b[31m\r\n\u2028", "é" * 100, "x" * 5_000_000])
def test_any_text_survives(text: str) -> None:
    """Workers write bytes, not UTF-8; and nobody promises that they are few."""
    one, other = socket.socketpair()
    sender = Stream(one.fileno(), os.dup(one.detach()), ToKeeper)
    receiver = Stream(other.fileno(), os.dup(other.detach()), ToAgent)
    sender.send(Output(2, text))
    heard: list[object] = []
    while not heard:
        sender.flush()
        heard = receiver.receive(0.0)
    assert heard == [Output(2, text)]
    sender.close()
    receiver.close()


def test_no_time_crosses() -> None:
    """The other host has another clock: whoever receives an event puts its own time on it."""
    read_end, write_end = os.pipe()
    sender = Stream(os.open(os.devnull, os.O_RDONLY), write_end, ToKeeper)
    sender.send(WorkersStarted(123.0, 4))
    data = os.read(read_end, 4096)
    assert b"at" not in data.replace(b"WorkersStarted", b"")
    os.write(write_end, data)
    receiver = Stream(read_end, os.open(os.devnull, os.O_WRONLY), ToAgent)
    assert receiver.receive(5.0) == [WorkersStarted(5.0, 4)]
    sender.close()
    receiver.close()


def test_what_is_sent_to_nobody_is_no_error() -> None:
    """The end of the other side is seen in one place only: where it is read."""
    one, other = socket.socketpair()
    stream = Stream(one.fileno(), os.dup(one.detach()), ToKeeper)
    other.close()
    stream.send(Flushed())
    assert stream.unsent == 0
    with pytest.raises(Broken, match="has ended"):
        stream.receive(0.0)
    stream.close()


def test_a_side_that_writes_without_a_pause_holds_nobody(wire: tuple[int, Stream]) -> None:
    """`cat /dev/zero` behind a wrong command: one call takes a bounded part, and no line grows for ever."""
    end, stream = wire
    os.set_blocking(end, False)

    def flood() -> None:
        fed = 0
        while fed < 1 << 28:
            try:
                while True:
                    fed += os.write(end, bytes(1 << 16))
            except BlockingIOError:
                assert stream.receive(0.0) == []

    with pytest.raises(Broken, match="no message"):
        flood()


def test_a_line_without_an_end_is_searched_once(wire: tuple[int, Stream]) -> None:
    """A beat that is late by seconds, because garbage is searched again and again, loses the node."""
    end, stream = wire
    os.set_blocking(end, False)
    os.write(end, HELLO)
    assert stream.receive(0.0) == [Hello(VERSION, 1, "h")]

    def fed(size: int, read: Callable[[], object]) -> float:
        """The processor time for so many bytes."""
        begin, left = time.process_time(), size
        while left > 0:
            left -= os.write(end, bytes(min(left, 1 << 16)))
            read()
        return time.process_time() - begin

    plain = fed(1 << 26, lambda: os.read(stream.source, 1 << 16))
    assert fed(1 << 26, lambda: stream.receive(0.0)) < 100 * plain  # searched again and again, it was far over 1,000
    with pytest.raises(Broken, match="no message"):
        fed(1 << 24, lambda: stream.receive(0.0))
