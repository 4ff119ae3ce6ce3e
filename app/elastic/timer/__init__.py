"""The counterpart of `torch.distributed.elastic.timer`: deadlines that workers set for their own work.

    from reknit.elastic import timer

    timer.configure(timer.FileTimerClient(path))       # path: TORCHELASTIC_TIMER_FILE
    with timer.expires(after=60):
        ...                                            # if this takes longer, the worker is killed

torch's own `expires` works as well. The workers get the path if TORCHELASTIC_ENABLE_FILE_TIMER is 1 in the agent's
environment: see docs/watchdog.md#timers. The servers here are for programs that watch processes of their own.
"""

from __future__ import annotations

from typing import Any

from .api import RequestQueue, TimerClient, TimerRequest, TimerServer, configure, expires
from .file_based_local_timer import FileTimerClient, FileTimerRequest, FileTimerServer

__all__ = [
    "FileTimerClient",
    "FileTimerRequest",
    "FileTimerServer",
    "LocalTimerClient",
    "LocalTimerServer",
    "RequestQueue",
    "TimerClient",
    "TimerRequest",
    "TimerServer",
    "configure",
    "expires",
]


def __getattr__(name: str) -> Any:
    if name in ("LocalTimerClient", "LocalTimerServer"):  # torch's own classes, so torch is imported for them alone
        from torch.distributed.elastic.timer import local_timer

        return getattr(local_timer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
