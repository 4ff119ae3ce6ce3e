"""`reknit run`: from the command line to the exit status."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from attrs import evolve

from reknit.adapters.keeper.output.console import LAST_WORDS_S, ConsoleWriter
from reknit.adapters.runtime.ports import CannotStart
from reknit.app.limits import limit_text
from reknit.app.report import BUG, LIMIT, PREFIX, USAGE, exit_status, origin, own_origin, write
from reknit.app.wiring.surroundings import Prevented
from reknit.core.agent.commands import Result
from reknit.core.agent.states import WorkerState

from .arguments import RUN, help_text, parse
from .options import UsageError

TABLE = RUN


def run(argv: Sequence[str]) -> int:
    """Run the command until its end. Returns the exit status. A mistake of the user gives one line and no traceback."""
    console = ConsoleWriter(2)  # its lines have no times until the options are known
    try:
        return _run(argv, os.environ, console)
    except UsageError as e:
        console.say(f"{PREFIX}{e}")
        return USAGE
    except Prevented as e:
        console.say(f"{PREFIX}{e}")
        result = Result(WorkerState.FAILED, e.why)
        if line := origin(result):
            console.say(PREFIX + line)
        return exit_status(result)
    except CannotStart as e:
        if e.is_usage:
            console.say(f"{PREFIX}{e}")
            return USAGE
        console.say(f"{PREFIX}exit status {LIMIT}: {e}")
        return LIMIT
    except Exception as e:
        if line := limit_text(e):
            console.say(f"{PREFIX}exit status {LIMIT}: {line}")
            return LIMIT
        from traceback import format_exc

        console.say(f"{PREFIX}this is a bug in reknit; its workers were stopped. Please report:")
        for line in format_exc().splitlines():
            console.say(line)
        console.say(PREFIX + own_origin(BUG))
        return BUG
    finally:
        console.flush(LAST_WORDS_S)


def _run(argv: Sequence[str], environ: Mapping[str, str], console: ConsoleWriter) -> int:
    parsed = parse(argv, environ)
    if parsed["help"] or parsed["help-all"]:
        write(1, help_text(shows_all=parsed["help-all"]))
        return 0
    from .parsing import asked

    wanted = asked(parsed, environ)
    if parsed["dry-run"]:
        from .plan import plan

        write(1, "".join(f"{line}\n" for line in plan(parsed, wanted, environ)))
        return 0
    from .running import run as run_agent

    console.style = evolve(wanted.settings.streams.lines, is_quiet=False)
    return run_agent(wanted.settings, environ, console, wanted.notices)
