"""Finding a Python traceback in text. Imported when a worker has failed.

What is met in practice: chains (*During handling of…*), exception groups, syntax errors, messages of several lines, the
prefix `[rank3]: ` that torch's own hook puts before each line, and after the real one the noise of a dying interpreter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_HEADER = re.compile(r"^(?P<prefix>\[rank\d+\]: ?)?(  \+ Exception Group )?Traceback \(most recent call last\):")
_RANK = re.compile(r"^\[rank\d+\]: ?")
_FRAME = re.compile(r'^  File ".*", line \d+')
_SYNTAX = re.compile(r"^(SyntaxError|IndentationError|TabError)\b")
_TYPE = re.compile(r"^[^\W\d][\w.]*(: .*|:)?$")
_LINK = ("During handling of the above exception", "The above exception was the direct cause")
_LOG_LINE = re.compile(r"^\[|^[IWEF]\d{4} |^\d{4}-\d\d-\d\d|^[A-Z]+:|^Exception ignored in|^\S*Warning: ")
_MOST_LINES = 40


def last_traceback(lines: Sequence[str]) -> tuple[str, str]:
    """Message (`Type: text`) of the last traceback in `lines`, and all of its chain. Both empty if there is none."""
    start, prefix = _last_header(lines)
    if start is None:
        return _headless(lines)
    body = _without(prefix, lines[start:])
    message_at = _end_of_frames(body)
    end = _end_of_message(body, message_at, strict=not prefix)
    first = _start_of_chain(lines, start)
    chain = [_RANK.sub("", line) for line in lines[first:start]] + body[:end]
    return _message(body[message_at:end]), "\n".join(chain) + "\n"


def _last_header(lines: Sequence[str]) -> tuple[int | None, str]:
    """The last header, rather one that is not about an ignored exception (those come while the interpreter dies)."""
    ignored: tuple[int | None, str] = (None, "")
    for at in range(len(lines) - 1, -1, -1):
        if found := _HEADER.match(lines[at]):
            here = at, found["prefix"] or ""
            if at == 0 or not _RANK.sub("", lines[at - 1]).startswith("Exception ignored in"):
                return here
            if ignored[0] is None:
                ignored = here
    return ignored


def _without(prefix: str, lines: Sequence[str]) -> list[str]:
    """The lines of one block. With torch's prefix its end is certain: the first line without it."""
    if not prefix:
        return list(lines)
    block = []
    for line in lines:
        if not line.startswith(prefix) and line != prefix.rstrip():
            break  # torch's own warnings have `[rank3]:[W…`
        block.append(line[len(prefix) :])
    return block


def _end_of_frames(body: Sequence[str]) -> int:
    """Where the frames end and the exception's own line is. In a group that line is after a bar."""
    bar = "  | " if "Exception Group" in body[0] else ""
    for at, line in enumerate(body[1:], 1):
        inner = line.removeprefix(bar) if bar else line
        if inner and not inner[0].isspace() and (not bar or line.startswith(bar)):
            return at
    return len(body)


def _end_of_message(body: Sequence[str], at: int, *, strict: bool) -> int:
    """Where the exception's text ends. Without a prefix nothing marks it: a blank line or a line of a log does."""
    if "Exception Group" in body[0]:
        while at < len(body) and body[at].startswith(("  |", "  +", "    ")):
            at += 1
        return at
    end = min(at + 1, len(body))
    while end < len(body) and end - at < _MOST_LINES:
        line = body[end]
        if strict and (not line.strip() or _LOG_LINE.match(line)):
            break
        end += 1
    while end > at + 1 and not body[end - 1].strip():
        end -= 1
    return end


def _message(lines: Sequence[str]) -> str:
    if lines and lines[0].startswith("  | "):
        return lines[0].removeprefix("  | ")
    return "\n".join(lines)


def _start_of_chain(lines: Sequence[str], start: int) -> int:
    """Back over the exceptions that this one was raised for."""
    while True:
        before = start - 1
        while before >= 0 and not _RANK.sub("", lines[before]).strip():
            before -= 1
        if before < 0 or not _RANK.sub("", lines[before]).startswith(_LINK):
            return start
        earlier = next((at for at in range(before, -1, -1) if _HEADER.match(lines[at])), None)
        if earlier is None:
            return start
        start = earlier


def _headless(lines: Sequence[str]) -> tuple[str, str]:
    """A script that cannot be compiled has no header, a very long traceback may have lost it: look for the frames."""
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return "", ""
    last = frames[-1]
    for at in range(last + 1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace():
            if not _TYPE.match(line):
                return "", ""
            # A syntax error's only frame is its own place; otherwise all frames that are left belong to it.
            first = last if _SYNTAX.match(line) and len(frames) == 1 else frames[0]
            return line, "\n".join(lines[first : at + 1]) + "\n"
    return "", ""
