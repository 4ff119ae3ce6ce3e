"""Agent and keeper are killed in one instant. The next start ends what a worker has left in a session of its own.

The daemon has closed all descriptors that it has inherited.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.support.alone import ENV, ROOT, command, run_alone
from tests.support.command import Run, run
from tests.support.places import below, locks, move
from tests.support.waiting import is_alive, read_pids, until

HOSTS = {
    "launch": """
        import sys
        from reknit import launch
        from tests.support import called
        launch(called.daemonize_and_pause, (sys.argv[2],), start_method=sys.argv[1])
    """,
    "start_processes": """
        import sys
        from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        from tests.support import called
        args, specs = {0: (sys.argv[2],)}, DefaultLogsSpecs("/dev/null")
        start_processes("t", called.daemonize_and_pause, args, {0: {}}, specs, start_method=sys.argv[1]).wait()
    """,
    "LocalElasticAgent": """
        import sys
        from reknit.elastic.agent.server.api import WorkerSpec
        from reknit.elastic.agent.server.local_elastic_agent import LocalElasticAgent
        from tests.support import called
        spec = WorkerSpec("trainer", 1, entrypoint=called.daemonize_and_pause, args=(sys.argv[2],), max_restarts=0)
        LocalElasticAgent(spec, sys.argv[1]).run()
    """,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the locks is this test's own."""
    return move(monkeypatch, tmp_path)


def killed_with_its_keeper(host: str, start_method: str, path: Path) -> int:
    """Run this host until its function has made a daemon, and kill host and keeper. Returns the daemon's pid."""
    process = subprocess.Popen(command(HOSTS[host], start_method, str(path)), env=ENV, cwd=ROOT)
    (daemon,) = read_pids(path, 1)
    # The tracker of `multiprocessing` may be a child as well. It ends by itself.
    keepers = [child.pid for child in psutil.Process(process.pid).children() if is_alive(child.pid)]
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot start another keeper in between
    for pid in keepers:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()
    assert is_alive(daemon), "nobody is there who could know it"
    return daemon


@pytest.mark.parametrize(
    ("host", "start_method"),
    [
        *((host, "spawn") for host in HOSTS),
        *(pytest.param("launch", method, marks=pytest.mark.slow) for method in ("fork", "forkserver")),
    ],
)
def test_the_next_start_ends_a_daemon(host: str, start_method: str, tmp_path: Path, folder: Path) -> None:
    """Whoever starts next, and whatever was started before."""
    daemon = killed_with_its_keeper(host, start_method, tmp_path / "pid")
    try:
        run_alone("from reknit import launch; launch('true')")
        assert not is_alive(daemon)
        assert not locks(folder)
    finally:
        if is_alive(daemon):
            os.kill(daemon, signal.SIGKILL)


def test_a_start_of_processes_ends_what_was_left(tmp_path: Path, folder: Path) -> None:
    """As an agent does."""
    daemon = killed_with_its_keeper("launch", "spawn", tmp_path / "pid")
    run_alone("""
        from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
        context = start_processes("t", "/bin/true", {0: ()}, {0: {}}, DefaultLogsSpecs("/dev/null"))
        assert not context.wait().is_failed()
        context.close()
    """)
    assert not is_alive(daemon)
    assert not locks(folder)


BARE = """
    import os, sys
    with open("pids", "a") as file:
        file.write(f"{os.getpid()}\\n")
    os.closerange(3, 256)
    os.execve(sys.executable, [sys.executable, "-c", "import signal; signal.pause()"], {})
"""
"""A worker without an environment, which has closed the guard pipe."""


