"""Showing log files while they grow. The counterpart of `torch.distributed.elastic.multiprocessing.tail_log`.

1. A line is shown when it is complete. A line without an end is shown when the tail is stopped. Each state of a
   progress bar, which ends with a carriage return, is a line.
2. A tail that is stopped shows what the files hold at that moment, and no more. Otherwise a process that goes on
   writing would keep it busy for ever.
3. All files of a `TailLog` share one thread.
"""

from __future__ import annotations

import os
from codecs import getincrementaldecoder
from collections.abc import Callable, Mapping
from io import IncrementalNewlineDecoder
from logging import getLogger
from threading import Event
from typing import TextIO

from reknit.adapters.runtime.threads import Thread

__all__ = ["TailLog", "tail_logfile"]

_logger = getLogger(__name__)

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 20
"""Characters. A longer line is shown in parts."""
END_S = 5.0
"""Time for the last lines to be shown. After that the thread is left behind: the console takes nothing. Seconds."""

Filter = Callable[[str], bool]


class _File:
    """One log file, and how its lines are shown."""

    def __init__(self, header: str, path: str, dst: TextIO, line_filter: Filter | None) -> None:
        self._header = header
        self._path = path
        self._dst = dst
        self._filter = line_filter
        self._fd = -1
        self._read = 0
        """Bytes that were read so far."""
        self._decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("replace"), translate=True)
        self._rest = ""
        """The beginning of a line whose end is not written yet."""

    def show(self, *, is_last: bool = False) -> None:
        """Show the complete lines that have come. `is_last`: show the line without an end, too."""
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, os.O_RDONLY)
            except FileNotFoundError:
                return  # the worker has not made it yet
        end = os.fstat(self._fd).st_size
        while self._read < end and (data := os.pread(self._fd, min(_CHUNK, end - self._read), self._read)):
            self._read += len(data)
            self._take(self._decoder.decode(data))
        if is_last:
            self._take(self._decoder.decode(b"", final=True))
            self._show_rest()

    def _take(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._write(line + "\n")
        if len(self._rest) > _LONGEST_LINE:
            self._show_rest()

    def _show_rest(self) -> None:
        if self._rest:
            self._write(self._rest)
            self._rest = ""

    def _write(self, line: str) -> None:
        if self._filter is None or self._filter(line):
            self._dst.write(self._header + line)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def tail_logfile(
    header: str,
    file: str,
    dst: TextIO,
    finished: Event,
    interval_sec: float,
    log_line_filter: Filter | None = None,
) -> None:
    """Show the lines of one file until `finished` is set, and then what is left.

    `header`: a text before each line. `dst`: where lines go. `interval_sec`: the pause between two looks.
    `log_line_filter`: tells whether a line is shown. None: all are.
    """
    _tail([_File(header, file, dst, log_line_filter)], dst, finished, interval_sec)


def _tail(files: list[_File], dst: TextIO, finished: Event, interval_sec: float) -> None:
    try:
        is_last = False
        while not is_last:
            is_last = finished.wait(interval_sec)  # before the look: what was written until then is shown
            for file in files:
                file.show(is_last=is_last)
            dst.flush()
    finally:
        for file in files:
            file.close()


class TailLog:
    """Shows lines of log files, each with a header such as `[trainer0]:`, between `start` and `stop`.

    The files need not exist yet. Lines of two files come in no certain order.
    """

    def __init__(
        self,
        name: str,
        log_files: Mapping[int, str],
        dst: TextIO | None,
        log_line_prefixes: Mapping[int, str] | None = None,
        interval_sec: float = 0.1,
        log_line_filter: Filter | None = None,
    ) -> None:
        """`name`: the stem of the header.
        `log_files`: paths by index, which the header shows. /dev/null is no file.
        `dst`: where lines go. None: nowhere.
        `log_line_prefixes`: headers by index, in place of the default.
        `interval_sec`: the pause between two looks at the files.
        `log_line_filter`: tells whether a line is shown. None: all are.
        """
        self._name = name
        self._dst = dst
        self._log_files = {at: path for at, path in log_files.items() if path != os.devnull}
        self._prefixes = log_line_prefixes or {}
        self._interval_sec = interval_sec
        self._filter = log_line_filter
        self._finished = Event()
        self._thread: Thread | None = None

    def start(self) -> TailLog:
        """Show lines from now on, in a thread. Raises `RuntimeError` if there is no thread to be had."""
        if self._dst is not None and self._log_files and self._thread is None:
            self._thread = Thread(self._run, self._dst, name=f"TailLog_{self._name}")
            self._thread.start()
        return self

    def _run(self, dst: TextIO) -> None:
        files = [
            _File(self._prefixes.get(at, f"[{self._name}{at}]:"), path, dst, self._filter)
            for at, path in self._log_files.items()
        ]
        try:
            _tail(files, dst, self._finished, self._interval_sec)
        except Exception:
            _logger.exception("the logs of %s are not shown any more", self._name)

    def stop(self) -> None:
        """Show what the files hold now, and end the thread. May be repeated."""
        self._finished.set()
        if self._thread is not None:
            if not self._thread.wait(END_S):
                _logger.warning("the console takes no more lines of %s: the rest is in its log files", self._name)
            self._thread = None

    def stopped(self) -> bool:
        return self._finished.is_set()
