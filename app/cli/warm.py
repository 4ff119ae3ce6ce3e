"""`reknit warm`: what is known of a script's imports, and why some of it is not imported once for all workers."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from reknit.adapters.keeper.common.run_folder import working_folder
from reknit.adapters.keeper.zygote import learned
from reknit.adapters.keeper.zygote.commandline import CommandLine
from reknit.adapters.keeper.zygote.program import is_within
from reknit.app.report import PREFIX, USAGE, write

from .arguments import Table, help_text, parse
from .options import Option, UsageError

_OPTIONS = (
    Option("forget", "forget what is known, so that the next launch learns it anew", group="Options"),
    Option("module", "SCRIPT is a module, run by python -m", short="m", group="Options"),
    Option("help", "this text", short="h", group="Options"),
)
_USAGE = "reknit warm [--forget] SCRIPT"
_TABLE = Table(
    "reknit warm",
    _OPTIONS,
    _USAGE,
    "Show which modules `reknit run --warm SCRIPT` imports once for all workers, and why it leaves others out.",
    "`reknit run --warm` learns what a script imports when its first worker ends well. docs/warm.md explains it.",
)


def warm(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    try:
        parsed = parse(argv, environ, _TABLE)
        if parsed["help"]:
            write(1, help_text(_TABLE))
            return 0
        if not parsed.script or parsed.args:
            raise UsageError(f"one script is needed, after the options; usage: {_USAGE}")
        if not parsed["module"] and not os.path.exists(parsed.script):
            raise UsageError(f"script {parsed.script} does not exist")
        parts = CommandLine((), *((parsed.script, "") if parsed["module"] else ("", parsed.script)))
        python = environ.get("PYTHON_EXEC") or sys.executable
        file = learned.file_of(parts, python, working_folder(), environ)
        lines = _forgotten(file, parsed.script) if parsed["forget"] else _known(file, parsed.script)
        write(1, "".join(f"{line}\n" for line in lines))
    except UsageError as error:
        write(2, f"{PREFIX}{error}\n")
        return USAGE
    return 0


def _forgotten(file: str, script: str) -> Iterator[str]:
    try:
        yield f"{script}: forgotten" if learned.forget(file) else f"{script}: nothing was known"
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}") from None


def _known(file: str, script: str) -> Iterator[str]:
    known = learned.read(file)
    if known is None:
        yield f"{script}: nothing is known yet. `reknit run --warm` learns it when the first worker of a node ends well"
        return
    out = known.left_out
    packages = Counter(_package_of(name) for name in known.modules if not is_within(name, out))
    yield f"{known.program}: imported once for all workers, each with all that it imports:"
    shown = (f"{name} ({count} modules)" if count > 1 else name for name, count in packages.most_common())
    yield "  " + ", ".join(shown)
    importers = [name for name, why in out.items() if why.startswith("imports ")]
    for name in [*out]:
        if name not in importers:
            yield f"  left out: {name} {out[name]}"
    if importers:
        yield f"  left out, because they import what is left out: {', '.join(importers)}"
    if not known.is_checked:
        yield "  the next launch with --warm finds out which of them workers can share"
    yield f"  kept in {file}"


def _package_of(name: str) -> str:
    root = name.partition(".")[0]
    return "Python itself" if root in sys.stdlib_module_names else root
