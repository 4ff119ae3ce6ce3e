"""From the options to `Settings`: judges what the options mean together and on this host. Raises `UsageError`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from attrs import frozen

from reknit.adapters.keeper.common.environment import TIMER_FILE
from reknit.adapters.keeper.output.console import LineStyle
from reknit.adapters.keeper.output.streams import StreamSettings
from reknit.app.input.readers import ENABLE_FILE_TIMER, HEALTH_CHECK_PORT, seconds, timer_file, unknown_signals
from reknit.app.settings import NO_EVENTS, HealthCheck, Settings
from reknit.core.job.entries import RestartPolicy, Terms

from .arguments import USAGE_LINE, Parsed
from .options import OPTIONS, UsageError

_STDIN = "-"


@frozen
class Asked:
    """What a command line asks for."""

    settings: Settings
    notices: tuple[str, ...] = ()
    """Lines that the user should see once, before a worker runs."""


def _read_stdin() -> bytes:
    if os.isatty(0):
        # The user has probably forgotten the pipe, and a wait for input would look like a hang. In the background the
        # kernel would stop this process when it reads the terminal.
        raise UsageError(f"script {_STDIN}: the standard input is a terminal; a file or a pipe is needed")
    with open(0, "rb", closefd=False) as file:
        return file.read()


def asked(parsed: Parsed, environ: Mapping[str, str], read_stdin: Callable[[], bytes] = _read_stdin) -> Asked:
    """Judge the parsed options, and make the settings. `read_stdin`: called if the script is `-`."""
    try:
        return _asked(parsed, environ, read_stdin)
    except ValueError as error:
        raise UsageError(_translated(str(error), parsed)) from None


def _asked(parsed: Parsed, environ: Mapping[str, str], read_stdin: Callable[[], bytes]) -> Asked:
    least, most = parsed["nnodes"]
    if parsed["standalone"] and least > 1:
        raise UsageError(f"{parsed.spelled('nnodes')}: --standalone means one node")
    is_alone = most == 1 or parsed["standalone"]
    command = _command(parsed, environ)
    workers = _workers(parsed, environ)
    # As in torchelastic. Otherwise torch would start as many threads as there are cores in every worker.
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 and "OMP_NUM_THREADS" not in environ else {}
    health, mistakes = _health(environ)
    fields: dict[str, Any] = {
        "command": command,
        "terminal": _terminal(parsed, workers, is_alone=is_alone),
        "stdin": read_stdin() if _reads_stdin(parsed) else None,
        "env": {"TORCHELASTIC_SIGNALS_TO_HANDLE": parsed.texts["signals-to-handle"]} | threads,
        "local_world_size": workers,
        "virtual_local_rank": _virtual_local_rank(parsed, environ, workers),
        "warm": _warm(parsed, command),
        "role": parsed["role"],
        "timer_file": timer_file(environ),
        "signals": parsed["signals-to-handle"],
        "grace_s": _grace_s(parsed, environ),
        "hang_after_s": parsed["hang-after"],
        "start_timeout_s": parsed["start-timeout"],
        "streams": StreamSettings(
            redirects=parsed["redirects"],
            tee=parsed["tee"],
            shown=parsed["local-ranks-filter"],
            prefix=parsed["log-line-prefix-template"],
            output=parsed["output"],
            lines=LineStyle(
                has_times={"always": True, "never": False}.get(parsed["log-times"]),
                is_json=parsed["log-format"] == "json",
                is_quiet=parsed["quiet"],
            ),
        ),
        "log_dir": parsed["log-dir"],
        "health": health,
        "trace": not parsed["no-trace"],
        "verbose": parsed["verbose"],
        "event_handler": _event_handler(parsed),
    }
    notices = (
        *parsed.notices,
        *mistakes,
        *_without_meaning(parsed, workers),
        *_without_watchdog(environ),
        *(f"{name}={value} for every worker, because it was not set" for name, value in threads.items()),
    )
    restarts = RestartPolicy(**parsed["max-restarts"])
    if is_alone:
        return _for_one(parsed, fields, notices, restarts)
    return _for_several(parsed, environ, fields, notices, restarts, (least, most))


def _for_one(parsed: Parsed, fields: dict[str, Any], notices: tuple[str, ...], restarts: RestartPolicy) -> Asked:
    # As in torchrun, a standalone job, or one with an endpoint, ignores the node's rank and the master port.
    is_static = parsed["rdzv-backend"] == "static" and not (parsed["standalone"] or parsed["rdzv-endpoint"])
    if parsed["node-rank"] and is_static:
        raise UsageError(f"{parsed.spelled('node-rank')}: with one node it is 0")
    if "rdzv-backend" in parsed.given and not parsed["standalone"]:
        from reknit.app.input.meeting import check_backend

        check_backend(parsed)
    master_port = parsed["master-port"] if is_static and "master-port" in parsed.given else 0
    unused = [parsed.given[o.name] for o in OPTIONS if o.only_for_many and o.name in parsed.given]
    if parsed["nnodes"][1] > 1:
        unused.append(parsed.given["nnodes"])
    if "master-port" in parsed.given and not is_static:
        unused.append(parsed.given["master-port"])
    if unused:
        notices = (f"{', '.join(unused)}: without effect for one node", *notices)
    named = {"run_id": parsed["rdzv-id"]} if parsed["rdzv-id"] else {}
    return Asked(Settings(terms=Terms(restarts=restarts), master_port=master_port, **named, **fields), notices)


def _for_several(
    parsed: Parsed,
    environ: Mapping[str, str],
    fields: dict[str, Any],
    notices: tuple[str, ...],
    restarts: RestartPolicy,
    nodes: tuple[int, int],
) -> Asked:
    from reknit.app.input.meeting import judged

    met = judged(parsed, environ, nodes, restarts)
    settings = Settings(
        terms=met.terms,
        meeting=met.meeting,
        run_id=met.run_id,
        rank_hint=met.rank_hint,
        node_id=parsed["node-id"],
        address=parsed["local-addr"].strip("[]"),
        store_timeout_s=parsed["store-timeout"],
        **fields,
    )
    return Asked(settings, (*notices, *met.notices))


_OPTION_OF = {
    "Settings.local_world_size": "nproc-per-node",
    "Settings.warm": "warm",
    "Settings.role": "role",
    "Settings.run_id": "rdzv-id",
    "Settings.node_id": "node-id",
    "Settings.address": "local-addr",
    "Settings.rank_hint": "node-rank",
    "Settings.master_port": "master-port",
    "Settings.signals": "signals-to-handle",
    "Settings.grace_s": "shutdown-timeout",
    "Settings.hang_after_s": "hang-after",
    "Settings.start_timeout_s": "start-timeout",
    "Settings.store_timeout_s": "store-timeout",
    "Settings.event_handler": "event-log-handler",
    "Settings.meeting": "rdzv-backend",
    "Meeting.endpoints": "rdzv-endpoint",
    "Meeting.is_host": "rdzv-conf",
    "Meeting.backend": "rdzv-backend",
    "Meeting.folder": "rdzv-endpoint",
    "StreamSettings.redirects": "redirects",
    "StreamSettings.tee": "tee",
    "StreamSettings.shown": "local-ranks-filter",
    "StreamSettings.output": "output",
    "RestartPolicy.max_restarts": "max-restarts",
    "RestartPolicy.steady_s": "max-restarts",
    "Terms.min_nodes": "nnodes",
    "Terms.max_nodes": "nnodes",
    "Terms.admission": "admission",
    "Terms.fence_s": "fence-after",
    "Terms.join_timeout_s": "rdzv-conf",
    "Terms.last_call_s": "rdzv-conf",
    "Terms.settle_s": "rdzv-conf",
    "Terms.beat_s": "rdzv-conf",
    "Terms.silence_s": "rdzv-conf",
}
"""By refused field: the option that the user must change."""


def _translated(refusal: str, parsed: Parsed) -> str:
    """The error message `Class.field must be …, not …` of a value, with the option in the place of the field."""
    name, must, wanted = refusal.partition(" must be ")
    if not must or name not in _OPTION_OF:
        return refusal
    return f"{parsed.spelled(_OPTION_OF[name])}: must be {wanted.rpartition(', not ')[0]}"


def _warm(parsed: Parsed, command: tuple[str, ...]) -> bool | tuple[str, ...]:
    warm: bool | tuple[str, ...] = parsed["warm"]
    if warm:
        from reknit.adapters.keeper.zygote.commandline import NotWarm, parts_of

        try:
            parts_of(command)
        except NotWarm as error:
            raise UsageError(f"{parsed.given['warm']}: {error}") from None
    return warm


def _grace_s(parsed: Parsed, environ: Mapping[str, str]) -> float:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None or "shutdown-timeout" in parsed.given:
        return float(parsed["shutdown-timeout"])
    try:
        return seconds(text)
    except ValueError as error:
        raise UsageError(f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}: {error}") from None


def _event_handler(parsed: Parsed) -> str:
    """The name of the handler of events. It is made later, when there is a keeper: it may start threads."""
    name = str(parsed["event-log-handler"])
    if name != NO_EVENTS:
        from reknit.adapters.observe.destinations import UnusableHandler, check

        try:
            check(name)
        except UnusableHandler as error:
            raise UsageError(f"{parsed.spelled('event-log-handler')}: {error}") from None
    return name


def _health(environ: Mapping[str, str]) -> tuple[HealthCheck | None, tuple[str, ...]]:
    """Where the health check server listens, and a line if the variable cannot be read. As with torch, that is no
    reason to end a job."""
    if not (text := environ.get(HEALTH_CHECK_PORT)):
        return None, ()
    from reknit.app.wiring.health import health_check

    try:
        return health_check(text), ()
    except ValueError as error:
        return None, (f"{HEALTH_CHECK_PORT}={text:.60}: {error}; there is no health check server",)


def _terminal(parsed: Parsed, workers: int, *, is_alone: bool) -> int | None:
    """The local rank of the worker that has the terminal."""
    wanted = parsed["stdin"]
    if wanted is None:
        from .terminal import is_terminal

        is_watched = parsed["hang-after"] is not None or parsed["start-timeout"] is not None
        is_one = workers == 1 and is_alone and not (_reads_stdin(parsed) or parsed["warm"] or is_watched)
        return 0 if is_one and parsed["output"] == "relay" and not _goes_to_files(parsed) and is_terminal() else None
    if wanted >= workers:
        raise UsageError(f"{parsed.spelled('stdin')}: there are {workers} workers here, from 0")
    for other, is_given in (("a script that is -", _reads_stdin(parsed)), ("--warm", parsed["warm"])):
        if is_given:
            raise UsageError(f"{parsed.spelled('stdin')} and {other} exclude each other")
    return int(wanted)


def _goes_to_files(parsed: Parsed) -> bool:
    return bool(parsed["redirects"] or parsed["tee"])


def _reads_stdin(parsed: Parsed) -> bool:
    return bool(parsed.script == _STDIN and not parsed["module"] and not parsed["no-python"])


def _command(parsed: Parsed, environ: Mapping[str, str]) -> tuple[str, ...]:
    script = parsed.script
    if not script:
        raise UsageError(f"no script; usage: {USAGE_LINE}")
    # As in torchrun, --run-path takes precedence over --no-python and --module. It runs the script with Python.
    if parsed["no-python"] and not parsed["run-path"]:
        if parsed["module"]:
            raise UsageError("--module and --no-python exclude each other")
        _executable("script", script)
        return (script, *parsed.args)
    python = sys.executable
    if environ.get("PYTHON_EXEC"):
        python = environ["PYTHON_EXEC"]
        _executable("PYTHON_EXEC:", python)
    if parsed["module"] and not parsed["run-path"]:
        return (python, "-u", "-m", script, *parsed.args)
    if script != _STDIN:
        _readable(script, is_after_warm=parsed["warm"] is True and bool(parsed.args))
    return (python, "-u", script, *parsed.args)


def _readable(script: str, *, is_after_warm: bool) -> None:
    """Raises `UsageError` if the script cannot be read. Otherwise the Python of every worker would say so.

    `is_after_warm`: these may be the modules of `--warm`, written without an equals sign."""
    if not os.path.exists(script):
        are_modules = is_after_warm and all(map(str.isidentifier, script.replace(",", ".").split(".")))
        advice = f"; did you mean --warm={script}?" if are_modules else ""
        raise UsageError(f"script {script} does not exist{advice}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {script} is a folder without __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script} cannot be read")


def _executable(what: str, program: str) -> None:
    """Raises `UsageError` if the program cannot be executed. Otherwise every round would fail, and be restarted."""
    folders = [""] if "/" in program else os.get_exec_path()
    found = [path for path in (os.path.join(folder, program) for folder in folders) if os.path.isfile(path)]
    if not found and "/" not in program:
        advice = f"; did you mean ./{program}?" if os.path.isfile(program) else ""
        raise UsageError(f"{what} {program} does not exist in PATH{advice}")
    if not found:
        raise UsageError(f"{what} {program} does not exist")
    runnable = [path for path in found if os.access(path, os.X_OK)]
    if not runnable:
        raise UsageError(f"{what} {program} cannot be executed: no permission")
    interpreter = _interpreter(runnable[0])
    if interpreter and not os.path.exists(interpreter):
        raise UsageError(f"{what} {program} cannot be executed: its interpreter {interpreter} does not exist")


def _interpreter(path: str) -> str:
    """The interpreter in the first line of a script (`#!`). Empty: the file has no such line."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return ""
    words = line[2:].split() if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else ""


