"""What `reknit doctor` looks at on one host: each check says what is wrong and what to do."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections import namedtuple
from pathlib import Path

import pytest

from reknit.adapters.host import checkup
from reknit.adapters.host.checkup import Finding, Level, endpoint, local, shared_folder
from tests.support.stores import free_port, needs_torch


def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
    """What is found here, with an answer of torch that takes no time."""
    monkeypatch.setenv("PYTHON_EXEC", "/bin/false")
    return {finding.what: finding for finding in local()}


def test_each_thing_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on which the tests run has nothing that would make a job fail, except for the Python without torch."""
    findings = found(monkeypatch)
    failing = {what for what, finding in findings.items() if finding.level is Level.FAILURE}
    assert failing == {"torch"}
    assert {"python", "host name", "shared memory", "open files", "locks", "stacks", "left over"} <= findings.keys()
    assert all(finding.advice for finding in findings.values() if finding.level is not Level.OK)


@pytest.mark.slow
def test_a_real_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version and backends are shown: gloo is in every build."""
    needs_torch()
    monkeypatch.delenv("PYTHON_EXEC", raising=False)
    (told,) = [finding for finding in local() if finding.what == "torch"]
    assert told.level is Level.OK
    assert "gloo" in told.text


def test_too_little_of_something_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives 64 MiB of shared memory, and some systems 1024 files."""
    usage = namedtuple("usage", "total used free")  # as shutil has it
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        findings = found(monkeypatch)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert findings["shared memory"].level is Level.WARNING
    assert findings["shared memory"].text == "64.0 MiB free in /dev/shm"
    assert (findings["open files"].level, findings["open files"].text) == (Level.WARNING, "at most 1024")
    assert findings["temporary files"].level is Level.WARNING


def test_a_name_that_leads_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo looks for the host's own name. Debian gives it 127.0.1.1, where no other host comes."""
    monkeypatch.setattr(checkup.socket, "gethostname", lambda: "no-such-host.invalid")
    told = found(monkeypatch)["host name"]
    assert "cannot be resolved" in told.text
    assert told.only_for_several, "with one node, gloo takes the loopback interface"


def test_an_endpoint_that_an_agent_can_use() -> None:
    """Nothing listens there yet: the agent of this host will."""
    port = free_port()
    levels = [(finding.level, finding.text) for finding in endpoint("127.0.0.1", port, may_be_free=True)]
    assert levels[-1] == (Level.OK, "the port is free, and an agent of this host can listen there")
    with socket.create_server(("127.0.0.1", port)):
        last = [*endpoint("127.0.0.1", port, may_be_free=True)][-1]
    assert last.text == "something listens there"


def test_an_endpoint_that_cannot_be_used() -> None:
    """A name that cannot be resolved, and an etcd that does not answer."""
    (wrong,) = endpoint("no-such-host.invalid", 2379, may_be_free=False)
    assert (wrong.level, wrong.what) == (Level.FAILURE, "no-such-host.invalid:2379")
    last = [*endpoint("127.0.0.1", free_port(), may_be_free=False)][-1]
    assert (last.level, bool(last.advice)) == (Level.FAILURE, True)


def test_a_shared_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files can be locked here, and nothing is left in the folder. Where locks do nothing, nodes cannot meet."""
    assert shared_folder(str(tmp_path)).level is Level.OK
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    assert shared_folder(str(tmp_path)).text == "a lock does not keep out another process of this host"
    (tmp_path / "file").touch()
    assert shared_folder(str(tmp_path / "file" / "in")).level is Level.FAILURE