@pytest.mark.parametrize("nodes", ["one", "several"])
def test_the_next_start_ends_workers_that_have_cleared_their_environment(tmp_path: Path, nodes: str) -> None:
    """Neither the kernel nor their mark ends them. The agent has written down which processes they are."""
    argv = ["--nproc-per-node=2"]
    if nodes == "several":
        argv += several(tmp_path)
    with Run(tmp_path, *argv, "w.py", script=BARE) as first:
        pids = read_pids(tmp_path / "pids", 2)
        record = below(tmp_path)
        until(lambda: all(str(pid) in text for pid in pids for text in [written(record)]))
        keeper = first.keeper
        first.signal(signal.SIGSTOP)  # so that it cannot end them itself
        os.kill(keeper, signal.SIGKILL)
        first.signal(signal.SIGKILL)
        first.process.wait()
        assert all(map(is_alive, pids))
        status, second = run(tmp_path, *argv, "w.py", script="pass")
        assert status == 0, second.err
        assert not any(map(is_alive, pids))
        assert "ended 2 processes that an earlier agent had left behind" in second.said
        assert not locks(record)


DAEMON = """
    import os, signal, sys
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            code = "import os, signal; os.write(200, b'%d\\\\n' % os.getpid()); os.closerange(0, 256); signal.pause()"
            os.dup2(os.open("pids", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 200)
            os.execve(sys.executable, [sys.executable, "-c", code], {})
        os._exit(0)
    os.wait()
    signal.pause()
"""
"""A worker that leaves a daemon: an orphan in a session of its own, without an environment and without open files."""


@pytest.mark.parametrize("killed", ["both", "keeper"])
@pytest.mark.parametrize("nodes", ["one", "several", "several, then another job"])
def test_a_daemon_without_an_environment_is_ended(tmp_path: Path, nodes: str, killed: str) -> None:
    """Nobody has written it down, and it is the child of a process that lives on. It is known by its limits alone."""
    argv = [] if nodes == "one" else several(tmp_path)
    with Run(tmp_path, *argv, "w.py", script=DAEMON) as first:
        (daemon,) = read_pids(tmp_path / "pids", 1)
        keeper = first.keeper
        try:
            if killed == "both":
                first.signal(signal.SIGSTOP)  # so that it cannot end anything
                os.kill(keeper, signal.SIGKILL)
                first.signal(signal.SIGKILL)
                first.process.wait()
                assert is_alive(daemon)
                status, second = run(tmp_path, *([] if "another" in nodes else argv), "w.py", script="pass")
                assert status == 0, second.err
                assert "ended 1 process that an earlier agent had left behind" in second.said
                assert not locks(below(tmp_path))
            else:
                os.kill(keeper, signal.SIGKILL)
            until(lambda: not is_alive(daemon), "the end of the daemon")
        finally:
            if is_alive(daemon):
                os.kill(daemon, signal.SIGKILL)


PROGRAM = """
    import signal, sys
    from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
    if __name__ == "__main__":
        start_processes("t", sys.executable, {0: ("w.py",)}, {0: {}}, DefaultLogsSpecs()).wait()
"""


@pytest.mark.parametrize("what", ["run", "program"])
def test_the_next_start_removes_what_was_left_on_the_disk(tmp_path: Path, what: str) -> None:
    """Otherwise each kill leaves folders, until the disk of temporary files is full."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    argv = [sys.executable, "program.py"] if what == "program" else ["w.py"]
    env, script = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}, "import os, signal; open('up', 'w'); signal.pause()"
    with Run(tmp_path, *argv, script=script, env=env) as first:
        until((tmp_path / "up").exists)
        keeper = first.keeper
        first.signal(signal.SIGSTOP)
        os.kill(keeper, signal.SIGKILL)
        first.signal(signal.SIGKILL)
        first.process.wait()
    assert len(list(tmp_path.glob("reknit_*"))) == (1 if what == "program" else 2)
    status, second = run(tmp_path, "w.py", script="pass")
    assert status == 0, second.err
    assert not list(tmp_path.glob("reknit_*"))
    assert not locks(below(tmp_path))


def several(tmp_path: Path) -> list[str]:
    """Options of a job that could have several nodes."""
    argv = ["--nnodes=1:2", "--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/j", "--rdzv-id=j"]
    return [*argv, "--rdzv-conf=last_call_timeout=0", "--local-addr=127.0.0.1"]


def written(folder: Path) -> str:
    """The text of the file in the folder."""
    (name,) = locks(folder)
    file = folder / name
    return file.read_text()
