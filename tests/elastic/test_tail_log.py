"""Showing log files while they grow."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reknit.elastic.multiprocessing.tail_log import TailLog, tail_logfile
from tests.support.leaks import nothing_left
from tests.support.waiting import until


def torchs(lines: dict[int, str], folder: Path) -> list[str]:
    """What torch's TailLog shows of files with these texts."""
    from torch.distributed.elastic.multiprocessing.tail_log import TailLog as Torchs

    return shown_by(Torchs, lines, folder)


def shown_by(make: Callable[..., TailLog], texts: dict[int, str], folder: Path) -> list[str]:
    """The lines that a tail shows of finished files, sorted."""
    files = {at: str(folder / f"{at}.log") for at in texts}
    for at, text in texts.items():
        (folder / f"{at}.log").write_bytes(text.encode("utf-8", "surrogateescape"))
    dst = io.StringIO()
    make("trainer", files, dst, {1: "[one]"}, 0.001).start().stop()
    return sorted(dst.getvalue().split("\n"))


@pytest.mark.parametrize(
    "texts",
    [
        {0: "a\nb\n", 1: "c\n"},
        {0: "", 1: "\n\n"},
        {0: "dos\r\nbar 1\rbar 2\r\nend\n"},
        {0: "umlaut ü\n", 1: "broken \udcff byte\n"},
        {0: "x" * 70_000 + "ü\n"},
        {0: "no end"},
    ],
    ids=["two files", "empty lines", "progress", "bytes", "long", "no end"],
)
def test_shows_what_torch_shows(tmp_path: Path, texts: dict[int, str]) -> None:
    """Prefixes, progress bars and bytes that are not UTF-8: whoever reads the console finds what torch would show."""
    with nothing_left():
        ours = shown_by(TailLog, texts, tmp_path)
    assert ours == torchs(texts, tmp_path)


def test_a_line_is_shown_while_the_worker_runs_and_only_when_it_is_whole(tmp_path: Path) -> None:
    """Half a line with a prefix in its middle cannot be read."""
    path = tmp_path / "log"
    dst = io.StringIO()
    with nothing_left():
        tail = TailLog("t", {0: str(path)}, dst, interval_sec=0.001).start()
        with path.open("w", buffering=1) as file:
            file.write("first\nsec")
            file.flush()
            until(lambda: "first" in dst.getvalue(), "the first line")
            file.write("ond\n")
            until(lambda: "second" in dst.getvalue(), "the second line")
        assert not tail.stopped()
        tail.stop()
        tail.stop()
    assert tail.stopped()
    assert dst.getvalue() == "[t0]:first\n[t0]:second\n"


def test_a_file_that_never_comes_holds_nobody_up() -> None:
    """The worker may have failed before it opened its file."""
    with nothing_left():
        TailLog("t", {0: "/nowhere/log"}, io.StringIO(), interval_sec=0.001).start().stop()


def test_a_worker_that_goes_on_writing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """A daemon of a worker keeps the file open. torch's tail then reads for ever."""
    path = tmp_path / "log"
    is_over = threading.Event()

    def writes() -> None:
        with path.open("w", buffering=1) as file:
            while not is_over.is_set():
                file.write("more\n")

    writer = threading.Thread(target=writes)
    writer.start()
    dst = io.StringIO()
    tail = TailLog("t", {0: str(path)}, dst, interval_sec=0.001).start()
    until(dst.getvalue, "a line")
    tail.stop()
    is_over.set()
    writer.join()
    assert dst.getvalue().endswith("more\n") or dst.getvalue().endswith("more")


@pytest.mark.parametrize(("files", "dst"), [({}, io.StringIO()), ({0: os.devnull}, io.StringIO()), ({0: "x"}, None)])
def test_without_anything_to_show_there_is_no_thread(files: dict[int, str], dst: io.StringIO | None) -> None:
    """Most workers are not teed, and a program under pythonw has no stdout."""
    before = threading.active_count()
    tail = TailLog("t", files, dst).start()
    assert threading.active_count() == before
    tail.stop()


def test_a_console_that_is_closed_ends_the_tail_with_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The job goes on, and the files have everything."""
    path = tmp_path / "log"
    path.write_text("line\n")
    dst = io.StringIO()
    dst.close()
    with nothing_left():
        TailLog("t", {0: str(path)}, dst, interval_sec=0.001).start().stop()
    assert "the logs of t are not shown any more" in caplog.text


def test_a_console_that_takes_nothing_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pager that nobody reads. The lines are in the file."""
    from reknit.elastic.multiprocessing import tail_log

    monkeypatch.setattr(tail_log, "END_S", 0.01)
    is_read = threading.Event()

    class Full(io.StringIO):
        def write(self, text: str, /) -> int:
            is_read.wait()
            return len(text)

    path = tmp_path / "log"
    path.write_text("line\n")
    with nothing_left():
        TailLog("t", {0: str(path)}, Full(), interval_sec=0.001).start().stop()
        assert "takes no more lines of t" in caplog.text
        is_read.set()


def test_a_filter_chooses_lines(tmp_path: Path) -> None:
    """`duplicate_stdout_filters` is made of this."""
    path = tmp_path / "log"
    path.write_text("keep 1\ndrop\nkeep 2\n")
    dst = io.StringIO()
    finished = threading.Event()
    finished.set()
    tail_logfile("h:", str(path), dst, finished, 0.001, lambda line: "keep" in line)
    assert dst.getvalue() == "h:keep 1\nh:keep 2\n"
