"""`reknit doctor` as people and scripts call it: alone, and on two nodes at the same time."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.host.checkup import Finding, Level
from reknit.app.cli import doctor as verb
from tests.support.command import REKNIT
from tests.support.stores import free_port, needs_torch
from tests.support.waiting import PATIENCE_S


def start(*argv: str, **env: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHON_EXEC": "/bin/false", **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [REKNIT, "doctor", *argv], env=environ, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def findings(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def test_what_will_fail_has_a_status_and_says_what_to_do() -> None:
    """A batch script asks before it takes a hundred nodes: this Python has no torch."""
    status, out, err = ended(start())
    assert (status, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].startswith("FAIL  torch: it cannot be imported")
    assert lines[1].startswith("      what to do: install torch for /bin/false")
    assert "1 will make a job fail" in lines[-1]


def test_all_and_json() -> None:
    """People see what is well with --all. Programs get one object for each finding."""
    _, out, _ = ended(start("--all"))
    assert any(line.startswith("ok    python: ") for line in out.splitlines())
    _, out, _ = ended(start("--json"))
    told = findings(out)
    assert {"ok", "failure"} <= {each["level"] for each in told}
    assert all(each.keys() == {"what", "level", "text", "advice", "only_for_several"} for each in told)


def test_what_concerns_several_nodes_alone_does_not_count(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most hosts have a name that leads to 127.0.1.1, and a job on this host alone does not care."""
    well = Finding("python", Level.OK, "3.14")
    name = Finding("host name", Level.FAILURE, "it leads nowhere", "mend DNS", only_for_several=True)
    monkeypatch.setattr(verb, "local", lambda: iter((well, name)))
    assert verb.doctor([], {}) == 0
    assert capfd.readouterr().out.splitlines() == [
        "only for several nodes:",
        "  FAIL  host name: it leads nowhere",
        "        what to do: mend DNS",
        "2 things were looked at, all is well for a job with one node (--all lists them)",
    ]
    assert verb.doctor(["--json"], {}) == 0
    assert [each["only_for_several"] for each in findings(capfd.readouterr().out)] == [False, True]
    assert verb.doctor([f"--rdzv-endpoint=127.0.0.1:{free_port()}"], {}) == 1
    assert capfd.readouterr().out.splitlines() == [
        "FAIL  host name: it leads nowhere",
        "      what to do: mend DNS",
        "4 things were looked at, 1 will make a job fail",
    ]


def test_the_place_where_nodes_meet(tmp_path: Path) -> None:
    """A folder is tried with a lock, an endpoint with a connection."""
    _, out, _ = ended(start("--json", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/jobs"))
    assert findings(out)[-1]["what"] == f"{tmp_path}/jobs"
    assert findings(out)[-1]["level"] == "ok"
    _, out, _ = ended(start("--json", f"--rdzv-endpoint=127.0.0.1:{free_port()}"))
    assert "the port is free" in findings(out)[-1]["text"]


def test_a_wrong_option_is_one_line() -> None:
    """As for every verb."""
    status, out, err = ended(start("--rdzv-endpoint=node0:99999999"))
    assert (status, out) == (2, "")
    assert err.startswith("reknit: --rdzv-endpoint=node0:99999999")
    assert len(err.splitlines()) == 1


def test_nodes_try_to_reach_each_other(tmp_path: Path) -> None:
    """Two nodes meet as those of a job do. Each tells of the other."""
    needs_torch()
    meeting = (f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--nnodes=2", "--json")
    both = [start(*meeting, TMPDIR=str(tmp_path)) for _ in range(2)]
    told = [findings(out) for _, out, _ in map(ended, both)]
    reached = [[each for each in found if each["what"].startswith("to ")] for found in told]
    assert [[each["level"] for each in one] for one in reached] == [["ok"], ["ok"]]
    met = [each["text"] for found in told for each in found if each["what"] == "meeting"]
    assert met == ["2 nodes have met at 127.0.0.1, and worked at one store"]
