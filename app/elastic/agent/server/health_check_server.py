"""The counterpart of `torch.distributed.elastic.agent.server.health_check_server`.

torch's class only says in the log that there is no server. This one serves over HTTP. A program may still put a class
of its own in its place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from reknit.elastic.utils.logging import get_logger

if TYPE_CHECKING:
    from reknit.adapters.observe.http import Page, PageServer, Response

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

log = get_logger(__name__)


class HealthCheckServer:
    """Tells a supervisor whether the agent lives: `/healthz` has status 200 if it does, and else 503.

    A subclass may override `start` and `stop` to serve in another way.
    """

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        """`alive_callback`: returns when the agent has last made progress, in seconds since 1970. It is called in a
        thread of the server. `port`: where the server listens. 0: at a free port, which the log names. `timeout`: an
        agent that has made no progress for so many seconds is taken for dead. torch passes 60."""
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout
        self._server: PageServer | None = None
        self.host = "127.0.0.1"
        """The numeric address at which the server listens. To be set before `start`."""
        self.pages: Mapping[str, Page] = {}
        """Further pages by their paths. To be set before `start`. The agent that makes the server sets its own, and
        with them another /healthz, which asks the agent's loop."""

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback

    @property
    def url(self) -> str:
        """Where the server is reached. Empty: it does not serve."""
        return "" if self._server is None else self._server.url

    def start(self) -> None:
        """Serve, in a thread. If the server cannot listen, the log says why, and nothing is raised. Does nothing if it
        serves already."""
        from reknit.app.wiring.health import listen

        if self._server is not None:
            return
        self._server, note = listen(self.host, self._port, {"/healthz": self._healthz, **self.pages})
        # A warning in both cases: it is the level that is shown, and with port 0 nothing else names the port.
        log.warning("%s", note)

    def stop(self) -> None:
        """Close the server, and wait for the end of its threads. May be repeated."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def _healthz(self, query: Mapping[str, str]) -> Response:
        from reknit.adapters.observe.http import line
        from reknit.adapters.observe.pages import patience_s

        timeout_s = patience_s(query, self._timeout)
        if timeout_s is None:
            return line(400, f"timeout={query['timeout']:.40}: a number of seconds expected")
        silent_s = time.time() - self._alive_callback()
        if silent_s > max(timeout_s, 1):  # the callback returns whole seconds
            return line(503, f"the agent has made no progress for {silent_s:.0f} s")
        return line(200, "ok")


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Make the health check server of an agent. A program puts its own function in this place. Arguments are those of
    `HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout)
