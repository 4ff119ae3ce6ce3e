"""The trace of an agent, in the log folder of its run or on this host. Imported only if a trace is wanted."""

from __future__ import annotations

import os
import time

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.observe.trace_folder import Files, Parts, TraceFolder, about_line
from reknit.adapters.observe.trace_place import new_folder, tidy
from reknit.app.report import PREFIX
from reknit.app.settings import Settings
from reknit.app.version import __version__

from .surroundings import Surroundings, Wired


def trace(settings: Settings, world: Surroundings, wired: Wired, nonce: str) -> None:
    """Have the agent traced, and close the trace with the wiring. To be called before the agent begins."""
    workers = wired.ports.workers
    keeper = workers if isinstance(workers, KeeperClient) else None
    command = settings.command if keeper is not None else ()
    about = about_line(settings.run_id, wired.spec.node_id, __version__, command, time.time())
    has_folder = settings.log_dir not in ("", os.devnull) or (
        not settings.log_dir and bool(settings.streams.redirects or settings.streams.tee)
    )

    def make() -> str:
        wired.trace = new_folder(settings.run_id, nonce, keeper.log_dir if keeper is not None and has_folder else "")
        return wired.trace

    def say(line: str) -> None:
        wired.trace = ""  # the line says that the trace has ended too early
        (world.say if keeper is None else keeper.say)(PREFIX + line)

    files: Files = Parts(make)
    if has_folder:
        from reknit.adapters.observe.trace_thread import PartsThread

        files = PartsThread(Parts(make))  # the folder may be on another host
    observer = TraceFolder(about, files, say)
    wired.observers.append(observer)
    close = wired.close

    def close_all() -> None:
        try:
            close()
        finally:
            observer.close()
            tidy()

    wired.close = close_all
