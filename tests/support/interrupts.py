"""An interrupt as Ctrl-C causes it: a signal whose handler raises KeyboardInterrupt in the main thread."""

from __future__ import annotations

import dis
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


_LOOKS = frozenset(
    code
    for name, code in dis.opmap.items()
    if name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD") or name.startswith("POP_JUMP_BACKWARD")
)
"""The instructions after which Python looks for signals. It looks at the beginning of a function as well."""


def is_interrupted_at_look(look: int, call: Callable[[], object]) -> bool:
    """Make a call, and interrupt it at one of the moments at which Python looks for signals. `look`: which of them.
    False: there are fewer. In a callback of the garbage collector Python ignores the interrupt."""
    left = look
    latest: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" or (event == "opcode" and latest.get(frame) in _LOOKS):
            left -= 1
            if left < 0:
                sys.settrace(None)
                for each in latest:
                    each.f_trace = None
                raise KeyboardInterrupt
        if event == "opcode":
            latest[frame] = frame.f_code.co_code[frame.f_lasti]
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


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
