"""The health check server of an agent. Imported only if one is asked for.

The server is started after the keeper, because the command line forks its keeper while it has one thread (rule 1 of the
wiring). A server that cannot be started is one line for the operator, and the job goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from attrs import evolve

from reknit.adapters.keeper.client.keeper_client import KeeperClient
from reknit.adapters.observe.http import Page, PageServer
from reknit.adapters.observe.metrics import MetricsObserver, Processes, no_processes
from reknit.adapters.observe.pages import Pages, RoundTrips
from reknit.app.input.readers import whole
from reknit.app.settings import HealthCheck
from reknit.app.version import __version__
from reknit.core.agent.agent import Agent

from .surroundings import Wired

TIMEOUT_S = 60.0


def health_check(text: str) -> HealthCheck:
    """The value of the variable: PORT, or HOST:PORT. Raises `ValueError`, whose text says what is expected."""
    host, colon, port = text.strip().rpartition(":")
    number = whole(0, 65535)(port)
    host = host.strip("[]")
    if not colon or host == "localhost":
        return HealthCheck(number)
    try:
        return HealthCheck(number, host)
    except ValueError:
        raise ValueError("PORT or HOST:PORT with a numeric address expected, for example 0.0.0.0:8080") from None


def serve(health: HealthCheck, run_id: str, wired: Wired, command: Sequence[str] = ()) -> None:
    """Start the server of this agent, and close it with the wiring. To be called before the agent begins."""
    pages, round_trips = observe(wired, health.timeout_s, run_id, _kept(wired), command)
    server, note = listen(health.host, health.port, pages)
    wired.notes = [*wired.notes, note]
    if server is None:
        return
    close = wired.close

    def close_all() -> None:
        round_trips.release()
        server.close()
        close()

    wired.close = close_all


def observe(
    wired: Wired, timeout_s: float, run_id: str, processes: Processes, command: Sequence[str] = ()
) -> tuple[Mapping[str, Page], RoundTrips]:
    """Have the agent observed. `command`: the command line of the workers. Returns the pages that a server can show,
    and what /healthz waits for."""
    ports = wired.ports
    round_trips = RoundTrips(ports.clock, ports.requests)
    about = {"version": __version__, "pid": os.getpid(), "began": round(time.time(), 3), "command": [*command]}
    watch = MetricsObserver(Agent(wired.spec), ports.clock.now())
    wired.ports = evolve(ports, requests=round_trips)
    wired.observers += [watch, round_trips]
    pages = Pages(
        round_trips, watch, ports.clock.now, timeout_s=timeout_s, run_id=run_id, about=about, processes=processes
    )
    return pages.by_path(), round_trips


def listen(host: str, port: int, pages: Mapping[str, Page]) -> tuple[PageServer | None, str]:
    """Start a server. Returns it, and a line for the operator. None: there is none, and the line says why."""
    failed = f"no health check server at {host}:{port}"
    try:
        server = PageServer(host, port, pages)
    except (OSError, OverflowError, UnicodeError) as error:  # the last two: a program has given it nonsense
        why = getattr(error, "strerror", None) or error
        return None, f"{failed}: {why}; the job goes on without it"
    try:
        server.start()
    except RuntimeError as error:  # how Python says that no further thread can be started
        server.close()
        return None, f"{failed}: {error}; the job goes on without it"
    return server, f"health check server: {server.url} ({', '.join(pages)})"


def _kept(wired: Wired) -> Processes:
    """The workers that the keeper holds. If a program holds them itself, they are not known."""
    keeper = wired.ports.workers
    if not isinstance(keeper, KeeperClient):
        return no_processes
    return lambda: (keeper.pid, keeper.told.latest)
