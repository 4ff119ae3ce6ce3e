"""`reknit doctor`: what would make a job fail here, before there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence

from attrs import evolve

from reknit.adapters.host.checkup import Finding, Level, endpoint, local, shared_folder
from reknit.app.input import readers
from reknit.app.input.meeting import kept
from reknit.app.report import PREFIX, write

from .arguments import Parsed, Table
from .looking import HELP, main, show
from .options import Option, UsageError, borrowed

_MEETING, _SHOWN = "Where nodes meet", "What is shown"
_SHARED = {
    "rdzv-backend": "where nodes meet: c10d (the default), etcd or file",
    "rdzv-endpoint": "HOST[:PORT] of the store, or the shared folder: can it be used from here?",
    "rdzv-id": "name of the meeting; default: doctor",
    "rdzv-conf": "as for reknit run",
    "rdzv-secret": "as for reknit run. Better set REKNIT_RDZV_SECRET",
    "local-addr": "as for reknit run",
}
TABLE = Table(
    "reknit doctor",
    (
        *borrowed(_SHARED, _MEETING),
        Option(
            "nnodes",
            "run this on so many nodes at the same time: they meet, and each tries to reach each other",
            "N",
            "1",
            readers.whole(1),
            group=_MEETING,
        ),
        Option("json", "one JSON object for each finding", group=_SHOWN),
        Option("all", "show what is well, too", group=_SHOWN),
        HELP,
    ),
    "reknit doctor [--rdzv-endpoint=HOST:PORT [--nnodes=N]] [options]",
    "Look for what would make a job fail here: Python and torch, GPUs, names and addresses, shared memory, limits,"
    " temporary files, locks, stacks, left-over workers, and the place where nodes meet. Each finding says what to do.",
    "The exit status is 0 if no job will fail because of a finding, 1 if one will. Warnings do not count. Without"
    " --rdzv-endpoint, a job with one node is meant.",
    mixes=True,
)
_FAILS = 1
_PATIENCE_S = 60
"""How long nodes wait for each other. Seconds."""
_MEETS_S = 4 * _PATIENCE_S
_MARKS = {Level.OK: "ok  ", Level.WARNING: "warn", Level.FAILURE: "FAIL"}


def doctor(argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command. Returns the exit status."""
    return main(argv, environ, TABLE, lambda parsed: _doctor(parsed, environ))


def _doctor(parsed: Parsed, environ: Mapping[str, str]) -> int:
    found: list[Finding] = []
    apart: list[Finding] = []
    """Findings that do not count, because a job with one node is meant."""

    def lines() -> Iterator[str]:
        for finding in _findings(parsed, environ):
            (apart if finding.only_for_several and not parsed["rdzv-endpoint"] else found).append(finding)
            if finding not in apart or parsed["json"]:
                yield from _told(finding, as_json=parsed["json"], shows_all=parsed["all"])
        if not parsed["json"]:
            if apart:
                yield "only for several nodes:"
                yield from (f"  {line}" for finding in apart for line in _told(finding, as_json=False, shows_all=True))
            yield _verdict(found, len(apart))

    show(lines())
    return _FAILS if any(finding.level is Level.FAILURE for finding in found) else 0


def _findings(parsed: Parsed, environ: Mapping[str, str]) -> Iterator[Finding]:
    place = parsed["rdzv-endpoint"]
    backend = parsed["rdzv-backend"] or "c10d"
    meeting = None
    if not place and parsed["nnodes"] > 1:
        raise UsageError(f"{parsed.spelled('nnodes')} needs --rdzv-endpoint, where the nodes meet")
    if place:
        named = evolve(parsed, values={**parsed.values, "rdzv-backend": backend})
        meeting = kept(named, environ, "reknit doctor", ("c10d", "etcd", "file"))
    yield from local()
    if meeting is None:
        return
    if meeting.folder:
        yield shared_folder(meeting.folder)
    for host, port in meeting.endpoints:
        yield from endpoint(host, port, may_be_free=backend == "c10d")
    if parsed["nnodes"] > 1:
        yield from _together(parsed, backend, environ)


def _together(parsed: Parsed, backend: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """The findings of the nodes that meet, as far as they concern this one."""
    given = [f"--{name}={parsed.texts[name]}" for name in _SHARED if parsed.texts[name] and name != "rdzv-conf"]
    conf = ",".join(filter(None, [parsed.texts["rdzv-conf"], f"join_timeout={_PATIENCE_S}"]))
    argv = [sys.executable, "-m", "reknit", "run", "--quiet", "--no-trace", f"--nnodes={parsed['nnodes']}"]
    argv += [*given, f"--rdzv-backend={backend}", f"--rdzv-id={parsed.texts['rdzv-id'] or 'doctor'}"]
    argv += [f"--rdzv-conf={conf}", "--log-times=never", "--module", "reknit.adapters.host.node_probe"]
    write(2, f"{PREFIX}waiting for the other nodes, for at most {_PATIENCE_S} s\n")
    try:
        env = {**environ, "PYTHON_EXEC": sys.executable}  # the test needs no torch, and is a part of reknit
        null = subprocess.DEVNULL
        done = subprocess.run(argv, check=False, env=env, stdin=null, capture_output=True, timeout=_MEETS_S)
    except subprocess.TimeoutExpired:
        yield Finding("meeting", Level.FAILURE, f"it was not over after {_MEETS_S} s", "look at the other nodes")
        return
    for line in done.stdout.decode(errors="replace").splitlines():
        try:
            told = json.loads(line)
            yield Finding(told["what"], Level(told["level"]), told["text"], told["advice"])
        except (ValueError, KeyError, TypeError):
            pass  # not from the test
    if done.returncode:
        last = [line.removeprefix("reknit: ") for line in done.stderr.decode(errors="replace").splitlines()]
        text = "; ".join(last[:2]) or f"exit status {done.returncode}"
        yield Finding("meeting", Level.FAILURE, text, "run this on all nodes, within a minute, with the same options")


def _told(finding: Finding, *, as_json: bool, shows_all: bool) -> Iterator[str]:
    if as_json:
        told = {"what": finding.what, "level": finding.level.value, "text": finding.text, "advice": finding.advice}
        yield json.dumps({**told, "only_for_several": finding.only_for_several})
    elif shows_all or finding.level is not Level.OK:
        yield f"{_MARKS[finding.level]}  {finding.what}: {finding.text}"
        if finding.advice:
            yield f"      what to do: {finding.advice}"


def _verdict(found: Sequence[Finding], apart: int) -> str:
    """`apart`: number of findings that do not count."""
    failures = sum(finding.level is Level.FAILURE for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    told = [f"{len(found) + apart} things were looked at"]
    told += [f"{failures} will make a job fail"] if failures else []
    told += [f"{warnings} warning{'s' * (warnings != 1)}"] if warnings else []
    well = f", all is well{' for a job with one node' * bool(apart)} (--all lists them)"
    return ", ".join(told) + ("" if failures or warnings else well)
