"""`reknit status` beside real jobs: from this host, and from their stores."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.asking import documented
from tests.support.command import REKNIT, Run
from tests.support.etcd import Etcd, there
from tests.support.nodes import BAD, CONF, Nodes, at_etcd, at_file, ended
from tests.support.stores import free_port
from tests.support.verbs import ask
from tests.support.waiting import PATIENCE_S, read_pids, until

HOST = os.uname().nodename
STEPS = """
    import os, signal, reknit
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    restart, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
    if restart < int(os.environ.get("FAILURES", 0)) and rank == 0:
        raise ValueError("no such file")
    for step in range(20 + 10 * rank, 100):
        reknit.progress(step)
        if step % 10 == 0:
            fd = os.open("pids", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.write(fd, b"%d\\n" % os.getpid())
        signal.sigwait([signal.SIGUSR1])
"""
"""Rank 0 is at step 20 and rank 1 at step 30. SIGUSR1 takes a worker one step further."""


def data(job: Run, *argv: str) -> list[dict[str, Any]]:
    """What is told as JSON: an object for each agent."""
    return [json.loads(line) for line in ask(job, "status", "--json", *argv)[1].splitlines()]


def with_steps(job: Run, *argv: str) -> dict[str, Any]:
    """What is told of the only agent, when all its workers have reported progress."""

    def told() -> dict[str, Any]:
        found = data(job, *argv)
        ranks = found[0]["workers"]["ranks"] if len(found) == 1 else []
        return found[0] if ranks and all(rank["step"] is not None for rank in ranks) else {}

    return until(told, "the workers' steps")


def test_a_job_of_this_host(tmp_path: Path) -> None:
    """Round, restarts, who takes part, and how far each worker is: all that one wants to know first."""
    with Run(tmp_path, "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=digits", "w.py", script=STEPS) as job:
        with_steps(job)
        status, out, err = ask(job, "status")
        pids = read_pids(tmp_path / "pids", 2)
    assert (status, err) == (0, "")
    first = min(pids, key=lambda pid: out.index(f"pid {pid}"))
    second = next(pid for pid in pids if pid != first)
    ago = r"progress \d+\.\d s ago"
    wanted = [
        r'job "digits": round 0 runs, 0 of 3 restarts spent, its agent here has run for [\d.]+ s',
        rf"  members: {HOST} \(ranks 0-1\)",
        rf"  this node, {HOST}, runs the workers of round 0, ranks 0 to 1 of 2, for [\d.]+ s \(agent: pid {job.pid}\)",
        r"    workers: \S*python\S* -u w\.py",
        rf"    rank 0  pid {first}  step 20, {ago}, 10 behind",
        rf"    rank 1  pid {second}  step 30, {ago}",
    ]
    lines = out.splitlines()
    assert len(lines) == len(wanted)
    for line, pattern in zip(lines, wanted, strict=True):
        assert re.fullmatch(pattern, line)


def test_as_data(tmp_path: Path) -> None:
    """Scripts read it. The fields are those that the documentation promises."""
    with Run(tmp_path, "--nproc-per-node=2", "--rdzv-id=digits", "w.py", "--lr=3", script=STEPS) as job:
        told = with_steps(job)
        pids = read_pids(tmp_path / "pids", 2)
    for part, fields in documented().items():
        holder = told[part] if part != "ranks" else told["workers"]["ranks"][0]
        assert fields <= holder.keys()
    assert (told["job"]["run_id"], told["job"]["phase"], told["agent"]["doing"]) == ("digits", "running", "running")
    assert (told["agent"]["pid"], told["agent"]["command"][-2:]) == (job.pid, ["w.py", "--lr=3"])
    ranks = told["workers"]["ranks"]
    assert [(each["rank"], each["local_rank"], each["step"]) for each in ranks] == [(0, 0, 20), (1, 1, 30)]
    assert {each["pid"] for each in ranks} == set(pids)
    assert all(each["progress_s"] >= 0 for each in ranks)


def test_after_a_restart(tmp_path: Path) -> None:
    """What it has cost, and why: the log may be on another screen."""
    with Run(tmp_path, "--max-restarts=3", "w.py", script=STEPS, env={"FAILURES": "2"}) as job:
        told = with_steps(job)
        assert (told["job"]["round"], told["job"]["restarts_spent"], told["workers"]["round"]) == (2, 2, 2)
        (failure,) = told["job"]["failures"]
        assert (failure["node"], failure["rank"], failure["cause"], failure["blamed"]) == (HOST, 0, "exit", True)
        lines = ask(job, "status")[1].splitlines()
        assert ": round 2 runs, 2 of 3 restarts spent, " in lines[0]
        why = f"rank 0 on node {HOST} failed: exit code 1, ValueError: no such file"
        assert lines[2] == f"  the round before ended: {why}"


def test_a_node_is_missing(tmp_path: Path) -> None:
    """A job that does not begin: who is there, and how many are not. Later, who waits for a place."""
    with Nodes(tmp_path, "--nnodes=2", *at_file(tmp_path)) as nodes:
        (a,) = nodes.start("a")
        a.says("waiting for nodes")
        told = until(lambda: out if "joined" in (out := ask(a, "status")[1]) else "", "the node to have joined")
        head, *lines = told.splitlines()
        assert head.startswith('job "j": round 0 is gathered, 0 of 0 restarts spent, ')
        assert lines[:2] == ["  joined: a", "  missing: 1 more node, of at least 2"]
        assert lines[2].startswith("  this node, a, waits for round 0: 1 of at least 2 nodes are there, for ")
        assert len(lines) == 4
        (b,) = nodes.start("b")
        nodes.formed(a, b)
        nodes.start("c")
        # The agent that tells of the job is another one than c, and may learn later that c is there.
        out = until(lambda: out if "  standby: c\n" in (out := ask(a, "status")[1]) else "", "a standby")
        assert (out.count('job "j": round 0 runs, '), out.count("  this node, ")) == (1, 3)
        assert "  this node, c, stands by while round 0 runs, for " in out


def test_jobs_of_one_host(tmp_path: Path) -> None:
    """Each job has its lines, and a name picks one of them. None is an error for scripts."""
    with (
        Run(tmp_path, "--rdzv-id=one", "w.py", script=STEPS) as one,
        Run(tmp_path, "--rdzv-id=two", "w.py") as two,
    ):
        until(lambda: len(data(one)) == 2, "both agents")
        assert {told["agent"]["pid"] for told in data(one)} == {one.pid, two.pid}
        assert [told["agent"]["pid"] for told in data(one, "two")] == [two.pid]
        assert len(data(one, "one", "two")) == 2
        line = "reknit: no agent of job three runs on this host; jobs that run here: one, two\n"
        assert ask(one, "status", "three") == (1, "", line)
    assert ask(one, "status") == (1, "", "reknit: no agent runs on this host\n")
    assert ask(one, "status", "--json") == (1, "", "reknit: no agent runs on this host\n")


def test_an_agent_that_is_stopped_is_shown(tmp_path: Path) -> None:
    """Whoever asks why a job stands still needs an answer just then. Nothing is asked of the agent."""
    with Run(tmp_path, "w.py", script=STEPS) as job:
        before = with_steps(job)
        job.signal(signal.SIGSTOP)
        (worker,) = read_pids(tmp_path / "pids", 1)
        os.kill(worker, signal.SIGUSR1)
        until(lambda: with_steps(job)["workers"]["ranks"][0]["step"] == 21, "the next step")
        assert with_steps(job)["job"] == before["job"]
        os.kill(worker, signal.SIGSTOP)
        until(lambda: with_steps(job)["workers"]["ranks"][0]["stopped"], "the worker to be seen stopped")
        _, out, _ = ask(job, "status")
        assert f"(agent: pid {job.pid}, its process is stopped)" in out
        assert f"rank 0  pid {worker}  its process is stopped, step 21, progress " in out
        os.kill(worker, signal.SIGCONT)
        job.signal(signal.SIGCONT)


# ---- from the store ----


def test_a_job_in_its_store(tmp_path: Path, backend: tuple[tuple[str, ...], Callable[[], object]]) -> None:
    """Any host may ask, with the words of `reknit run`. The answer is that of the nodes, and nothing is written."""
    where, content = backend
    named = [word for word in where if not word.startswith("--local-addr")]
    with Nodes(tmp_path, "--nnodes=1:3", "--max-restarts=2", *where) as nodes:
        a, b = nodes.start("a", "b")
        first = nodes.formed(a, b)
        os.kill(first[1].pid, BAD)
        nodes.formed(a, b, after=first)
        until(lambda: {told["agent"]["doing"] for told in data(a)} == {"running"}, "both nodes to run")
        for node in (a, b):
            node.freeze()
        before = content()
        status, out, err = ask(a, "status", *named)
        (told,) = data(a, *named)
        assert content() == before
        assert told.keys() == {"job"}
        assert [told["job"]] * 2 == [each["job"] for each in data(a)]
        for node in (a, b):
            node.thaw()
    names = [member["node"] for member in told["job"]["members"]]
    assert sorted(names) == ["a", "b"]
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == [
        f'job "j": round {told["job"]["round"]} runs, 1 of 2 restarts spent',  # one of them may have begun alone
        f"  members: {names[0]} (rank 0), {names[1]} (rank 1)",
    ]
    assert re.fullmatch(r"  the round before ended: rank 1 on node [ab] failed: exit code 1.*", out.splitlines()[2])


@pytest.fixture(params=["file", *(pytest.param(name, marks=pytest.mark.slow) for name in ("c10d", "etcd"))])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[tuple[str, ...], Callable[[], object]]:
    """Options that name a store which no node hosts, and what gives all that is in it."""
    if request.param == "file":
        return at_file(tmp_path), lambda: _files(tmp_path / "shared")
    if request.param == "etcd":
        server: Etcd = request.getfixturevalue("server")
        return at_etcd(server), lambda: (server.revision(), there(server, "/reknit"))
    port: int = request.getfixturevalue("port")
    where = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=j", f"{CONF},is_host=0")
    return where, lambda: _keys(port)


def _files(folder: Path) -> dict[str, tuple[bytes, int]]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def _keys(port: int) -> dict[str, bytes]:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False)
    return {key: store.get(key) for key in sorted(store.list_keys())}


def test_a_job_that_has_ended_in_its_store(tmp_path: Path) -> None:
    """The nodes are gone, and one line says how it went."""
    where = at_file(tmp_path)
    with Nodes(tmp_path, "--nnodes=2", "--max-restarts=0", *where) as nodes:
        a, b = nodes.start("a", "b")
        nodes.formed(a, b)
        a.tell(BAD)
        assert ended(a, b) == [1, 1]
        status, out, err = ask(a, "status", *where[:3])
    assert (status, err) == (0, "")
    (line,) = out.splitlines()
    assert re.match(r'job "j": failed: .*rank [01] on node a failed: exit code 1', line)
    assert line.endswith("0 of 0 restarts spent")


def test_what_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """With the status that an agent would have there: scripts know it already."""
    with Nodes(tmp_path, *at_file(tmp_path), env={"REKNIT_RDZV_SECRET": "hush"}) as nodes:
        (a,) = nodes.start("a", argv=("--nnodes=1:2",))
        nodes.formed(a)
        port = free_port()
        at = {
            "c10d": ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"),
            "etcd": ("--rdzv-backend=etcd", f"--rdzv-endpoint=127.0.0.1:{port}"),
            "file": at_file(tmp_path)[:2],
            "none": ("--rdzv-backend=file", f"--rdzv-endpoint={tmp_path}/none"),
        }
        for name, status, text in (
            ("c10d", 74, "the store cannot be reached: "),
            ("etcd", 74, "the store cannot be reached: "),
            ("file", 77, ""),
            ("none", 69, "no such job has begun in this store: there is no journal of job j in "),
        ):
            found, out, err = ask(a, "status", *at[name], "j")
            assert (found, out, err.count("\n")) == (status, "", 1), name
            assert err.startswith(f"reknit: {text}")
        assert not (tmp_path / "none").exists()
        assert ask(a, "status", *at["file"], "j", env={"REKNIT_RDZV_SECRET": "hush"})[0] == 0
        without = "reknit: reknit status with --rdzv-endpoint needs the name of the job: --rdzv-id\n"
        assert ask(a, "status", *at["file"]) == (2, "", without)


def test_a_job_that_has_not_begun_in_its_store(backend: tuple[tuple[str, ...], Callable[[], object]]) -> None:
    """A mistake in the name must not look like a job, and must not make one."""
    (where, content), env = backend, {name: value for name, value in os.environ.items() if name[:7] != "REKNIT_"}
    named = [word for word in where if word.startswith(("--rdzv-backend", "--rdzv-endpoint"))]
    before = content()
    for words in ([], ["--json"]):
        command = [REKNIT, "status", *words, *named, "nosuch"]
        done = subprocess.run(command, check=False, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (69, "", 1)
        assert done.stderr.startswith("reknit: no such job has begun in this store: ")
        assert "there is no journal of job nosuch" in done.stderr
    assert content() == before


# ---- again and again ----


class Watching:
    """A `reknit status --watch`, and what it has shown so far. Use `with`."""

    def __init__(self, job: Run, *jobs: str, on_terminal: bool) -> None:
        self._fd, theirs = pty.openpty() if on_terminal else os.pipe()
        os.set_blocking(self._fd, False)
        command = [REKNIT, "status", "--watch", *jobs]
        self.process = subprocess.Popen(
            command, env=job.base_env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
        )
        os.close(theirs)
        self.text = ""

    def shows(self, pattern: str) -> None:
        until(lambda: re.search(pattern, self._read()), f"{pattern} in {self.text!r}")

    def _read(self) -> str:
        """All that it has shown so far."""
        try:
            self.text += os.read(self._fd, 1 << 20).decode()
        except OSError:
            pass  # nothing is there, or nobody writes any more
        return self.text

    def __enter__(self) -> Watching:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        os.close(self._fd)

    def interrupt(self) -> int:
        """Ctrl-C. Returns the status."""
        self.process.send_signal(signal.SIGINT)
        return self.ends()

    def ends(self) -> int:
        """Wait for the end. Returns the status."""
        until(lambda: self._read() and self.process.poll() is not None, "the end of watching")  # a full pipe blocks it
        self._read()
        return self.process.wait()


@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "pipe"])
def test_it_can_be_watched(tmp_path: Path, on_terminal: bool) -> None:
    """Until Ctrl-C, which is no failure. The terminal is as before."""
    with Run(tmp_path, "--rdzv-id=digits", "w.py", script=STEPS) as job:
        with_steps(job)
        with Watching(job, on_terminal=on_terminal) as watching:
            watching.shows(r"step 20\b")
            (worker,) = read_pids(tmp_path / "pids", 1)
            os.kill(worker, signal.SIGUSR1)
            watching.shows(r"step 21\b")
            assert watching.interrupt() == 0
            assert "Traceback" not in watching.text
            if on_terminal:
                left = [watching.text.rfind(f"\x1b[?{mode}") for mode in ("1049h", "1049l", "25l", "25h")]
                assert left[0] < left[1], "the other screen was left"
                assert left[2] < left[3], "the cursor is shown"


def test_a_job_that_begins_later_is_watched(tmp_path: Path) -> None:
    """One terminal stays open over several jobs."""
    with Run(tmp_path, sys.executable, "-c", "") as nothing:
        nothing.end()
        with Watching(nothing, on_terminal=True) as watching:
            watching.shows("no agent runs on this host")
            with Run(tmp_path, "--rdzv-id=later", "w.py", script=STEPS):
                watching.shows('job "later"')
            watching.text = ""
            watching.shows("no agent runs on this host")


@pytest.mark.parametrize("on_terminal", [True, False], ids=["terminal", "pipe"])
@pytest.mark.parametrize(
    ("signum", "how"),
    [
        (signal.SIGTERM, 'job "digits": stopped by SIGTERM'),
        (
            signal.SIGKILL,
            "the agent of node [^ ]+ ended without a word some time after .*: it was killed, or its host died",
        ),
    ],
    ids=["SIGTERM", "SIGKILL"],
)
def test_watching_a_job_ends_with_it(tmp_path: Path, signum: int, how: str, on_terminal: bool) -> None:
    """A name means this job, and no later one. The last lines say how it has ended, once."""
    with Run(tmp_path, "--rdzv-id=digits", "w.py", script=STEPS) as job:
        with_steps(job)
        with Watching(job, "digits", on_terminal=on_terminal) as watching:
            watching.shows(r"step 20\b")
            job.signal(signum)
            assert watching.ends() == 0
            assert len(re.findall(how, watching.text)) == 1
            assert "no agent" not in watching.text
            assert "waiting for" not in watching.text


ENDS = """
    import os, signal
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
    print(os.getpid(), file=open("pids", "a", buffering=1))
    if signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR2:
        raise ValueError("no such file")
"""


def test_a_job_is_awaited_and_watched_to_its_end(tmp_path: Path) -> None:
    """One can begin to watch before the job begins. That is said once, and so is how the job has ended."""
    failed = rf"\nrank 0 on node {HOST} failed: exit code 1, ValueError: no such file\n"
    with Run(tmp_path, sys.executable, "-c", "") as nothing:
        nothing.end()
        for signum, how in ((signal.SIGUSR1, 'job "later": succeeded\n'), (signal.SIGUSR2, failed)):
            with Watching(nothing, "later", on_terminal=False) as watching:
                watching.shows("reknit: waiting for job later\n")
                with Run(tmp_path, "--rdzv-id=later", "w.py", script=ENDS) as job:
                    watching.shows(r"rank 0  pid \d+  running")
                    (pid,) = read_pids(tmp_path / "pids", 1)
                    os.kill(pid, signum)
                    job.end()
                    (tmp_path / "pids").unlink()
                assert watching.ends() == 0
                assert len(re.findall(how, watching.text)) == 1
                assert watching.text.count("waiting for") == 1
                assert "no agent" not in watching.text


def test_a_job_that_ends_between_two_looks(tmp_path: Path) -> None:
    """It is not waited for any more. An earlier job of this name is not meant."""
    with Run(tmp_path, "--rdzv-id=short", "w.py", script="raise SystemExit(3)") as job:
        job.end()
    with Watching(job, "short", "--json", on_terminal=False) as watching:
        watching.shows("reknit: waiting for job short\n")
        with Run(tmp_path, "--rdzv-id=short", "w.py", script="pass") as again:
            assert again.end() == 0
        assert watching.ends() == 0
        last = json.loads(watching.text.splitlines()[-1])
        assert (last["job"]["run_id"], last["job"]["ended"]["verdict"]) == ("short", "succeeded")


def test_a_job_in_its_store_is_watched_to_its_end(tmp_path: Path) -> None:
    """The same from another host: it is awaited, shown, and its end is told once."""
    where = at_file(tmp_path)
    with Nodes(tmp_path, "--nnodes=1:2", *where) as nodes, Run(tmp_path, sys.executable, "-c", "") as nothing:
        nothing.end()
        with Watching(nothing, *where[:3], on_terminal=False) as watching:
            watching.shows("reknit: waiting for job j\n")
            (a,) = nodes.start("a")
            nodes.formed(a)
            watching.shows('job "j": round 0 runs, ')
            a.tell(BAD)
            assert ended(a) == [1]
            assert watching.ends() == 0
            assert len(re.findall('job "j": failed: rank 0 on node a failed: exit code 1', watching.text)) == 1


def test_a_reader_that_goes_away(tmp_path: Path) -> None:
    """`reknit status | head -1` shows no error."""
    with Run(tmp_path, "w.py", script=STEPS) as job:
        with_steps(job)
        read_end, write_end = os.pipe()
        os.close(read_end)
        done = subprocess.run(
            [REKNIT, "status"], env=job.base_env, stdout=write_end, stderr=subprocess.PIPE, timeout=PATIENCE_S
        )
        os.close(write_end)
        assert (done.returncode, done.stderr) == (0, b"")
