"""How contexts end: closed, dropped, killed, interrupted, in threads and in forked children."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reknit import CannotStart
from reknit.adapters.keeper.client.start import Keeping
from reknit.elastic.multiprocessing import DefaultLogsSpecs, Std
from reknit.elastic.multiprocessing.api import RunProcsResult, SignalException
from reknit.elastic.multiprocessing.shared import SharedKeeper
from tests.elastic.shells import IGNORES, WAITS, leaving_nothing, result_of, shell
from tests.support.alone import run_alone
from tests.support.keepers import killed_at_once
from tests.support.leaks import children
from tests.support.waiting import is_alive, read_pids, until


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with leaving_nothing(tmp_path, monkeypatch):
        yield


# ---- the end ----


def test_close_ends_what_processes_have_started(tmp_path: Path) -> None:
    """A process that ignores the signal is killed after the timeout, and so is its child."""
    pids = tmp_path / "pids"
    context = shell(
        f"echo $$ >> {pids}; (trap '' TERM; echo $PPID >> {pids}; sleep 1000) & wait", IGNORES, args=(pids,)
    )
    all_ = {*read_pids(pids, 3), *children()}
    context.close(timeout=0)
    assert not any(map(is_alive, all_))
    context.close()


@pytest.mark.parametrize("timeout", [float("inf"), 1e9, -1])
def test_any_timeout_is_taken(tmp_path: Path, timeout: float) -> None:
    """Programs hand on what their users have configured."""
    context = shell("trap 'exit 0' TERM; echo $$ >> $0; while true; do sleep 0.01; done", args=(tmp_path / "pids",))
    read_pids(tmp_path / "pids", 1)
    context.close(timeout=timeout)
    result = context.wait(0)
    assert result is not None
    assert {failure.exitcode for failure in result.failures.values()} <= {-9}


def test_a_context_that_is_dropped_ends_its_processes(tmp_path: Path) -> None:
    """A cell of a notebook is run again, and nobody has the old context."""
    context = shell(IGNORES, args=(str(tmp_path / "pids"),), logs_specs=DefaultLogsSpecs(str(tmp_path), tee=Std.ALL))
    alive = read_pids(tmp_path / "pids", 1)
    del context
    gc.collect()
    assert not any(map(is_alive, alive))


def test_a_start_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail cannot start, for example, when all processes run already."""
    from reknit.elastic.multiprocessing.tail_log import TailLog

    def fails(self: TailLog) -> TailLog:
        read_pids(tmp_path / "pids", 1)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(TailLog, "start", fails)
    with pytest.raises(RuntimeError, match="new thread"):
        shell(WAITS, args=(str(tmp_path / "pids"),))
    assert not any(map(is_alive, read_pids(tmp_path / "pids", 1)))


def test_a_keeper_that_cannot_be_started_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is left on this host, or the keeper is killed before it is ready."""
    from reknit.elastic.multiprocessing import shared

    def fails(env: object) -> Keeping:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    start = shared.by_exec
    for by_exec in (fails, lambda env: killed_at_once(lambda: start(env))()):
        monkeypatch.setattr(shared, "by_exec", by_exec)
        with pytest.raises(CannotStart, match="keeper"):
            shell("true")


def test_a_program_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    """By SIGKILL, so it could clean up nothing."""
    pids = tmp_path / "pids"
    run_alone(
        """
        import os, subprocess, sys
        script = '''
        import os, signal, sys
        from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        specs = DefaultLogsSpecs("/dev/null")
        context = start_processes("t", "/bin/sh", {0: ("-c", sys.argv[1], sys.argv[2])}, {0: {}}, specs)
        if os.fork() == 0:  # a child of the program, which holds all its descriptors
            print(os.getpid(), file=open(sys.argv[2], "a"), flush=True)
        signal.pause()
        '''
        import textwrap
        from tests.support.waiting import is_alive, read_pids, until
        host = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script), *sys.argv[1:]], start_new_session=True)
        one, other = read_pids(sys.argv[2], 2)
        host.kill()
        host.wait()
        until(lambda: not (is_alive(one) and is_alive(other)))
        os.killpg(host.pid, 9)
        until(lambda: not (is_alive(one) or is_alive(other)))
        """,
        IGNORES,
        str(pids),
    )


@pytest.mark.alone
def test_a_child_of_the_program_has_nothing_to_do_with_the_processes(tmp_path: Path) -> None:
    """A process pool forks while they run. Its end must not end them, and it cannot wait for them."""
    context = shell(WAITS, args=(str(tmp_path / "pids"),))
    alive = read_pids(tmp_path / "pids", 1)
    if (pid := os.fork()) == 0:
        status = 1
        try:
            context.close()
            context.wait(0)
        except RuntimeError as error:
            status = 0 if "belong to the parent" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert context.wait(0) is None
    assert all(map(is_alive, alive))
    context.close()


def test_a_keeper_that_is_killed_fails_its_processes(tmp_path: Path) -> None:
    """All of them are gone with it, and the reason is said."""
    context = shell(WAITS, WAITS, args=(str(tmp_path / "pids"),))
    read_pids(tmp_path / "pids", 2)
    (keeper,) = psutil.Process().children()
    keeper.kill()
    result = result_of(context)
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {0: -9, 1: -9}
    assert "keeper" in result.failures[0].message


# ---- signals of this program ----


def sends(name: str, go: Path) -> str:
    """A script that sends this process a signal when the file `go` is there: not while the context is still made."""
    return f"while [ ! -e {go} ]; do sleep 0.01; done; kill -{name} {os.getpid()}"


def test_a_signal_ends_the_wait(tmp_path: Path) -> None:
    """The caller hands it on, as torch's documentation shows. Afterwards the handlers of before are back."""
    before = signal.getsignal(signal.SIGHUP)
    context = shell(f"{sends('HUP', tmp_path / 'go')}; {WAITS}", args=(str(tmp_path / "pids"),))
    (tmp_path / "go").touch()
    with pytest.raises(SignalException) as caught:
        context.wait()
    assert caught.value.sigval is signal.SIGHUP
    context.close(caught.value.sigval, timeout=30)
    assert signal.getsignal(signal.SIGHUP) is before
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode in (-signal.SIGHUP, 129)


