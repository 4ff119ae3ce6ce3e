"""The page in which workers say that they make progress: shared by keeper and workers, and trusted by nobody."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import pytest

from reknit.adapters.keeper.watchdog import progress as client
from reknit.adapters.keeper.watchdog.page import Page, seen
from tests.support.leaks import nothing_left


def test_each_worker_has_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write at the same time, and the page grows with the workers."""
    page = Page()
    variables = [page.variables(rank, {}) for rank in (2, 0)]
    for step, given in enumerate(variables):
        monkeypatch.setattr(client, "_records", ())
        monkeypatch.setenv(client.VARIABLE, given[client.VARIABLE])
        client.progress(step)
    assert [page.read(rank)[1] for rank in (2, 1, 0)] == [0, None, 1]
    assert page.read(1)[0] == 0
    assert page.read(2)[0] < page.read(0)[0]
    page.close()


def test_a_worker_cannot_make_it_shorter() -> None:
    """The kernel kills a process that writes into memory whose file has become too short."""
    page = Page()
    path, _, _ = page.variables(0, {})[client.VARIABLE].rpartition(":")
    fd = os.open(path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    page.close()


def test_nothing_is_left_of_it() -> None:
    """May be closed twice."""
    with nothing_left():
        page = Page()
        page.variables(0, {})
        page.close()
        page.close()


def test_without_files_that_have_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On macOS it is a file in the folder of the run, which is removed."""
    monkeypatch.delattr(os, "memfd_create")
    with nothing_left(tmp_path):
        page = Page(str(tmp_path))
        monkeypatch.setattr(client, "_records", ())
        given = page.variables(0, {})[client.VARIABLE]
        monkeypatch.setenv(client.VARIABLE, given)
        client.progress(7)
        assert page.read(0)[1] == 7
        client._forget()
        monkeypatch.delenv(client.VARIABLE)
        path, _, _ = given.rpartition(":")
        os.truncate(path, 0)
        assert page.read(0) == (0, None)
        os.unlink(path)
        page.close()


def test_who_may_look_into_the_keeper_sees_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reknit status` shows how far each worker is, without asking the agent."""
    page = Page()
    for local_rank in range(3):
        given = page.variables(local_rank, {})
        page.started(local_rank, 100 + local_rank)
        monkeypatch.setattr(client, "_records", ())
        monkeypatch.setenv(client.VARIABLE, given[client.VARIABLE])
        if local_rank == 1:
            client.progress(7)
        if local_rank == 2:
            client.progress()
            client.rest()
    found = seen(os.getpid())
    assert [(one.pid, one.step) for one in found.values()] == [(100, None), (101, 7), (102, None)]
    assert found[0].at is None
    assert found[2].at == inf, "it only waits for the others"
    page.close()
    assert seen(2**22 + 1) == {}, "there is no such process"
