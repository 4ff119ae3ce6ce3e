"""The console, for which the agent never waits: with real pipes, files and threads."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.keeper.output import console as module
from reknit.adapters.keeper.output.console import OUTPUT, WORDS, ConsoleWriter, escaped
from tests.support.waiting import PATIENCE_S, descriptors, until


@pytest.fixture
def ends() -> Iterator[tuple[int, int]]:
    """A pipe: the reader's end, the console."""
    read_end, write_end = os.pipe()
    yield read_end, write_end
    for fd in (read_end, write_end):
        try:
            os.close(fd)
        except OSError:
            pass


def fill(fd: int) -> int:
    """Write until the pipe takes no more; how many bytes it took."""
    os.set_blocking(fd, False)
    size = 0
    try:
        while True:
            size += os.write(fd, b"x" * select.PIPE_BUF)
    except BlockingIOError:
        pass
    os.set_blocking(fd, True)
    return size


def read(fd: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        assert select.select([fd], [], [], PATIENCE_S)[0], f"{wanted!r} did not come, only {seen[-200:]!r}"
        seen += os.read(fd, 1 << 16)
    return seen


@pytest.fixture
def before() -> set[threading.Thread]:
    """The threads that ran before the test."""
    return set(threading.enumerate())


def writers(before: set[threading.Thread]) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in before]


def test_lines_come_in_the_order_in_which_they_were_said(ends: tuple[int, int]) -> None:
    """Decisions are read as a history."""
    console = ConsoleWriter(ends[1])
    for i in range(100):
        console.say(f"line {i}")
    assert console.close(PATIENCE_S)
    assert read(ends[0], b"line 99\n") == b"".join(b"line %d\n" % i for i in range(100))


def test_a_console_that_nobody_reads_holds_nobody_up(ends: tuple[int, int], before: set[threading.Thread]) -> None:
    """An unread pipe once hung the agent in its own words, and its workers lived on."""
    fill(ends[1])
    console = ConsoleWriter(ends[1])
    for i in range(100):
        console.say(f"line {i}")
    assert not console.flush(0.01)
    assert not console.close(0.01)
    until(lambda: not writers(before), "the end of the thread although nobody reads")


def test_what_waits_is_bounded_and_the_newest_lines_are_kept(ends: tuple[int, int]) -> None:
    """A reader who comes late must find out how the job ended, and that lines are missing."""
    size = fill(ends[1])
    console = ConsoleWriter(ends[1])
    count = 2 * WORDS // 100
    for i in range(count):
        console.say(f"{i:099}")
    reader: list[bytes] = []
    thread = threading.Thread(target=lambda: reader.append(read(ends[0], b"%099d\n" % (count - 1))))
    thread.start()
    thread.join()
    assert console.close(PATIENCE_S)
    lines = reader[0][size:].decode().splitlines()
    notes = [line for line in lines if "reknit" in line]
    numbers = [int(line) for line in lines if line not in notes]
    missing = sum(int(note.split()[1]) for note in notes)
    for note in notes:
        assert re.fullmatch(
            r"reknit: (1 line|\d+ lines) could not be written to this console and (is|are) missing here", note
        )
    assert len(numbers) + missing == count
    assert numbers[-1] == count - 1
    assert WORDS - 100 <= 100 * len(numbers) <= WORDS + (1 << 17), "the queue, and what the writer had taken"


def test_output_waits_while_the_console_is_full_and_its_writer_is_told_of_room(ends: tuple[int, int]) -> None:
    """Workers that write are held up, not the memory filled; words of reknit still find room."""
    has_room = threading.Event()
    fill(ends[1])
    console = ConsoleWriter(ends[1], has_room=has_room.set)
    written = 0
    while not console.is_full():
        console.write(b"y" * 999 + b"\n", "worker")
        written += 1
    assert written <= 2 * OUTPUT // 1000, "what is being written counts no more"
    console.say("a word")
    assert not has_room.is_set()
    seen = read(ends[0], b"a word\n")
    assert has_room.wait(PATIENCE_S)
    assert seen.count(b"y" * 999 + b"\n") == written
    assert not console.is_full()
    assert console.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([("a", b"one"), ("a", b" two\n"), ("b", b"x\n")], b"one two\nx\n"),
        ([("a", b"one"), ("b", b"x\n"), ("a", b"two\n")], b"one\nx\ntwo\n"),
        ([("a", b"one"), ("b", b"two"), ("a", b"\n")], b"one\ntwo\n\n"),
        ([("a", b"\r 1%"), ("b", b"\r 2%"), ("a", b"\r 3%")], b"\r 1%\r 2%\r 3%"),
        ([("a", b"1%\r"), ("b", b"x\n")], b"1%\rx\n"),
    ],
)
def test_lines_of_two_sources_are_never_mixed(
    ends: tuple[int, int], words: list[tuple[str, bytes]], seen: bytes
) -> None:
    """A number that is glued to another rank's cannot be read. Progress bars share their line as without reknit."""
    console = ConsoleWriter(ends[1])
    for source, data in words:
        console.write(data, source)
    console.say("END")
    assert console.close(PATIENCE_S)
    is_open = not seen.endswith(b"\n")
    assert read(ends[0], b"END\n") == seen + b"\n" * is_open + b"END\n"


