"""`reknit run` in trouble: what workers do to their streams, what the system refuses, and bugs of reknit itself."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reknit.app.cli.run import run as run_agent
from tests.support.command import REKNIT, STORY, STUBBORN, Run, run
from tests.support.places import below
from tests.support.waiting import PATIENCE_S, is_alive, read_pids, until


def launcher(tmp_path: Path, patch: str) -> tuple[str, str]:
    """A `reknit` with something broken in it."""
    path = tmp_path / "launcher.py"
    path.write_text(f"{patch}\nfrom reknit.app.cli.main import main\nmain()\n")
    return sys.executable, str(path)


# ---- bugs of our own ----


@pytest.mark.parametrize("event", ["WorkersStarted", "WorkersExited", "StopRequested"])
def test_a_bug_stops_the_workers_and_says_so(tmp_path: Path, event: str) -> None:
    """Exit status 70, the traceback for the report, and no worker left, whenever it strikes."""
    patch = f"""
import reknit.adapters.runtime.loop as loop
step = loop.step
def broken(agent, event):
    if type(event).__name__ == {event!r}:
        raise RuntimeError("planted")
    return step(agent, event)
loop.step = broken
"""
    dies = ["die"] if event == "WorkersExited" else ["ignore"]
    argv = (*launcher(tmp_path, patch), "run", "--nproc-per-node=2", STUBBORN, "pids", "grandchild", *dies)
    with Run(tmp_path, *argv) as job:
        if event == "StopRequested":
            read_pids(tmp_path / "pids", 4)
            job.signal(signal.SIGTERM)
        assert job.end() == 70, job.err
    assert "reknit: this is a bug in reknit; its workers were stopped. Please report:" in job.err
    assert "RuntimeError: planted" in job.err


def test_a_bug_while_reporting_is_a_bug_too(tmp_path: Path) -> None:
    """The last lines run after the workers are gone, and still must not end in silence."""
    patch = "import reknit.app.cli.running as m\ndef bad(*a, **k): raise KeyError('planted')\nm.final_lines = bad"
    status, job = run(tmp_path, *launcher(tmp_path, patch), "run", "w.py", script="pass")
    assert status == 70
    assert "KeyError: 'planted'" in job.err


# ---- agent and keeper are killed in one instant ----


def kill_both(job: Run) -> None:
    keeper = job.keeper
    job.signal(signal.SIGSTOP)  # the agent would otherwise end everything before it is killed itself
    os.kill(keeper, signal.SIGKILL)
    job.signal(signal.SIGKILL)
    job.process.wait(PATIENCE_S)


@pytest.mark.parametrize("options", [(), ("--log-dir=logs",), ("--log-dir=/dev/null",)], ids=str)
def test_a_daemon_of_a_killed_job_ends_before_the_next_job_starts(tmp_path: Path, options: tuple[str, ...]) -> None:
    """The kernel ends the worker's group, and nobody is left to end the daemon. It holds the GPU of the next job."""
    script = """
        for pid in open("pids").read().split():
            try:
                state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
            except FileNotFoundError:
                continue
            assert state in "XZ", pid
    """
    with Run(tmp_path, *options, STUBBORN, "pids", "grandchild", "ignore") as first:
        daemon, worker = read_pids(tmp_path / "pids", 2)
        kill_both(first)
        until(lambda: not is_alive(worker), "the kernel to end the worker")
        assert is_alive(daemon)
        try:
            status, second = run(tmp_path, *options, "w.py", script=script)
        finally:
            if is_alive(daemon):
                os.kill(daemon, signal.SIGKILL)
        assert status == 0, second.err
        assert "ended 1 process that an earlier agent had left behind" in second.said
    assert not [path for path in below(tmp_path).iterdir() if path.is_file()], "no lock is left"


def test_a_keeper_that_dies_before_the_report_is_written(tmp_path: Path) -> None:
    """A script reads the origin of the status in the last line. The line that the keeper is lost comes before it."""
    patch = """
import os, signal
import reknit.app.cli.running as m
wait = m._wait_for_reader
def kill_first(console, wired, result):
    os.kill(wired.keeper.pid, signal.SIGKILL)
    os.waitid(os.P_PID, wired.keeper.pid, os.WEXITED | os.WNOWAIT)
    wait(console, wired, result)
m._wait_for_reader = kill_first
"""
    status, job = run(tmp_path, *launcher(tmp_path, patch), "run", "--no-python", "sh", "-c", "exit 71")
    assert status == 71
    assert "the keeper of this node's workers is lost: killed by SIGKILL" in job.err
    assert re.match(r"  rank 0 failed first \(.*\): exit code 71$", job.said[-3])
    assert job.said[-1] == "exit status 71: from the worker of rank 0"


