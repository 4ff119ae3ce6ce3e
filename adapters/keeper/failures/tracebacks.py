"""Finding a Python traceback in text. This module is imported when a worker has failed.

The output of real workers holds chains of exceptions (*During handling of…*), exception groups, syntax errors and
messages of several lines. torch may put the prefix `[rank3]: ` before each line. The last traceback is not always the
one that matters: an interpreter that ends may write further ones.
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
    """The message (`Type: text`) of the last traceback in `lines`, and the traceback with its whole chain. Both are
    empty if there is no traceback."""
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
    """Line number and prefix of the last header of a traceback. None: there is no header.

    The header of an ignored exception counts only if there is no other. Such exceptions come while the interpreter
    ends.
    """
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
    """The lines of one traceback, without torch's prefix. With a prefix, the traceback ends at the first line without
    it.
    """
    if not prefix:
        return list(lines)
    block = []
    for line in lines:
        if not line.startswith(prefix) and line != prefix.rstrip():
            break  # torch's own warnings have `[rank3]:[W…`
        block.append(line[len(prefix) :])
    return block


def _end_of_frames(body: Sequence[str]) -> int:
    """The index of the exception's own line, which follows the frames. In an exception group this line begins with a
    bar.
    """
    bar = "  | " if "Exception Group" in body[0] else ""
    for at, line in enumerate(body[1:], 1):
        inner = line.removeprefix(bar) if bar else line
        if inner and not inner[0].isspace() and (not bar or line.startswith(bar)):
            return at
    return len(body)


def _end_of_message(body: Sequence[str], at: int, *, strict: bool) -> int:
    """The index after the exception's text. `strict`: the lines had no prefix, so the text is taken to end at a blank
    line or at a line of a log."""
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
    """The index of the first header of the chain that ends with the traceback at `start`."""
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
    """Message and traceback of a traceback without a header. A script that cannot be compiled has no header, and a very
    long traceback may have lost it."""
    frames = [at for at, line in enumerate(lines) if _FRAME.match(line)]
    if not frames:
        return "", ""
    last = frames[-1]
    for at in range(last + 1, len(lines)):
        line = lines[at]
        if line and not line[0].isspace():
            if not _TYPE.match(line):
                return "", ""
            # The only frame of a syntax error is the place of the error. Otherwise all frames that are left belong to
            # the traceback.
            first = last if _SYNTAX.match(line) and len(frames) == 1 else frames[0]
            return line, "\n".join(lines[first : at + 1]) + "\n"
    return "", ""
