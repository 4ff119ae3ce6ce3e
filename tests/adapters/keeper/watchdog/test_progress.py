"""`reknit.progress`: cheap, harmless, and without effect where no agent watches."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from reknit.adapters.keeper.watchdog import progress as client
from reknit.adapters.keeper.watchdog.page import Page
from tests.support.alone import run_alone


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    """The page of a keeper whose worker, with local rank 1, is this process."""
    made = Page()
    monkeypatch.setattr(client, "_records", ())
    monkeypatch.setenv(client.VARIABLE, made.variables(1, {})[client.VARIABLE])
    yield made
    made.close()


def test_it_imports_nothing_heavy() -> None:
    """A training script imports it before anything else is certain."""
    script = """
        import sys
        from reknit import progress
        progress(1)
        print(*sorted({"attrs", "attr", "torch", "psutil", "typing", "subprocess", "json"} & set(sys.modules)))
        print(*(name for name in sys.modules if name.startswith("reknit")))
    """
    room = "reknit.adapters.keeper.watchdog"
    packages = f"reknit reknit.adapters reknit.adapters.keeper {room}"
    assert run_alone(script).split("\n")[:2] == ["", f"{packages} {room}.progress"]


def test_the_last_call_counts(page: Page) -> None:
    """A step is optional, and may go back."""
    for step in (4, None, 3):
        client.progress(step)
        assert page.read(1)[1] == step
    assert client.progress() is None


@pytest.mark.parametrize("value", ["", "nonsense", "/nowhere:0", "/dev/null:0", "/etc/passwd:0", "/proc/self/exe:-9"])
def test_without_a_page_nothing_happens(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may run without an agent, or outlive it."""
    monkeypatch.setattr(client, "_records", ())
    monkeypatch.setenv(client.VARIABLE, value)
    client.progress(1)
    client.progress(2)


def test_a_page_of_something_else_is_not_written(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of a dead keeper may belong to another process."""
    other = os.memfd_create("other")
    os.write(other, b"x" * 4096)
    monkeypatch.setenv(client.VARIABLE, f"/proc/self/fd/{other}:0")
    client.progress(1)
    assert os.pread(other, 4096, 0) == b"x" * 4096
    os.close(other)


@pytest.mark.parametrize("number", [-2, -1, 99])
def test_a_record_outside_the_page_is_not_written(page: Page, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The variable may have been changed."""
    path, _, _ = os.environ[client.VARIABLE].rpartition(":")
    monkeypatch.setenv(client.VARIABLE, f"{path}:{number}")
    client.progress(1)
    assert page.read(1) == (0, None)


@pytest.mark.parametrize("step", [1.5, "3", 2**63, [1]])
def test_a_step_that_is_no_number(step: object) -> None:
    """The same with and without an agent, so that the first try shows it."""
    with pytest.raises(ValueError, match="step must be a whole number"):
        client.progress(step)  # type: ignore[arg-type]


@pytest.mark.alone
def test_a_forked_child_counts_for_its_worker(page: Page) -> None:
    """As the children of a DataLoader do. A worker that is itself a fork gets a record of its own."""
    client.progress(1)
    for number, step in ((1, 2), (0, 9)):
        pid = os.fork()
        if pid == 0:
            os.environ[client.VARIABLE] = page.variables(number, {})[client.VARIABLE]
            client.progress(step)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    assert (page.read(1)[1], page.read(0)[1]) == (2, 9)


def test_the_worker_of_a_worker_counts_for_both(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may run an agent of its own. Its workers make progress, and it does not."""
    inner = Page()
    monkeypatch.setenv(client.VARIABLE, inner.variables(0, os.environ)[client.VARIABLE])
    client.progress(5)
    assert page.read(1)[1] == 5
    assert inner.read(0)[1] == 5
    inner.close()


def test_any_thread_may_call_it(page: Page) -> None:
    """The first call of several threads at once included."""
    threads = [threading.Thread(target=lambda: [client.progress(7) for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert page.read(1)[1] == 7
