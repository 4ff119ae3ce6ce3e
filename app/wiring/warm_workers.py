"""What the workers of an agent are forked from."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.keeper.protocol.wire import Warm
from reknit.adapters.keeper.zygote.program import with_usual
from reknit.app.settings import Settings

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Workers


def warm_up(workers: Workers, settings: Settings) -> None:
    """Have the keeper make a zygote, if the settings ask for one. To be called when no process of an earlier agent is
    left."""
    from reknit.adapters.keeper.client.keeper_client import KeeperClient

    if isinstance(workers, KeeperClient) and (warm := _warm(settings)) is not None:
        workers.warm_up(warm)


def _warm(settings: Settings) -> Warm | None:
    names = settings.warm if isinstance(settings.warm, tuple) else ()
    if settings.function is not None:
        if settings.start_method != "forkserver" or sys.platform != "linux":
            return None
        from reknit.adapters.keeper.client.function_workers import warm_of_functions

        warm = warm_of_functions({str(getattr(settings.function, "__module__", ""))})
        return evolve(warm, modules=(*names, *warm.modules), is_verbose=settings.verbose)
    if not settings.warm:
        return None
    return Warm(settings.command, modules=with_usual(names or ("torch",)), is_verbose=settings.verbose)