def test_signals_during_a_close_shorten_it(tmp_path: Path) -> None:
    """A process that ignores SIGTERM has an hour. The operator sends two further signals, and is told so at the end."""
    again = f"trap 'kill -TERM {os.getpid()}; sleep 0.2; kill -INT {os.getpid()}' TERM; echo $$ >> $0"
    context = shell(f"{again}; while true; do sleep 1000 & wait; done", args=(str(tmp_path / "pids"),))
    alive = read_pids(tmp_path / "pids", 1)
    with pytest.raises(SignalException) as caught:
        context.close(timeout=3600)
    assert caught.value.sigval is signal.SIGTERM
    assert not any(map(is_alive, alive))


def test_an_interrupt_that_is_not_taken_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook wants its KeyboardInterrupt, and sets the variable."""
    with monkeypatch.context() as patch:
        patch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
        context = shell(f"{sends('INT', tmp_path / 'go')}; {IGNORES}", args=(str(tmp_path / "pids"),))
    (tmp_path / "go").touch()
    with pytest.raises(KeyboardInterrupt):
        context.wait()
    context.close(timeout=0)


def test_a_call_that_was_interrupted_half_way_costs_the_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may be lost then, for example the answer to the stop, for which nobody must wait."""
    from reknit.adapters.keeper.client.keeper_client import KeeperClient

    context = shell(IGNORES, args=(str(tmp_path / "pids"),))
    alive = read_pids(tmp_path / "pids", 1)

    def interrupted(self: KeeperClient, now: float) -> list[Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeeperClient, "events", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.wait()
    context.close(timeout=3600)
    assert not any(map(is_alive, alive))
    result = context.wait(0)
    assert result is not None
    assert result.failures[0].exitcode == -9


# ---- threads, and one keeper for several starts ----


def test_two_at_once_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two agents in one program. No thread but the main one can take signals."""
    results: dict[int, RunProcsResult] = {}

    def runs(code: int) -> None:
        results[code] = result_of(shell(f"exit {code}", "sleep 1000"))

    threads = [threading.Thread(target=runs, args=(code,)) for code in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {code: result.failures[0].exitcode for code, result in results.items()} == {3: 3, 4: 4}


def test_successive_contexts_share_a_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart then costs no new keeper. When this process has set a variable, there is another one, which has it."""
    shared = SharedKeeper("agent")
    out = tmp_path / "out"

    def run(script: str) -> RunProcsResult:
        return result_of(shell(f"echo $PPID $ADDED >> {out}; {script}", "sleep 1000", _shared=shared))

    assert run("exit 3").failures[0].exitcode == 3
    assert run("exit 4").failures[0].exitcode == 4
    with monkeypatch.context() as patch:
        patch.setenv("ADDED", "yes")
        assert run("exit 5").failures[0].exitcode == 5
    first, second, third = out.read_text().splitlines()
    assert first == second
    assert third.split()[0] != first
    assert third.split()[1] == "yes"
    shared.close()
    shared.close()
    with pytest.raises(RuntimeError, match="closed"):
        run("true")


def test_a_context_leaves_nothing_on_a_shared_keeper(tmp_path: Path) -> None:
    """A context that is dropped must not disturb the next one."""
    shared = SharedKeeper("agent")
    context = shell(IGNORES, args=(str(tmp_path / "pids"),), _shared=shared)
    alive = read_pids(tmp_path / "pids", 1)
    del context
    gc.collect()
    until(lambda: not any(map(is_alive, alive)))
    assert not result_of(shell("true", _shared=shared)).is_failed()
    shared.close()


def test_two_contexts_at_once_on_a_shared_keeper_are_refused(tmp_path: Path) -> None:
    """The second would end the processes of the first."""
    shared = SharedKeeper("agent")
    context = shell(WAITS, args=(str(tmp_path / "pids"),), _shared=shared)
    with pytest.raises(RuntimeError, match="other processes"):
        shell("true", _shared=shared)
    assert context.wait(0) is None
    context.close()
    shared.close()
