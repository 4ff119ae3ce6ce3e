"""The program of a keeper that is started by exec: `python -I -S boot.py PATHS WIRE AGENT PARCELS`.

1. PATHS is the list of folders from which modules are imported, separated as in the variable PATH.
2. WIRE is the descriptor of the stream to the agent. `-` means that the stream is stdin and stdout.
3. AGENT is the pid of the agent, which is the parent of this process. 0: the agent runs on another host.
4. PARCELS is the descriptor of the socket by which the agent sends open files. `-`: there is none.
5. This program imports reknit only after the paths are set and every other descriptor is closed.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    gc.disable()  # imported modules stay in use, so the collector would find no garbage. `keep` turns it on again
    paths, wire, agent, parcels = sys.argv[1:5]
    # The standard library comes first, as in any program. A module beside reknit must not hide one of its modules.
    sys.path += paths.split(os.pathsep)
    open_standard()
    if wire == "-":
        # The stream must leave 0 and 1 before anything is imported. Otherwise what an import prints would be in it.
        source, sink = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(2, 1)
    else:
        source = int(wire)
        sink = os.dup(source)
        os.set_inheritable(source, False)
    parcels_fd = -1
    if parcels != "-":
        parcels_fd = int(parcels)
        os.set_inheritable(parcels_fd, False)
    close_all_but(source, sink, parcels_fd)

    from reknit.adapters.keeper.process.keeper import keep
    from reknit.adapters.keeper.protocol.stream import Stream
    from reknit.adapters.keeper.protocol.wire import ToKeeper

    keep(Stream(source, sink, ToKeeper), int(agent), has_console=wire != "-", parcels=parcels_fd)


def open_standard() -> None:
    """Open /dev/null in the place of stdin, stdout or stderr where they are closed.

    Otherwise the next files would get the numbers 0 to 2, and whatever any code of this process prints would go there.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)


def close_all_but(*kept: int) -> None:
    """Close every descriptor that was inherited, except 0, 1, 2 and the `kept` ones."""
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # this is the descriptor through which the list was read
    open_standard()  # this comes last, because no descriptor may have been free before


if __name__ == "__main__":
    main()
