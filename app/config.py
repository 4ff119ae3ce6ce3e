"""From text to what the agent and its workers need. The only place that judges a user's input, with `UsageError`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping

from reknit.adapters.streams import StreamSettings
from reknit.core.agent import Spec
from reknit.core.entries import NodeId, RestartPolicy, Terms
from reknit.core.values import TYPE_CHECKING, evolve, frozen

from .options import OPTIONS, Parsed, UsageError

if TYPE_CHECKING:
    from .rendezvous import Rendezvous

_MOST_WORKERS = 10_000
"""More than any host can run: a typing error, that would otherwise fill the memory with ranks."""


@frozen
class Config:
    """A run of one agent."""

    spec: Spec
    run_id: str
    argv: tuple[str, ...]
    """The workers' command line."""
    log_base: str
    """Empty: a temporary folder, removed if nobody needs it."""
    streams: StreamSettings
    signals: tuple[int, ...]
    env: Mapping[str, str]
    """What the workers get besides the agent's own environment."""
    notices: tuple[str, ...] = ()
    """Lines that the user should see once."""
    verbose: bool = False
    rendezvous: Rendezvous | None = None
    """None: one node, which needs none."""


def configure(parsed: Parsed, environ: Mapping[str, str]) -> Config:
    """Raises `UsageError`."""
    nodes = _nodes(parsed)
    argv = _command(parsed, environ)
    workers = _workers(parsed)
    restarts = RestartPolicy(max_restarts=number_of(parsed, "max-restarts", least=0))
    spec = Spec(
        node_id=NodeId(os.uname().nodename or "localhost"),
        address="127.0.0.1",
        terms=Terms(restarts=restarts),
        role=parsed["role"],
        local_world_size=workers,
        grace_s=_grace_s(parsed, environ),
        shares_journal=False,
    )
    seconds_of(parsed, "monitor-interval")
    # torch's operators would start a thread per core in every worker (torchelastic's rule, and its value).
    threads = {"OMP_NUM_THREADS": "1"} if workers > 1 and "OMP_NUM_THREADS" not in environ else {}
    config = Config(
        spec=spec,
        run_id=parsed["rdzv-id"] or os.urandom(8).hex(),
        argv=argv,
        log_base=parsed["log-dir"],
        streams=StreamSettings(
            redirects=_masks(parsed, "redirects"),
            tee=_masks(parsed, "tee"),
            shown=_local_ranks(parsed, workers),
            prefix=parsed["log-line-prefix-template"],
        ),
        signals=_signals(parsed["signals-to-handle"]),
        env={"TORCHELASTIC_SIGNALS_TO_HANDLE": parsed["signals-to-handle"]} | threads,
        notices=(
            *parsed.notices,
            *(f"{name}={value} for every worker, because it was not set" for name, value in threads.items()),
        ),
        verbose=bool(parsed["verbose"]),
    )
    return _for_one(config, parsed) if nodes[1] == 1 else _for_several(config, parsed, environ, nodes)


def _for_one(config: Config, parsed: Parsed) -> Config:
    if parsed["node-rank"] not in ("", "0"):
        raise UsageError(f"{parsed.spelled('node-rank')}: with one node it is 0")
    unused = [parsed.given[o.name] for o in OPTIONS if o.only_for_many and o.name in parsed.given]
    if not unused:
        return config
    return evolve(config, notices=(f"{', '.join(unused)}: without effect for one node", *config.notices))


def _for_several(config: Config, parsed: Parsed, environ: Mapping[str, str], nodes: tuple[int, int]) -> Config:
    from .rendezvous import rendezvous

    meeting = rendezvous(parsed, environ, nodes, config.spec.terms.restarts)
    return evolve(
        config,
        spec=evolve(
            config.spec,
            terms=meeting.terms,
            rank_hint=meeting.rank_hint,
            store_timeout_s=meeting.store_timeout_s,
        ),
        run_id=meeting.job,
        notices=(*config.notices, *meeting.notices),
        rendezvous=meeting,
    )


def _nodes(parsed: Parsed) -> tuple[int, int]:
    """The least and the most."""
    low, colon, high = parsed["nnodes"].partition(":")
    try:
        nodes = int(low), int(high if colon else low)
    except ValueError:
        raise UsageError(f"{parsed.spelled('nnodes')}: a number, or MIN:MAX") from None
    if not 0 < nodes[0] <= nodes[1]:
        raise UsageError(f"{parsed.spelled('nnodes')}: MIN:MAX with 0 < MIN <= MAX")
    if parsed["standalone"] and nodes[1] > 1:
        raise UsageError(f"{parsed.spelled('nnodes')}: --standalone is one node")
    return nodes


