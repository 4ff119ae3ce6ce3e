"""The `reknit` command. There is one module per verb, and only that of the given verb is imported."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_HELP = """\
usage: reknit run [options] SCRIPT [script arguments]
       reknit COMMAND --help
       reknit --version

reknit starts the worker processes of a PyTorch job, watches them, and starts all of them again when one fails.
It takes torchrun's options. If it is called by the name torchrun, it does what `reknit run` does.

  run         start the workers of this node
  doctor      look for what would make a job fail on this host
  status      show what the jobs on this host do now
  stacks      show where the workers on this host stand in their programs
  explain     tell what has become of a job, and why
  timeline    draw what each node of a job did when
  replay      check that this version decides as the agents of a job have decided
  simulate    play weeks of a job on a cluster in seconds, and say what its failures cost
  prune       remove what jobs with several nodes have left in etcd or in a shared folder
  completion  write a script that completes commands and options in a shell, or the manual page
"""
VERBS = ("run", "doctor", "status", "stacks", "explain", "timeline", "replay", "simulate", "prune", "completion")
"""Each has a module with a function of that name, which gets the arguments and returns the exit status."""
_KEEPER_HELP = """\
usage: reknit keeper

Not for people. It starts and ends the workers of an agent on another host, which gives orders over stdin and stdout.
See docs/embedding.md#keeper.
"""


def main() -> int:
    argv = sys.argv[1:]
    if sys.platform == "win32":
        print("reknit: Windows is not supported; WSL is", file=sys.stderr)
        return 1
    if os.path.basename(sys.argv[0]) == "torchrun":
        argv = ["run", *argv]  # a link with that name serves scripts that call torchrun and cannot be changed
    if not argv:
        _show(_HELP, 2)
        return 2
    verb = argv[0]
    if verb in VERBS:
        _run(verb, argv[1:])
    elif verb == "keeper":  # not for users: adapters/keeper/remote/command.py calls it on another host
        if len(argv) > 1:
            _show(_KEEPER_HELP)
            return 0 if argv[1] in ("--help", "-h") else 2
        from reknit.adapters.keeper.remote.command import be_one

        be_one()
    elif verb in ("--version", "-V"):
        from reknit.app.version import __version__

        _show(f"reknit {__version__}\n")
    elif verb in ("--help", "-h"):
        _show(_HELP)
    else:
        advice = f"did you mean: reknit run {verb}?" if os.path.exists(verb) else "see reknit --help"
        print(f"reknit: {verb} is no command; {advice}", file=sys.stderr)
        return 2
    return 0


def _show(text: str, fd: int = 1) -> None:
    try:
        os.write(fd, text.encode())
    except OSError:
        pass  # nobody reads it


def _run(verb: str, argv: list[str]) -> NoReturn:
    """Run the verb, and end the process. Only an import of the verb can raise an error here."""
    try:
        status = _status(verb, argv)
    except Exception as error:
        status = _give_up(error)
    # `os._exit` leaves out what the interpreter does at its end. That takes 4 to 7 ms, and may wait for a thread that
    # hangs in a write.
    os._exit(status & 0xFF)


def _give_up(error: Exception) -> int:
    """A limit of the machine gives one line and status 71. Any other error is a bug, and is raised again."""
    try:
        from reknit.app.limits import limit_text

        line = limit_text(error)
    except OSError as another:  # too few descriptors even for that import
        line = str(another.strerror)
    if line is None:
        raise error
    try:
        os.write(2, f"reknit: exit status 71: {line}\n".encode(errors="backslashreplace"))
    except OSError:
        pass  # nobody reads stderr
    return 71


def _status(verb: str, argv: list[str]) -> int:
    import gc
    import signal

    from reknit.adapters.keeper.process.boot import open_standard

    open_standard()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Before the agent takes signals, Ctrl-C ends this process like any other program, without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Imported modules stay in use. The collector would look through them again and again and find no garbage.
    gc.disable()
    from importlib import import_module

    module = import_module(f"{__package__}.{verb}")
    return int(getattr(module, verb)(argv))
