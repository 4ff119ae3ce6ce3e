"""Why a worker failed, as the worker itself tells: in torchelastic's error file, or in the traceback on its stderr.

Reading never raises. A worker may die while it writes the file, or may write anything into it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Not imported otherwise: a worker that records its error imports this file, and should not pay for the core.
    from typing import Any

    from reknit.core.job.workers import WorkerFailure

_LARGEST_FILE = 4 << 20
"""Upper bound on an error file, in bytes."""
_LONGEST_MESSAGE = 4_000
_LONGEST_TRACEBACK = 32_000
"""Upper bounds on a message and a traceback, in bytes of their JSON. Both go into the journal, which every agent
reads."""


def explain(path: str, lines: Sequence[str]) -> tuple[str, str]:
    """Message and traceback of a failed worker. Both are empty if none are known.

    `path`: the worker's error file. It is used if it can be understood. `lines`: the end of the worker's stderr. They
    are used otherwise.
    """
    message, traceback, sound = _parse(path)
    if sound:
        return message, traceback
    told = from_stderr(lines)
    return told if any(told) else (message, "")


def read(path: str) -> tuple[str, str]:
    """Message and traceback from a torchelastic error file. Both are empty if there is no file. If the file cannot be
    understood, the message says so."""
    message, traceback, _ = _parse(path)
    return message, traceback


def _parse(path: str) -> tuple[str, str, bool]:
    found, why = document(path)
    if found is None:
        return why, "", False
    message, traceback = _told(found)
    return _shorten(message, _LONGEST_MESSAGE), _shorten(traceback, _LONGEST_TRACEBACK), True


def document(path: str) -> tuple[dict[str, Any] | None, str]:
    """The whole content of a torchelastic error file. `document["message"]` is a text or an object. None: there is no
    such file, or it cannot be understood. In the second case the text says why."""
    try:
        raw = _contents(path)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        return None, f"the error file {path} cannot be read: {cause}"
    import json

    try:
        # Bytes that are not UTF-8 are shown as escapes.
        found = json.loads(raw.decode("utf-8", "backslashreplace"))
    except (ValueError, RecursionError) as error:
        why = "it is empty" if not raw else "it is too large" if len(raw) > _LARGEST_FILE else str(error)
        return None, f"the error file {path} cannot be understood: {_clean(why)}"
    if not _is_torchelastics(found):
        return None, f"the error file {path} cannot be understood: it is not of torchelastic's form"
    return found, ""


def _contents(path: str) -> bytes:
    if not path:
        raise FileNotFoundError
    # With O_NONBLOCK, because the worker may have put a FIFO there, and an open would wait for its writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        parts, left = [], _LARGEST_FILE + 1
        while left > 0 and (part := os.read(fd, min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def _is_torchelastics(document: object) -> bool:
    """`{"message": {"message": text, "extraInfo": {"py_callstack": text}}}`, or the older `{"message": text}`."""
    message = document.get("message") if isinstance(document, dict) else None
    return isinstance(message, str) or (isinstance(message, dict) and any(isinstance(t, str) for t in _texts(message)))


def _texts(message: dict[str, Any]) -> tuple[object, object]:
    extra = message.get("extraInfo")
    return message.get("message"), extra.get("py_callstack") if isinstance(extra, dict) else None


def _told(document: dict[str, Any]) -> tuple[str, str]:
    """Message and traceback."""
    message = document["message"]
    text, stack = (message, None) if isinstance(message, str) else _texts(message)
    return text if isinstance(text, str) else "", stack if isinstance(stack, str) else ""


def _shorten(text: str, longest: int) -> str:
    import json

    text = _clean(text)
    if len(text) <= longest and len(json.dumps(text)) <= longest + len('""'):
        return text
    half = longest // 2
    while len(json.dumps(text[:half] + text[-half:])) > longest:
        half -= max(1, half // 8)  # a character may take twelve bytes as JSON
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def shorten_stacks(text: str) -> str:
    """The stacks of a worker, shortened as a traceback is."""
    return _shorten(text, _LONGEST_TRACEBACK)


def _clean(text: str) -> str:
    """The text without lone surrogates. JSON can hold them and UTF-8 cannot."""
    return text.encode("utf-8", "backslashreplace").decode()


def write(path: str, failure: WorkerFailure, exitcode: int) -> bool:
    """Write `failure` as torchelastic's error file, for the program that runs this agent. False if that fails."""
    return write_document(path, document_of(failure, exitcode))


def document_of(failure: WorkerFailure, exitcode: int) -> dict[str, Any]:
    """`failure` as the content of torchelastic's error file. `exitcode`: 0 is left out."""
    import time

    text = failure.message
    if failure.cause is not None:
        from reknit.core.text.describe import how_text

        text = how_text(failure)
    message: dict[str, object] = {
        "message": text or f"worker of rank {failure.rank} failed with exit code {failure.exitcode}",
        "extraInfo": {"py_callstack": failure.traceback, "timestamp": str(int(time.time()))},
    }
    if exitcode:
        message["errorCode"] = exitcode
    return {"message": message}


def write_document(path: str, document: dict[str, Any]) -> bool:
    """Write an error file. A reader sees the whole file or none. False if that fails."""
    import json

    beside = f"{path}.{os.getpid()}"
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe is not to be replaced by a file
            with open(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w", encoding="utf-8") as special:
                json.dump(document, special)
            return True
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump(document, file)
        os.replace(beside, path)
    except (OSError, TypeError, ValueError):
        try:
            os.unlink(beside)
        except (OSError, ValueError):
            pass  # the file was not made
        return False
    return True


def from_stderr(lines: Sequence[str]) -> tuple[str, str]:
    """Message and traceback of the last exception on a worker's stderr. The worker has probably died of it."""
    from .tracebacks import last_traceback

    message, traceback = last_traceback(lines)
    return _shorten(message, _LONGEST_MESSAGE), _shorten(traceback, _LONGEST_TRACEBACK)
