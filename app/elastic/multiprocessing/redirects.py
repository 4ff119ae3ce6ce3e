"""Redirecting this process's own stdout and stderr into a file, what C code writes included.

The counterpart of `torch.distributed.elastic.multiprocessing.redirects`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctypes import CDLL

__all__ = ["get_libc", "redirect", "redirect_stderr", "redirect_stdout"]

_DESCRIPTORS = {"stdout": 1, "stderr": 2}


def get_libc() -> CDLL:
    """The C library that this process uses."""
    from ctypes import CDLL  # slow to import, and not needed by contexts

    return CDLL(None)


@contextmanager
def redirect(std: str, to_file: str) -> Iterator[None]:
    """A context in which a stream of this process goes to a file, which is overwritten.

    `std`: "stdout" or "stderr". `to_file`: the path. Its folder must exist.

    Raises `ValueError` for another stream, and `OSError` if the file cannot be opened.
    """
    if std not in _DESCRIPTORS:
        raise ValueError(f"unknown standard stream <{std}>, must be one of {set(_DESCRIPTORS)}")
    fds = _descriptors(std)
    saved: dict[int, int] = {}
    file = os.open(to_file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for fd in fds:
            saved[fd] = os.dup(fd)
        _flush(std)
        for fd in fds:
            os.dup2(file, fd)
        yield
    finally:
        _flush(std)
        for fd, before in saved.items():
            os.dup2(before, fd)
            os.close(before)
        os.close(file)


redirect_stdout = partial(redirect, "stdout")
redirect_stderr = partial(redirect, "stderr")


def _descriptors(std: str) -> list[int]:
    """The descriptors to which Python and C write this stream. They differ if a program, for example a test runner, has
    put another object in the place of `sys.stdout`."""
    try:
        return sorted({_DESCRIPTORS[std], getattr(sys, std).fileno()})
    except (AttributeError, OSError, ValueError):  # the object has no descriptor, as in a notebook, or is closed
        return [_DESCRIPTORS[std]]


def _flush(std: str) -> None:
    get_libc().fflush(None)
    try:
        getattr(sys, std).flush()
    except (AttributeError, OSError, ValueError):
        pass  # there is no such object, or it is closed
