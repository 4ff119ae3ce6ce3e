"""A program of its own: torch's store, served until the agent that started it ends.

Its standard input is the listening socket. Its standard output is a socket to the agent. The server writes one line to
it if it cannot serve. When it reads end-of-file there, the agent is gone, and the server ends.

1. torch's extension module is loaded without `import torch`, in a third of the time and with two thirds of the memory.
   torch does not promise that this works. If it fails, the program starts over and imports torch.
2. The signals that are sent to all processes of a job are blocked here. The agent decides when the store ends.
3. Nothing of reknit is imported here. So it does not matter how the agent's interpreter found the package.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any, NoReturn

_LISTENING, _AGENT = 0, 1
_PUBLIC = "public"
_NO_SERVICE = 69  # sysexits' EX_UNAVAILABLE


def main() -> NoReturn:
    _raise_limit()
    _ask_no_name_server()
    if _PUBLIC in sys.argv[1:]:
        _serve(_store(_public()))
    try:
        store = _store(_quick())
    except BaseException:
        # Start over in a fresh interpreter: the modules that `_quick` has loaded would be in the way of torch's own.
        os.execv(sys.executable, [*sys.orig_argv, _PUBLIC])
    _serve(store)


def _raise_limit() -> None:
    """Allow as many descriptors as the system permits. Each node has two or three connections. A large job needs more
    than the usual limit of 1024."""
    from resource import RLIMIT_NOFILE, getrlimit, setrlimit

    try:
        _, most = getrlimit(RLIMIT_NOFILE)
        setrlimit(RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError):
        pass  # some systems name a limit that they do not grant


def _ask_no_name_server() -> None:
    """Find names in /etc/hosts alone.

    For each connection torch looks up the name of the other end, only to log it. It serves no client meanwhile. With a
    name server that does not answer, a look-up takes 5 s and more.
    """
    from ctypes import CDLL

    try:
        CDLL(None).__nss_configure_lookup(b"hosts", b"files")
    except (AttributeError, OSError):
        pass  # not glibc


def _store(make: Any) -> Any:
    from datetime import timedelta
    from socket import socket

    listening = os.dup(_LISTENING)  # the store closes the descriptor that it is given
    port = socket(fileno=os.dup(_LISTENING)).getsockname()[1]
    return make(
        host_name="127.0.0.1",  # a number, so that its own client asks no resolver
        port=port,
        is_master=True,
        timeout=timedelta(seconds=60),
        wait_for_workers=False,
        master_listen_fd=listening,
        use_libuv=True,
    )


def _serve(store: Any) -> NoReturn:
    """Serve until the agent is gone. torch ends the store with the last reference to it, so this function holds one."""
    while os.read(_AGENT, 1):
        pass
    os._exit(0)


def _quick() -> Any:
    from importlib import machinery, util
    from types import ModuleType

    found = util.find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise ImportError("no torch")
    folder = found.submodule_search_locations[0]
    path = next(p for s in machinery.EXTENSION_SUFFIXES if os.path.exists(p := os.path.join(folder, "_C" + s)))
    # The extension looks for these two modules. Empty ones are enough.
    for name in ("torch", "torch.distributed"):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = [folder]
    spec = util.spec_from_file_location("torch._C", path)
    if spec is None or spec.loader is None:
        raise ImportError("no loader for torch's extension")
    extension: Any = util.module_from_spec(spec)
    sys.modules["torch._C"] = extension
    spec.loader.exec_module(extension)
    extension._c10d_init()
    return extension._distributed_c10d.TCPStore


def _public() -> Any:
    try:
        from torch.distributed import TCPStore
    except BaseException as error:
        _fail(f"torch is needed to host the store (--rdzv-backend=c10d): {_one_line(error)}")
    return TCPStore


def _fail(why: str) -> NoReturn:
    os.write(_AGENT, why.encode(errors="replace"))
    os._exit(_NO_SERVICE)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        _fail(f"torch's store cannot be served: {_one_line(error)}")