# ---- what the system refuses ----


def test_a_worker_that_cannot_be_spawned(tmp_path: Path) -> None:
    """EAGAIN: too many processes. Those that run are stopped, and the reason is the system's."""
    patch = """
import errno, os
real, calls = os.posix_spawnp, []
def spawn(*args, **settings):
    calls.append(1)
    if len(calls) == 3:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), args[0])
    return real(*args, **settings)
os.posix_spawnp = spawn
"""
    argv = (*launcher(tmp_path, patch), "run", "--nproc-per-node=4", STUBBORN, "pids")
    status, job = run(tmp_path, *argv)
    assert status == 71
    why = f"cannot start {sys.executable}: Resource temporarily unavailable"
    assert job.said[-3:] == [
        f"  rank 2 failed first (node N, local rank 2): exit code 71, {why}",
        STORY,
        "exit status 71: reknit could not run the worker of rank 2",
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so that the limit holds")
def test_a_real_limit_of_processes(tmp_path: Path) -> None:
    """What a container's or user's limit does: for each limit a clear end, never a traceback or a hang."""
    tmp_path.chmod(0o777)
    for limit in (1, 2, 3, 4, 5):
        patch = f"""
import os, resource, sys
import ctypes, inspect, locale, psutil, re, shutil, traceback, reknit.core.text.describe
import reknit.app.cli.run, reknit.app.cli.parsing, reknit.app.cli.running, reknit.adapters.keeper.process.keeper
import reknit.adapters.keeper.failures.error_files
import reknit.adapters.keeper.failures.tracebacks
os.setgroups([]); os.setgid(65534); os.setuid(65534 - 7)
resource.setrlimit(resource.RLIMIT_NPROC, ({limit}, {limit}))
"""
        status, job = run(tmp_path, *launcher(tmp_path, patch), "run", "--nproc-per-node=2", "--no-python", "true")
        reasons = ("Resource temporarily unavailable", "no thread for the workers' output")
        assert status == (71 if any(reason in job.err for reason in reasons) else 0), (limit, job.err)
        assert limit > 1 or status == 71, "the limit holds"
        assert "Traceback" not in job.err


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """More workers than the limit of open files allows: said, and nothing is left."""
    resource_limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))"
    argv = (*launcher(tmp_path, resource_limit), "run", "--nproc-per-node=20", STUBBORN, "pids")
    status, job = run(tmp_path, *argv)
    assert status == 71, job.err
    assert "Too many open files" in "".join(job.said[-3:-1])
    assert "bug" not in job.err


# ---- what workers do to their streams ----


def test_output_that_is_not_text(tmp_path: Path) -> None:
    """It is the worker's: not a byte is changed on its way."""
    script = r"import os; os.write(1, b'\xff\x00out'); os.write(2, b'\xfe\x00err\n'); raise SystemExit(2)"
    with open(tmp_path / "err", "wb") as err:
        status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script, stderr=err)
    assert status == 2
    data = (tmp_path / "err").read_bytes()
    assert b"\xfe\x00err\n" in data
    assert b"reknit:     \\xfe\\x00err\n" in data, "in the report it can be read"
    assert "\x00out" in job.out


def test_workers_read_our_stdin(tmp_path: Path) -> None:
    """`reknit run script < data` works as it does without us."""
    with open(tmp_path / "data", "w+") as data:
        data.write("hello")
        data.seek(0)
        _, job = run(tmp_path, "w.py", script="print(input())", stdin=data)
    assert job.out == "hello\n"


def test_a_script_that_closes_its_streams(tmp_path: Path) -> None:
    """Nothing to read is no reason to wait, or to take the worker for dead."""
    script = "import os; os.close(0); os.close(1); os.close(2); open('ran', 'w').close(); os._exit(6)"
    status, job = run(tmp_path, "w.py", script=script)
    assert status == 6
    assert (tmp_path / "ran").exists()
    assert job.said[-2:] == ["  rank 0 failed first (node N, local rank 0, pid P): exit code 6", STORY]


