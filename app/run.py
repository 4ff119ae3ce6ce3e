"""`reknit run`: one agent, from its command line to its exit status."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping, Sequence

from reknit.core.agent import Agent
from reknit.core.commands import Result
from reknit.core.reasons import BudgetSpent
from reknit.core.states import WorkerState

from .config import configure
from .driver import drive
from .options import UsageError, help_text, parse
from .report import BUG, PREFIX, USAGE, Reporter, exit_status, final_lines, say
from .wire import LogFolder, Prevented, wire

_LOOK_S = 0.2
"""How often a console that blocks is left to see whether anybody asks us to end."""


def run(argv: Sequence[str], life_line: int) -> int:
    """The agent's process: never a traceback for what a user did, never a worker left behind."""
    try:
        return _run(argv, os.environ, life_line)
    except UsageError as e:
        say(str(e).replace("\n", "\\n"))  # a file's name may have more than one line
        return USAGE
    except Prevented as e:
        say(str(e).replace("\n", "\\n"))
        return exit_status(Result(WorkerState.FAILED, e.why))
    except Exception:
        from traceback import format_exc

        say(f"this is a bug in reknit; its workers were stopped. Please report:\n{format_exc()}")
        return BUG


def _run(argv: Sequence[str], environ: Mapping[str, str], life_line: int) -> int:
    parsed = parse(argv, environ)
    if parsed["help"]:
        try:
            os.write(1, help_text().encode())
        except OSError:
            pass  # nobody reads it
        return 0
    config = configure(parsed, environ)
    logs = LogFolder(config)
    for notice in (*config.notices, logs.notice):
        if notice:
            say(notice)
    nonce = os.urandom(8).hex()
    try:
        wired = wire(config, environ, life_line, logs.path, nonce)
    except BaseException:
        logs.close()
        raise
    console = wired.console
    gc.freeze()  # see cli: what was imported stays
    gc.enable()
    try:
        agent = drive(Agent(wired.spec), wired.ports, nonce, Reporter(console.say, verbose=config.verbose))
        assert agent.result is not None, "the driver returns when the agent has finished"
    finally:
        wired.close()
        logs.close()
    for line in final_lines(agent.result, agent.job.spent, is_alone=config.rendezvous is None):
        console.say(PREFIX + line)
    _leave_error_file(agent.result, environ)
    # The report is worth waiting for (`| less`), but not when somebody wants us gone.
    while not console.flush(_LOOK_S) and not wired.ports.requests.taken():
        pass
    return exit_status(agent.result)


def _leave_error_file(result: Result, environ: Mapping[str, str]) -> None:
    """A scheduler that gave the agent a TORCHELASTIC_ERROR_FILE finds the root cause in it."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if path and isinstance(result.why, BudgetSpent):
        from reknit.adapters.errors import write

        failure = result.why.root.failure
        write(path, failure, failure.exitcode)
