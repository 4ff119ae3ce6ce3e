"""What the workers of an agent are forked from."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.adapters.keeper.protocol.wire import Warm
from reknit.adapters.keeper.zygote import learned
from reknit.adapters.keeper.zygote.commandline import parts_of
from reknit.app.settings import Settings

if TYPE_CHECKING:
    from reknit.adapters.runtime.ports import Workers

LIKELY = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
"""What most scripts with torch import. The first optimizer of a process imports the last one."""


def warm_up(workers: Workers, settings: Settings, environ: Mapping[str, str]) -> None:
    """Have the keeper make a zygote, if the settings ask for one. To be called when no process of an earlier agent is
    left. `environ`: the variables with which the workers' environment begins."""
    from reknit.adapters.keeper.client.keeper_client import KeeperClient

    if isinstance(workers, KeeperClient) and (warm := _warm(settings, environ)) is not None:
        workers.warm_up(warm)


def _warm(settings: Settings, environ: Mapping[str, str]) -> Warm | None:
    names = settings.warm if isinstance(settings.warm, tuple) else ()
    if settings.function is not None:
        if settings.start_method != "forkserver" or sys.platform != "linux":
            return None
        from reknit.adapters.keeper.client.function_workers import warm_of_functions

        warm = warm_of_functions({str(getattr(settings.function, "__module__", ""))})
        return evolve(warm, modules=(*names, *warm.modules), is_verbose=settings.verbose)
    if not settings.warm:
        return None
    if names:
        return Warm(settings.command, modules=names, waits=True, is_verbose=settings.verbose)
    parts = parts_of(settings.command)
    return Warm(
        settings.command,
        likely=LIKELY,
        memory=learned.file_of(parts, settings.command[0], working_folder(), environ),
        program=learned.program_of(parts, working_folder()),
        is_verbose=settings.verbose,
    )
