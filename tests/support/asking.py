"""Asking the health check server of an agent over HTTP."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from email.message import Message
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.alone import ROOT
from tests.support.waiting import PATIENCE_S, until


def get(url: str, method: str = "GET", timeout_s: float = PATIENCE_S) -> tuple[int, str]:
    """The status, and the body. `timeout_s`: a server that is silent for so long raises `OSError`."""
    status, body, _ = full(url, method, timeout_s)
    return status, body


def full(url: str, method: str = "GET", timeout_s: float = PATIENCE_S) -> tuple[int, str, Message]:
    """The status, the body and the headers."""
    request = urllib.request.Request(url, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(), error.headers


def served(url: str) -> str:
    """Wait until somebody answers there."""

    def asks() -> bool:
        try:
            get(url)
        except OSError:
            return False
        return True

    until(asks, f"an answer of {url}")
    return url


def state(url: str) -> Any:
    """The page /state."""
    status, body = get(f"{url}/state")
    assert status == 200
    return json.loads(body)


def metrics(url: str) -> dict[str, float]:
    """The page /metrics: the values by name and labels, such as `reknit_workers{state="running"}`."""
    status, body = get(f"{url}/metrics")
    assert status == 200
    return parsed(body)


def parsed(text: str) -> dict[str, float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {f"{sample.name}{_labels(sample.labels)}": sample.value for sample in samples}
    assert len(found) == len(samples), "a sample comes twice"
    return found


def _labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}" if labels else ""


def connected(url: str) -> socket.socket:
    """A connection on which nothing was said yet."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S)


def listening(pid: int) -> set[str]:
    """The sockets that a process has open and that listen for TCP connections, as links of /proc."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{table}") as file:
                inodes |= {row.split()[9] for row in file.readlines()[1:] if row.split()[3] == "0A"}
        except FileNotFoundError:
            pass  # the system has no IPv6
    folder, found = f"/proc/{pid}/fd", set()
    for fd in os.listdir(folder):
        try:
            link = os.readlink(f"{folder}/{fd}")
        except FileNotFoundError:
            continue
        if link.startswith("socket:[") and link[8:-1] in inodes:
            found.add(link)
    return found


def documented() -> dict[str, set[str]]:
    """The fields of /state and of `reknit status --json`, as the documentation has them: those of `job`, `agent` and
    `workers`, and those of each worker as `ranks`."""
    found: dict[str, set[str]] = {}
    for row in (ROOT / "docs/records.md").read_text().splitlines():
        if match := re.fullmatch(r"\| `(job|agent|workers)` \| (.*?) \| (.*) \|", row):
            part, names, _ = match.groups()
            found.setdefault(part, set()).update(re.findall(r"`(\w+)`", names))
    assert found.keys() == {"job", "agent", "workers"}
    return found | {
        "ranks": {"rank", "local_rank", "pid", "state", "failure", "step", "progress_s", "waiting", "stopped"}
    }