def _workers(parsed: Parsed, environ: Mapping[str, str]) -> int:
    asked_for = parsed["nproc-per-node"]
    if isinstance(asked_for, int):
        return asked_for
    from reknit.app.input.devices import count

    return count(asked_for, environ)


def _virtual_local_rank(parsed: Parsed, environ: Mapping[str, str], workers: int) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if parsed["virtual-local-rank"] and visible is not None and workers > len(visible.split(",")):
        raise UsageError(
            f"{parsed.given['virtual-local-rank']}: CUDA_VISIBLE_DEVICES={visible} names fewer devices than"
            f" {workers} workers need"
        )
    return bool(parsed["virtual-local-rank"])


def _without_meaning(parsed: Parsed, workers: int) -> Iterator[str]:
    """What torchrun accepts although it means nothing on this node: a line for each."""
    for name in unknown_signals(parsed.texts["signals-to-handle"]):
        yield f"{parsed.spelled('signals-to-handle')}: {name} is no signal of this system, reknit leaves it out"
    if others := sorted(parsed["local-ranks-filter"] - set(range(workers))):
        listed = ", ".join(map(str, others))
        yield f"{parsed.spelled('local-ranks-filter')}: no worker of this node has local rank {listed}"
    if parsed["log-dir"] not in ("", os.devnull) and not (parsed["redirects"] or parsed["tee"]):
        written = "only error files and the trace go there; --redirects and --tee write the output there"
        yield f"{parsed.spelled('log-dir')}: {written}"


def _without_watchdog(environ: Mapping[str, str]) -> Iterator[str]:
    """The variables of timers that the user has set, and that start no watchdog: a line."""
    enabled = environ.get(ENABLE_FILE_TIMER, "")
    if enabled not in ("", "0", "1"):
        yield f"{ENABLE_FILE_TIMER}={enabled}: only 1 starts the watchdog for timers"
    elif environ.get(TIMER_FILE) and enabled != "1":
        yield f"{TIMER_FILE}: no watchdog for timers is started, because {ENABLE_FILE_TIMER} is not 1"
