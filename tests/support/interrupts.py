"""An interrupt as Ctrl-C causes it: a signal whose handler raises KeyboardInterrupt in the main thread."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest


def interrupted(call: Callable[[], object]) -> None:
    """Make a call, which must wait, and interrupt it while it waits."""

    def raises(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, raises)
    # An earlier interrupt would do no harm: it comes in the call at any rate.
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))

    def calls() -> None:
        timer.start()
        call()

    try:
        with pytest.raises(KeyboardInterrupt):
            calls()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def is_interrupted_at(line: int, file: str, call: Callable[[], object]) -> bool:
    """Make a call, and interrupt it before one of the lines that it runs in this file. `line`: which of them. False: it
    runs fewer lines."""
    left = line

    def look(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def interrupted_after(owner: Any, method: str, call: Callable[[], object]) -> None:
    """Make a call, and interrupt it when `method` of the module or class `owner` has done its work."""
    carry_out = getattr(owner, method)

    def carry_out_and_interrupt(*args: Any) -> Any:
        try:
            return carry_out(*args)
        finally:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, method, carry_out_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                call()
    finally:
        signal.signal(signal.SIGINT, before)