def test_pieces_for_a_pipe_end_with_a_line(ends: tuple[int, int]) -> None:
    """Several processes write to one pipe (srun's nodes, reknit's two processes). Small writes are not torn there."""
    console = ConsoleWriter(ends[1])
    threads = [
        threading.Thread(target=_many, args=(fd, name)) for name, fd in (("a", console), ("b", ConsoleWriter(ends[1])))
    ]
    for thread in threads:
        thread.start()
    seen = b""
    while seen.count(b"END") < 2:
        seen += read(ends[0], b"\n")
    lines = set(seen.splitlines())
    assert lines == {word.encode() * 50 for word in "ab"} | {b"aEND", b"bEND"}
    for thread in threads:
        thread.join()


def _many(console: ConsoleWriter, word: str) -> None:
    for _ in range(2000):
        console.say(word * 50)
    console.say(f"{word}END")
    assert console.close(PATIENCE_S)


def test_a_reader_that_left_is_no_error(ends: tuple[int, int]) -> None:
    """`reknit run … | head`: the job goes on."""
    os.close(ends[0])
    console = ConsoleWriter(ends[1])
    console.say("nobody hears this")
    console.write(b"x\n" * OUTPUT, "worker")
    assert console.flush(PATIENCE_S), "it is gone, and does not wait"
    assert not console.is_full()
    console.close(PATIENCE_S)


def test_a_full_disk_is_told_when_there_is_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole in a log that nothing marks misleads."""
    real, fails = os.write, [True]

    def write(fd: int, data: bytes) -> int:
        if fails and fd == file:
            raise OSError(28, "No space left on device")
        return real(fd, data)

    file = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr(module.os, "write", write)
    console = ConsoleWriter(file)
    console.write(b"a\nb\n", "worker")
    assert console.flush(PATIENCE_S)
    fails.clear()
    console.write(b"c\n", "worker")
    assert console.close(PATIENCE_S)
    os.close(file)
    note = "reknit: 2 lines could not be written to this console and are missing here\n"
    assert (tmp_path / "log").read_text() == note + "c\n"


def test_closing_leaves_nothing_and_a_later_word_is_still_said(
    ends: tuple[int, int], before: set[threading.Thread]
) -> None:
    """A library may close a hundred agents in one process. What says its last line late must not fail."""
    opened = descriptors()
    console = ConsoleWriter(ends[1])
    assert not writers(before), "no word, no thread"
    for word in ("one", "two"):
        console.say(word)
        assert console.close(PATIENCE_S)
        assert not writers(before)
    assert descriptors() == opened
    assert read(ends[0], b"two\n") == b"one\ntwo\n"


def test_a_terminal_that_nobody_reads_holds_nobody_up(before: set[threading.Thread]) -> None:
    """A terminal that was stopped with Ctrl-S has little room at the end, and its mode belongs to the shell, too."""
    master, slave = pty.openpty()
    opened = descriptors()
    console = ConsoleWriter(slave)
    while not console.is_full():
        console.write(b"y" * 99 + b"\n", "worker")
    assert not console.flush(0.01)
    assert os.get_blocking(slave), "what others share is left as it is"
    assert not console.close(0.01)
    until(lambda: not writers(before), "the end of the thread")
    assert descriptors() == opened
    os.close(master)
    os.close(slave)


def test_a_write_that_blocks_for_ever_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, before: set[threading.Thread]
) -> None:
    """A socket may promise room and take nothing. The end of the process does not wait for it."""
    held, entered, real = threading.Event(), threading.Event(), os.write
    reader, socket_ = socket.socketpair()
    ends = (reader.fileno(), socket_.fileno())

    def write(fd: int, data: bytes) -> int:
        if fd == ends[1]:
            entered.set()
            assert held.wait(PATIENCE_S)
        return real(fd, data)

    monkeypatch.setattr(module.os, "write", write)
    console = ConsoleWriter(ends[1])
    console.say("stuck")
    (thread,) = writers(before)
    assert entered.wait(PATIENCE_S)
    assert thread.daemon, "it cannot keep the process alive"
    assert not console.close(0.0)
    console.say("dropped: a second thread must not write beside the first")
    assert writers(before) == [thread]
    held.set()
    thread.join()
    console.say("heard")
    assert console.close(PATIENCE_S)
    seen = read(ends[0], b"heard\n")
    reader.close()
    socket_.close()
    assert b"dropped" not in seen
    assert b"1 line could not be written" in seen


def test_without_a_thread_words_are_still_said(ends: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of processes hits threads, and this is when the message matters. An unread console waits for nothing."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    console = ConsoleWriter(ends[1])
    console.say("heard")
    assert read(ends[0], b"heard\n") == b"heard\n"
    fill(ends[1])
    console.say("lost")
    with pytest.raises(OSError, match="no thread"):
        console.start()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext, ümläut, 漢字", "plain\ttext, ümläut, 漢字"),
        ("\x1b[2J\x1b]0;owned\x07", r"\x1b[2J\x1b]0;owned\x07"),
        ("real\rreknit: the job succeeded", r"real\rreknit: the job succeeded"),
        ("a\nreknit: b", r"a\nreknit: b"),
        ("\x9b31m\x00\x7f", r"\x9b31m\x00\x7f"),
        ("\u202egnirts\u2028", r"\u202egnirts\u2028"),
    ],
)
def test_a_line_cannot_drive_the_terminal(line: str, shown: str) -> None:
    """An exception's text comes from another node: no colours, no cursor, no second line in reknit's name."""
    assert escaped(line) == shown


def test_what_is_said_is_escaped(ends: tuple[int, int]) -> None:
    """One place for all lines, so that no line is forgotten; and a line always ends."""
    console = ConsoleWriter(ends[1])
    console.say("\x1b[2J\udc80")
    assert console.close(PATIENCE_S)
    assert read(ends[0], b"\n") == b"\\x1b[2J\\udc80\n"
