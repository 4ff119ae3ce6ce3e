"""The `reknit` command: one module per verb. Imports nothing before it knows which."""

from __future__ import annotations

import os
import sys

_HELP = """\
usage: reknit run [options] script [script arguments]
       reknit run --help
       reknit --version

reknit launches the workers of a PyTorch job, watches them, and knits the group together again when one fails.
It takes torchrun's options.
"""


def main() -> int:
    argv = sys.argv[1:]
    if sys.platform == "win32":
        print("reknit: Windows is not supported; WSL is", file=sys.stderr)
        return 1
    verb = argv[0] if argv else "--help"
    if verb == "run":
        _run(argv[1:])
    elif verb in ("--version", "-V"):
        from reknit import __version__

        _show(f"reknit {__version__}\n")
    elif verb in ("--help", "-h"):
        _show(_HELP)
    else:
        advice = f"did you mean: reknit run {verb}?" if os.path.exists(verb) else "see reknit --help"
        print(f"reknit: {verb} is no command; {advice}", file=sys.stderr)
        return 2
    return 0


def _show(text: str) -> None:
    try:
        os.write(1, text.encode())
    except OSError:
        pass  # nobody reads it


def _run(argv: list[str]) -> None:
    import gc
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # An early Ctrl-C ends us like any other program, without a traceback of what it interrupted.
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    # What is imported stays: the collector would walk it again and again while nothing is garbage.
    gc.disable()
    from reknit.adapters.warden import guard

    guard(lambda life_line: _as_agent(argv, life_line))


def _as_agent(argv: list[str], life_line: int) -> int:
    from .run import run

    return run(argv, life_line)