def test_a_flood_on_stderr(tmp_path: Path) -> None:
    """Tens of megabytes arrive complete, and the agent does not keep them."""
    script = "import os\nfor _ in range(300): os.write(2, b'x' * 99_999 + b'\\n')\nos._exit(3)"
    with open(tmp_path / "err", "wb") as err:
        status, _ = run(tmp_path, "w.py", script=script, stderr=err)
    assert status == 3
    lines = (tmp_path / "err").read_bytes().split(b"\n")
    assert lines.count(b"x" * 99_999) == 300
    assert len(lines) < 400, "the report shows the last ones only"


def test_a_reader_that_leaves(tmp_path: Path) -> None:
    """`reknit run … | head -1` ends: the worker gets its SIGPIPE, as it would without us."""
    (tmp_path / "w.py").write_text("while True: print('line')")
    script = f"{{ {REKNIT} run w.py; echo $? >status; }} | head -1"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout == "line\n"
    until(lambda: (tmp_path / "status").exists() and (tmp_path / "status").read_text())
    assert (tmp_path / "status").read_text() in ("1\n", "120\n", "141\n")
    assert "bug" not in done.stderr
    assert done.stderr.count("reknit: nobody reads the stdout of this command any more") == 1
    assert "nobody reads its stdout any more" in done.stderr.splitlines()[-2]


def test_a_console_that_does_not_read_blocks_no_decision(tmp_path: Path) -> None:
    """A pager that is not scrolled must not keep the job from being ended."""
    script = "import os, signal\nopen('up', 'w').close()\nwhile True: os.write(2, b'x' * 1000)"
    with Run(tmp_path, "--shutdown-timeout=1", "w.py", script=script) as job:
        until((tmp_path / "up").exists)
        (pid,) = [p for p in job.left_over() if p not in (job.pid, job.keeper)]
        job.signal(signal.SIGTERM)
        until(lambda: not is_alive(pid), "the worker's end while nobody reads")
        assert job.end() == 128 + signal.SIGTERM


def test_the_report_waits_for_a_reader_behind_the_first_lines(tmp_path: Path) -> None:
    """`reknit run … | less`: the pipe was full before the keeper was ready, so no line has gone to the keeper."""
    patch = """
import os
import reknit.adapters.keeper.output.console as console
console.LAST_WORDS_S = 0.0
agent, flush = os.getpid(), console.ConsoleWriter.flush
def noted(self, deadline_s):
    if os.getpid() == agent and deadline_s > 0:
        open("waits", "w").close()
    return flush(self, deadline_s)
console.ConsoleWriter.flush = noted
"""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with open(ours, "rb") as reader:
        with open(theirs, "wb", buffering=0) as full:
            while full.write(b"x" * 4096):
                pass
            os.set_blocking(theirs, True)
            argv = (*launcher(tmp_path, patch), "run", "--rdzv-endpoint=h:1", "w.py")
            job = Run(tmp_path, *argv, script="raise SystemExit(3)", stderr=full)
        with job:
            until(lambda: (tmp_path / "waits").exists() or job.process.poll() is not None)
            said = reader.read()
            assert job.end() == 3
    assert b"without effect" in said
    assert b"rank 0 failed first" in said


def test_nobody_waits_twice_for_a_console_that_nobody_reads(tmp_path: Path) -> None:
    """A job that was asked to end drops after a second what nobody reads. Here later waits would never end."""
    patch = """
import reknit.adapters.keeper.process.keeper as keeper
import reknit.app.cli.run as command
keeper.LAST_WORDS_S = command.LAST_WORDS_S = 10_000
"""
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    with open(ours, "rb"), open(theirs, "wb", buffering=0) as full:
        while full.write(b"x" * 4096):
            pass
        os.set_blocking(theirs, True)
        script = "open('up', 'w').close(); import time; time.sleep(600)  # it is ended"
        with Run(tmp_path, *launcher(tmp_path, patch), "run", "w.py", script=script, stderr=full) as job:
            until((tmp_path / "up").exists)
            job.signal(signal.SIGTERM)
            assert job.end() == 128 + signal.SIGTERM


