"""The counterpart of `torch.distributed.elastic.agent.server.health_check_server`.

As in torch, this server is a place for a program's own: nothing listens on the port yet.
"""

from __future__ import annotations

from collections.abc import Callable

from ...utils.logging import get_logger

__all__ = ["HealthCheckServer", "create_healthcheck_server"]

log = get_logger(__name__)


class HealthCheckServer:
    """Tells a supervisor whether the agent lives. A subclass serves this on a port."""

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        """`alive_callback`: returns when the agent has last made progress, in seconds since 1970. `port`: where the
        server listens. `timeout`: an agent that has made no progress for so many seconds is taken for dead."""
        self._alive_callback = alive_callback
        self._port = port
        self._timeout = timeout

    @property
    def alive_callback(self) -> Callable[[], int]:
        return self._alive_callback

    def start(self) -> None:
        """Says in the log that there is no server."""
        log.warning("no health check is served on port %s: reknit has none yet", self._port)

    def stop(self) -> None:
        """Does nothing: nothing was started."""


def create_healthcheck_server(alive_callback: Callable[[], int], port: int, timeout: int) -> HealthCheckServer:
    """Make the health check server of an agent. A program puts its own function in this place. Arguments are those of
    `HealthCheckServer`."""
    return HealthCheckServer(alive_callback, port, timeout)
