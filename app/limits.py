"""Which errors are limits of the machine and not bugs of reknit: no descriptor, process, thread, memory or disk is
left.
"""

from __future__ import annotations

import errno

_LIMITS = {
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "the whole host has no descriptor left",
    errno.EAGAIN: "raise `ulimit -u`, or the limit of the container's processes",
    errno.ENOMEM: "",
    errno.ENOSPC: "",
    errno.EDQUOT: "",
    errno.ENOBUFS: "",
}
"""What the user can do, by error number."""
_NO_THREAD = "can't start new thread"


def limit_text(error: BaseException) -> str | None:
    """One line for an error that a limit of the machine has caused. None: the error is something else, perhaps a bug.

    The causes of the error count as well. For example, an import that meets a limit raises an ImportError.
    """
    seen: BaseException | None = error
    while seen is not None:
        if text := _limit_text(seen):
            return text
        seen = seen.__cause__ or seen.__context__
    return None


def _limit_text(error: BaseException) -> str | None:
    if isinstance(error, MemoryError):
        return "no memory is left"
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return f"no thread can be started; {_LIMITS[errno.EAGAIN]}"
    if not isinstance(error, OSError) or error.errno not in _LIMITS:
        return None
    where = f": {error.filename}" if isinstance(error.filename, str) else ""
    advice = _LIMITS[error.errno]
    return f"{error.strerror}{where}" + (f"; {advice}" if advice else "")
