"""The wiring: chooses and makes the adapters of one agent.

1. The keeper is started before anything that has a thread, because the command line forks it.
2. The order of the end: (1) the health check server, (2) the workers, (3) the journal, (4) the store.
3. Nothing here handles a signal, writes `os.environ` or waits for a console.
"""

from __future__ import annotations

from reknit.app.settings import Settings

from .one_node import wire_one
from .surroundings import Surroundings, Wired


def wire(settings: Settings, world: Surroundings, nonce: str) -> Wired:
    """Make the ports of an agent. `nonce`: unique to this agent. May wait some seconds for the store of several nodes.
    Raises `Prevented` and `CannotStart`."""
    if settings.meeting is not None:
        from .several_nodes import wire_several

        wired = wire_several(settings, settings.meeting, world, nonce)
    else:
        wired = wire_one(settings, world, nonce)
    if settings.health is not None:
        try:
            from .health import serve

            serve(settings.health, settings.run_id, wired, settings.command)
        except BaseException:  # for example an import that finds no free descriptor
            wired.close()
            raise
    if settings.trace:
        try:
            from .tracing import trace

            trace(settings, world, wired, nonce)
        except BaseException:
            wired.close()
            raise
    return wired