def test_own_lines_keep_their_order_although_two_processes_write_them(tmp_path: Path) -> None:
    """The console of the agent's own process may write the first lines late: here, when the last one was said."""
    patch = """
import os, threading
import reknit.app.cli.running as m
from reknit.adapters.keeper.output.console import ConsoleWriter
agent, has_said_all, write = os.getpid(), threading.Event(), ConsoleWriter._write
def late(*args):
    if os.getpid() == agent:
        has_said_all.wait()
    write(*args)
ConsoleWriter._write = late
real = m._wait_for_reader
def wait_for_reader(*args):
    has_said_all.set()
    real(*args)
m._wait_for_reader = wait_for_reader
"""
    argv = (*launcher(tmp_path, patch), "run", "--rdzv-endpoint=h:1", "--log-dir=logs", "--redirects=3", "w.py")
    status, job = run(tmp_path, *argv, script="raise SystemExit(3)")
    assert status == 3
    assert "without effect" in job.said[0], job.err
    assert "the workers' output" in job.said[1]
    assert "rank 0 failed first" in job.said[-3]


# ---- what is left for others ----


def test_our_own_error_file_names_the_culprit(tmp_path: Path) -> None:
    """Kubeflow, torchx and a surrounding torchrun read it; the workers must get another one than ours."""
    ours = tmp_path / "ours.json"
    script = """
        import os, signal
        assert os.environ["TORCHELASTIC_ERROR_FILE"] != os.environ["OURS"]
        if os.environ["RANK"] == "0": signal.pause()
        raise KeyError("lost")
    """
    env = {"TORCHELASTIC_ERROR_FILE": str(ours), "OURS": str(ours)}
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script, env=env)
    assert status == 1, job.err
    message = json.loads(ours.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("KeyError: 'lost'", 1)
    assert "raise KeyError" in message["extraInfo"]["py_callstack"]
    ours.unlink()
    assert run(tmp_path, "w.py", script="pass", env=env)[0] == 0
    assert not ours.exists(), "success leaves none"


def test_an_error_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    """Its folder may be gone by then."""
    env = {"TORCHELASTIC_ERROR_FILE": "/no/such/folder/e.json"}
    status, job = run(tmp_path, "w.py", script="raise SystemExit(9)", env=env)
    assert status == 9
    assert "bug" not in job.err


def test_a_refusal_needs_no_process(capfd: pytest.CaptureFixture[str]) -> None:
    """The function itself: a status, one line, no exception."""
    assert run_agent(["--bogus"]) == 2
    assert run_agent(["--help"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("usage: reknit run")
    assert err == "reknit: unknown option --bogus; see reknit run --help\n"


def test_an_agent_that_cannot_begin_leaves_nothing(tmp_path: Path) -> None:
    """One line, a status of its own, and neither a lock nor the folder that was made for its files."""
    argv = ("--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=a\nb")
    below(tmp_path).mkdir()
    below(tmp_path).chmod(0o1777)
    status, job = run(tmp_path, *argv, "w.py", script="pass")
    assert status == 69
    assert job.said == [
        f"the folder for this node's lock, {below(tmp_path)}, is open to other users; close it with chmod 1700",
        "exit status 69: the job's journal cannot be used as asked",
    ]
    assert sorted(os.listdir(tmp_path)) == [below(tmp_path).name, "w.py"]


def test_limits_are_the_users(tmp_path: Path) -> None:
    """The agent hands on what it was given: limits, mask, and no descriptor but one."""
    script = """
        import os, resource, signal
        print(resource.getrlimit(resource.RLIMIT_NOFILE), signal.pthread_sigmask(signal.SIG_BLOCK, []))
        paths = [f"/proc/self/fd/{fd}" for fd in range(3, 1000)]
        print([os.readlink(path).partition(":")[0] for path in paths if os.path.lexists(path)])
    """
    _, job = run(tmp_path, "w.py", script=script)
    first, second = job.out.splitlines()
    assert first == f"{resource.getrlimit(resource.RLIMIT_NOFILE)} set()"
    assert second == "['pipe']", "the guard pipe, by which the kernel ends a worker whose keeper dies"


def test_a_parent_that_ignores_and_blocks_sigterm(tmp_path: Path) -> None:
    """Its scheduler wants the job to end, and so do the workers, which get the signal as any program does."""
    starting = "import os, signal, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    starting += "; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); os.execv(sys.argv[1], sys.argv[1:])"
    script = "import os, signal; open('up', 'w'); signal.pause()"
    argv = (sys.executable, "-c", starting, REKNIT, "run", "--shutdown-timeout=1000", "w.py")
    with Run(tmp_path, *argv, script=script) as job:
        until((tmp_path / "up").exists)
        job.signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM, job.err


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        (
            "while umount -l /proc; do :; done 2>&-",
            "/dev/fd: reknit needs it, and it is there only if /proc is mounted",
        ),
        ("mount -t tmpfs -o ro none /tmp", "made in /tmp: Read-only file system; let TMPDIR name another folder"),
    ],
)
def test_a_host_without_what_reknit_needs(tmp_path: Path, mounts: str, said: str) -> None:
    """One true line, which says what is missing."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("this user cannot have mounts of its own")
    if REKNIT.startswith("/tmp/") and "/tmp" in mounts:
        pytest.skip("this environment would be hidden by the mount")
    argv = ("unshare", "-m", "sh", "-c", f'{mounts}; exec "$@"', "-", REKNIT, "run", "/bin/true")
    env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
    env |= {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "OMP_NUM_THREADS": "1", "PET_LOG_TIMES": "never"}
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    (line,) = done.stderr.splitlines()
    assert line.startswith("reknit: exit status 71: ")
    assert line.endswith(said)
    assert done.returncode == 71


@pytest.mark.parametrize("command", [REKNIT, f"{sys.executable} -m reknit"], ids=["reknit", "module"])
def test_without_stdin_stdout_and_stderr(tmp_path: Path, command: str) -> None:
    """Some init systems start a program so. Nothing of reknit's gets these numbers in agent, keeper or workers."""
    script = """
        import os
        parents = [os.getppid(), int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])]
        seen = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in parents for fd in range(3)]
        assert os.read(0, 1) == b""
        os.write(1, b"out"); os.write(2, b"err")
        open("seen", "w").write(" ".join(seen))
    """
    shell = f"import os; os.execvp('sh', ['sh', '-c', 'exec {command} run w.py <&- >&- 2>&-'])"
    status, _ = run(tmp_path, sys.executable, "-c", shell, script=script)
    assert status == 0
    assert (tmp_path / "seen").read_text().split() == [os.devnull] * 6


