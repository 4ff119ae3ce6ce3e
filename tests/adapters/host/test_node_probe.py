"""The workers by which `reknit doctor` tries the ways between nodes, as processes of this host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.support.alone import ENV, ROOT
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S

PROBE = "reknit.adapters.host.node_probe"


def start(rank: int, size: int, port: int) -> subprocess.Popen[str]:
    given = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, "-m", PROBE]
    return subprocess.Popen(argv, cwd=ROOT, env={**os.environ, **ENV, **given}, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=PATIENCE_S)
    return [json.loads(line) for line in out.splitlines()]


def test_each_reaches_each_other() -> None:
    """Rank 0 listens, the others come, in whichever order they are started."""
    port = free_port()
    probes = [start(rank, 3, port) for rank in (2, 1, 0)]
    said = [told(probe) for probe in probes]
    reached = [sum(each["what"].startswith("to ") and each["level"] == "ok" for each in one) for one in said]
    assert reached == [2, 2, 2]
    assert said[2][-1]["text"] == "3 nodes have met at 127.0.0.1, and worked at one store"
    assert [probe.returncode for probe in probes] == [0, 0, 0]