def _grace_s(parsed: Parsed, environ: Mapping[str, str]) -> float:
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    if text is None or "shutdown-timeout" in parsed.given:
        return seconds_of(parsed, "shutdown-timeout")
    return as_seconds(text, f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={text}")


def _command(parsed: Parsed, environ: Mapping[str, str]) -> tuple[str, ...]:
    script = parsed.script
    if not script:
        raise UsageError("no script; usage: reknit run [options] script [script arguments]")
    if parsed["no-python"]:
        if parsed["module"]:
            raise UsageError("--module and --no-python exclude each other")
        _executable("script", script)
        return (script, *parsed.args)
    python = sys.executable
    if environ.get("PYTHON_EXEC"):
        python = environ["PYTHON_EXEC"]
        _executable("PYTHON_EXEC:", python)
    if parsed["module"]:
        return (python, "-u", "-m", script, *parsed.args)
    _readable(script)
    return (python, "-u", script, *parsed.args)


def _readable(script: str) -> None:
    """Python would say the same, once per worker."""
    if not os.path.exists(script):
        raise UsageError(f"script {script} does not exist")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {script} is a folder without __main__.py")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {script} cannot be read")


def _executable(what: str, program: str) -> None:
    """Else every round would fail of it, as if a restart could help."""
    folders = [""] if "/" in program else os.get_exec_path()
    found = [path for path in (os.path.join(folder, program) for folder in folders) if os.path.isfile(path)]
    if not found:
        raise UsageError(f"{what} {program} does not exist" + ("" if "/" in program else " in PATH"))
    runnable = [path for path in found if os.access(path, os.X_OK)]
    if not runnable:
        raise UsageError(f"{what} {program} cannot be executed: no permission")
    interpreter = _interpreter(runnable[0])
    if interpreter and not os.path.exists(interpreter):
        raise UsageError(f"{what} {program} cannot be executed: its interpreter {interpreter} does not exist")


def _interpreter(path: str) -> str:
    """What the first line of a script names; empty for any other file."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return ""
    words = line[2:].split() if line.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else ""


def _workers(parsed: Parsed) -> int:
    text, spelled = parsed["nproc-per-node"], parsed.spelled("nproc-per-node")
    if text in ("cpu", "gpu", "xpu", "auto"):
        from .devices import count

        return count(text)
    try:
        workers = int(text)
    except ValueError:
        raise UsageError(f"{spelled}: a number, cpu, gpu, xpu or auto") from None
    if workers < 1:
        raise UsageError(f"{spelled}: at least 1")
    if workers > _MOST_WORKERS:
        raise UsageError(f"{spelled}: at most {_MOST_WORKERS}")
    return workers


def number_of(parsed: Parsed, name: str, *, least: int) -> int:
    try:
        number = int(parsed[name])
    except ValueError:
        raise UsageError(f"{parsed.spelled(name)}: a whole number expected") from None
    if number < least:
        raise UsageError(f"{parsed.spelled(name)}: at least {least}")
    return number


def seconds_of(parsed: Parsed, name: str) -> float:
    return as_seconds(parsed[name], parsed.spelled(name))


def as_seconds(text: str, spelled: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise UsageError(f"{spelled}: a number of seconds expected") from None
    if not 0 <= seconds < float("inf"):
        raise UsageError(f"{spelled}: zero or more seconds")
    return seconds


def _masks(parsed: Parsed, name: str) -> int | Mapping[int, int]:
    """`3`, or `0:1,1:3`. torchrun takes local ranks of one digit only; here they may have more."""
    text = parsed[name]
    try:
        if ":" not in text:
            masks: int | dict[int, int] = int(text)
            found = {masks}
        else:
            pairs = [pair.split(":") for pair in text.split(",")]
            masks = {int(rank): int(mask) for rank, mask in pairs}
            found = set(masks.values())
    except ValueError:
        found, masks = {-1}, 0
    if not found <= {0, 1, 2, 3}:
        raise UsageError(f"{parsed.spelled(name)}: 0, 1, 2 or 3, or RANK:N,RANK:N with such N")
    return masks


def _local_ranks(parsed: Parsed, workers: int) -> frozenset[int]:
    text = parsed["local-ranks-filter"]
    try:
        shown = frozenset(int(rank) for rank in text.split(",")) if text else frozenset()
    except ValueError:
        raise UsageError(f"{parsed.spelled('local-ranks-filter')}: numbers, separated by commas") from None
    if any(rank not in range(workers) for rank in shown):
        raise UsageError(f"{parsed.spelled('local-ranks-filter')}: local ranks are 0 to {workers - 1}")
    return shown


def _signals(text: str) -> tuple[int, ...]:
    """Raises for a name that is none, and for SIGKILL and SIGSTOP, which nobody can handle."""
    numbers = []
    for name in filter(None, (word.strip() for word in text.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals):
            raise UsageError(f"--signals-to-handle: {name} is no signal of this system")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled")
        numbers.append(int(number))
    return tuple(numbers)
