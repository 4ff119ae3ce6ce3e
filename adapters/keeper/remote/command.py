"""Starting a keeper behind a command that reaches another host, such as `ssh`.

The stream is the stdin and stdout of this command. Environment and console are those of the other host.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from reknit.adapters.host.children import pidfd_of
from reknit.adapters.keeper.client.start import Keeping, paths, spawned
from reknit.adapters.keeper.process import boot
from reknit.adapters.keeper.protocol.stream import Stream
from reknit.adapters.keeper.protocol.wire import ToAgent


def by_command(prefix: Sequence[str]) -> Keeping:
    """Start a keeper behind a command. `prefix`: the command line, for example `ssh host reknit keeper`. Raises
    `OSError`."""
    to_keeper = os.pipe()
    try:
        from_keeper = os.pipe()
    except OSError:
        for fd in to_keeper:
            os.close(fd)
        raise
    try:
        actions = [(os.POSIX_SPAWN_DUP2, to_keeper[0], 0), (os.POSIX_SPAWN_DUP2, from_keeper[1], 1)]
        pid = spawned([*prefix], os.environ, actions)
    except BaseException:
        os.close(to_keeper[1])
        os.close(from_keeper[0])
        raise
    finally:
        os.close(to_keeper[0])
        os.close(from_keeper[1])
    return Keeping(Stream(from_keeper[0], to_keeper[1], ToAgent, has_banner=True), pid, pidfd_of(pid))


def be_one() -> NoReturn:
    """Become a keeper whose stream is the stdin and stdout of this process. `reknit keeper` calls this."""
    os.execv(sys.executable, [sys.executable, "-I", "-S", boot.__file__, os.pathsep.join(paths()), "-", "0", "-"])