def test_output_for_a_slow_reader_is_never_lost(tmp_path: Path) -> None:
    """stdout may be data for another program. The job has ended long before this reader begins."""
    script = "for i in range(4000): print('a line of some data', i)"
    with open(tmp_path / "err", "wb") as err, Run(tmp_path, "w.py", script=script, stderr=err) as job:
        until(lambda: "waits until its output is read" in (tmp_path / "err").read_text(), "the line about the wait")
        assert job.end() == 0
    assert job.out.splitlines() == [f"a line of some data {i}" for i in range(4000)]


# ---- the lines of reknit's own ----

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), rf"{TIME} reknit: "),
        (("--log-times",), rf"{TIME} reknit: "),
        (("--log-times=always", "-v"), rf"{TIME} reknit: "),
        (("--log-times=never",), "reknit: "),
        (("--log-format=json",), r'\{"time": "\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", "message": "(?!reknit).*"\}$'),
    ],
)
def test_every_line_of_reknit_has_the_time_and_none_of_a_worker(
    tmp_path: Path, options: tuple[str, ...], line: str
) -> None:
    """Where stderr is no terminal. People compare these lines with those of other nodes."""
    script = "import sys; print('from the worker', file=sys.stderr); sys.exit(3)"
    env = {"PET_LOG_TIMES": "auto"} if not any("times" in option for option in options) else {}
    status, job = run(tmp_path, *options, "w.py", script=script, env=env)
    assert status == 3
    lines = job.err.splitlines()
    assert lines.count("from the worker") == 1
    assert [each for each in lines if not re.match(line, each)] == ["from the worker"]
    assert any("it had run for" in each for each in lines)


FAILS_ONCE = "import os\nif os.environ['REKNIT_ROUND'] == '0': raise SystemExit(4)"


@pytest.mark.parametrize("script", ["print('ran')", FAILS_ONCE])
def test_a_quiet_run_says_nothing_of_a_success(tmp_path: Path, script: str) -> None:
    """Not even of a restart, or that a variable was set."""
    status, job = run(tmp_path, "-q", "--nproc-per-node=2", "--max-restarts=1", "w.py", script=script)
    assert (status, job.err) == (0, "")


def test_a_quiet_run_says_why_it_has_failed(tmp_path: Path) -> None:
    """And nothing else."""
    status, job = run(tmp_path, "--quiet", "--nproc-per-node=2", "w.py", script="raise SystemExit(4)")
    assert status == 4
    assert job.err.startswith("reknit: the job failed: rank ")
    status, job = run(tmp_path, "--quiet", "no.py")
    assert status == 2
    assert "no.py" in job.err
