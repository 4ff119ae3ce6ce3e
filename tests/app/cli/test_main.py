"""The command as people and schedulers use it: real processes, from the command line to the exit status."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from reknit.app.cli.main import VERBS
from tests.support import meeting
from tests.support.command import REKNIT, STORY, STUBBORN, Run, refusal, run
from tests.support.stores import free_port
from tests.support.waiting import PATIENCE_S, is_alive, processor_share, read_pids, until

WAITS = "import signal, os; open(f'up{os.environ[\"RANK\"]}', 'w').close(); signal.pause()"
"""A worker that says that it runs and waits to be ended."""


def started(tmp_path: Path, count: int = 1) -> None:
    until(lambda: all((tmp_path / f"up{rank}").exists() for rank in range(count)), "the workers to run")


# ---- the lives of jobs ----


def test_a_job_that_succeeds(tmp_path: Path) -> None:
    """The smallest job: its output untouched, the agent's lines on stderr alone."""
    status, job = run(tmp_path, "--standalone", "w.py", "a", "--b=c", script="import sys; print(sys.argv[1:])")
    assert (status, job.out) == (0, "['a', '--b=c']\n")
    assert job.said == ["round 0: 1 node, 1 worker, master 127.0.0.1:PORT", "the job succeeded"]
    assert len(job.err.splitlines()) == 2, "and nothing else"


def test_a_job_that_is_knit_together_again(tmp_path: Path) -> None:
    """A failure within the budget is survived, and every decision is one line with its reason."""
    script = """
        import os, signal, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            if os.environ["RANK"] == "1": sys.exit(9)
            signal.pause()
    """
    status, job = run(tmp_path, "--nproc-per-node=2", "--max-restarts=3", "w.py", script=script)
    assert status == 0
    assert job.said == [
        "OMP_NUM_THREADS=1 for every worker, because it was not set",
        "round 0: 1 node, 2 workers, master 127.0.0.1:PORT",
        "rank 1 on node N failed: exit code 9; stopping this node's workers (SIGTERM, SIGKILL after 30 s)",
        "the workers failed within 1 s of their start, and start again in 0.2 s",
        "round 1 (restart 1 of 3): 1 node, 2 workers, master 127.0.0.1:PORT",
        "the job succeeded after 1 restart",
    ]


NOT_FOR_MEMORY = "but not by the kernel for lack of memory"


@pytest.mark.parametrize(
    ("script", "status", "how"),
    [
        ("raise SystemExit(3)", 3, "exit code 3"),
        ("raise SystemExit(255)", 255, "exit code 255"),
        ("import os; os.abort()", 128 + 6, "killed by SIGABRT"),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9, f"killed by SIGKILL, {NOT_FOR_MEMORY}"),
        ("import os; os.kill(os.getpid(), 40)", 128 + 40, "killed by signal 40"),
        ("1 / 0", 1, "exit code 1, ZeroDivisionError: division by zero"),
    ],
)
def test_the_status_is_the_failing_workers(tmp_path: Path, script: str, status: int, how: str) -> None:
    """Schedulers act on the exit status: torchrun gives 1 for everything, we say what the worker said."""
    found, job = run(tmp_path, "w.py", script=script)
    assert found == status
    assert f"rank 0 on node N failed: {how}" in job.said
    assert f"  rank 0 failed first (node N, local rank 0, pid P): {how}" in job.said


def test_everything_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    """A script has options of its own, with names that are ours, too."""
    script = "import sys; print(sys.argv[1:])"
    _, job = run(tmp_path, "w.py", "--nproc-per-node=7", "-h", "--", "--max-restarts", script=script)
    assert job.out == "['--nproc-per-node=7', '-h', '--', '--max-restarts']\n"
    _, job = run(tmp_path, "--role=x", "--", "w.py", "--", "-m")
    assert job.out == "['--', '-m']\n", "our own -- is ours, the second the script's"


def test_a_worker_can_run_a_job_of_its_own(tmp_path: Path) -> None:
    """Hyper-parameter searches nest launchers; the inner one must not take the outer one's place."""
    say = "import os; os.write(1, '{} {RANK} {MASTER_PORT}\\n'.format('%s', **os.environ).encode())"
    (tmp_path / "inner.py").write_text(say % "inner")
    script = f"""
        import os, subprocess, sys
        {say % "outer"}
        sys.exit(subprocess.run([{REKNIT!r}, "run", "--nproc-per-node=2", "inner.py"]).returncode)
    """
    status, job = run(tmp_path, "w.py", script=script)
    words = sorted(line.split() for line in job.out.splitlines())
    assert status == 0, job.err
    assert [line[:2] for line in words] == [["inner", "0"], ["inner", "1"], ["outer", "0"]]
    assert words[0][2] == words[1][2] != words[2][2]


def test_a_nested_failure_has_the_same_status(tmp_path: Path) -> None:
    """A status that changes on its way out is of no use."""
    (tmp_path / "inner.py").write_text("raise SystemExit(41)")
    script = f"import os; os.execv({REKNIT!r}, ['reknit', 'run', 'inner.py'])"
    status, job = run(tmp_path, "w.py", script=script)
    assert status == 41, job.err


# ---- command lines of torchrun ----


def test_called_by_the_name_of_torchrun(tmp_path: Path) -> None:
    """Job scripts that cannot be changed call `torchrun`: a link of that name is enough."""
    (tmp_path / "torchrun").symlink_to(REKNIT)
    (tmp_path / "w.py").write_text("import os; os.write(1, os.environ['RANK'].encode())")
    argv = [str(tmp_path / "torchrun"), "--standalone", "--nproc_per_node=1", "--start-method=spawn", "w.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, b"0"), done.stderr
    assert b"--start-method: without effect: " in done.stderr


def test_the_master_port_of_one_node_is_honoured_in_every_round(tmp_path: Path) -> None:
    """It is the most common option of all, and firewalls and scripts rely on it. Rank 0 serves anew in each round."""
    script = """
        from meeting import meet, os
        round_ = os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"{round_} {os.environ['MASTER_PORT']} {meet()}\\n".encode())
        os._exit(os.environ["RANK"] == "1" and round_ == "0")
    """
    (tmp_path / "meeting.py").write_text(meeting.TEXT)
    port = free_port()
    options = ("--nproc-per-node=2", "--max-restarts=1", f"--master-port={port}")
    status, job = run(tmp_path, *options, "w.py", script=script)
    assert status == 0, job.err
    lines = job.out.splitlines()
    assert {*lines} == {f"0 {port} 3", f"1 {port} 3"}
    assert lines.count(f"1 {port} 3") == 2


def test_a_master_port_that_somebody_else_has_is_named(tmp_path: Path) -> None:
    """Two jobs with one port: the second is told at once, and not by a traceback of torch."""
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        assert refusal(tmp_path, f"--master-port={port}", "w.py", script="pass") == (
            f"--master-port={port}: Address already in use"
        )


def test_a_script_from_the_standard_input(tmp_path: Path) -> None:
    """`torchrun -` gives the whole script to one worker and nothing to the others. Here each of them has it."""
    script = b"import os, sys\nos.write(1, f'{os.environ[\"RANK\"]} {sys.argv}\\n'.encode())\n" + b"#" * 200_000
    (tmp_path / "script").write_bytes(script)
    with open(tmp_path / "script", "rb") as file:
        status, job = run(tmp_path, "--nproc-per-node=3", "-", "a", stdin=file)
    assert status == 0, job.err
    assert sorted(job.out.splitlines()) == [f"{rank} ['-', 'a']" for rank in range(3)]
    assert {*os.listdir(tmp_path)} == {"script", f"reknit-{os.getuid()}"}, (
        "no file is left, besides the folder for locks"
    )


def test_a_script_that_would_have_to_be_typed(tmp_path: Path) -> None:
    """The agent runs in the background of a terminal: reading it would stop the agent for ever."""
    ours, theirs = os.openpty()
    try:
        said = refusal(tmp_path, "-", stdin=theirs)
    finally:
        os.close(ours)
        os.close(theirs)
    assert said == "script -: the standard input is a terminal; a file or a pipe is needed"


def test_each_worker_sees_one_gpu(tmp_path: Path) -> None:
    """torchrun's --virtual-local-rank: code for one GPU runs unchanged."""
    script = "import os; os.write(1, '{RANK} {LOCAL_RANK} {CUDA_VISIBLE_DEVICES}\\n'.format(**os.environ).encode())"
    options = ("--nproc-per-node=2", "--virtual-local-rank")
    status, job = run(tmp_path, *options, "w.py", script=script)
    assert (status, sorted(job.out.splitlines())) == (0, ["0 0 0", "1 0 1"]), job.err
    status, job = run(tmp_path, *options, "w.py", env={"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b,GPU-c"})
    assert (status, sorted(job.out.splitlines())) == (0, ["0 0 GPU-a", "1 0 GPU-b"]), job.err
    said = refusal(tmp_path, *options, "w.py", env={"CUDA_VISIBLE_DEVICES": "3"})
    assert said == "--virtual-local-rank: CUDA_VISIBLE_DEVICES=3 names fewer devices than 2 workers need"


def test_a_log_folder_without_output_is_not_announced(tmp_path: Path) -> None:
    """Whoever reads "the workers' output: DIR" looks for files in it."""
    assert "the workers' output" not in run(tmp_path, "--log-dir=logs", "w.py", script="pass")[1].err
    assert "the workers' output" in run(tmp_path, "--log-dir=logs", "--tee=1", "w.py")[1].err


def test_workers_may_have_the_console_to_themselves(tmp_path: Path) -> None:
    """`--output=inherit`: the worker's streams are ours, and not a pipe of reknit's."""
    script = "import os; print(*(os.fstat(fd).st_ino for fd in (1, 2)))"
    with open(tmp_path / "out", "wb") as out:
        status, job = run(tmp_path, "--output=inherit", "w.py", script=script, stdout=out, stderr=out)
    inode = os.stat(tmp_path / "out").st_ino
    assert status == 0
    assert f"{inode} {inode}" in (tmp_path / "out").read_text()
    assert job.out == job.err == ""


# ---- being told to end ----


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
@pytest.mark.parametrize("to", ["the agent", "everybody"])
def test_a_signal_ends_the_job_in_order(tmp_path: Path, signum: signal.Signals, to: str) -> None:
    """The scheduler's way to end a job: the workers hear of it, and the status says which signal it was.

    Some schedulers signal every process of a job. The keeper leaves it to the agent what to do about that.
    """
    script = f"""
        import os, signal, sys
        signal.signal(signal.SIGTERM, lambda *_: (open("told" + os.environ["RANK"], "w").close(), sys.exit(5)))
        signal.signal({int(signum)}, signal.getsignal(signal.SIGTERM))
        open("up" + os.environ["RANK"], "w").close()
        while True: signal.pause()
    """
    with Run(tmp_path, "--nproc-per-node=2", "--max-restarts=5", "w.py", script=script) as job:
        started(tmp_path, 2)
        for pid in (job.pid,) if to == "the agent" else (job.keeper, job.pid):
            os.kill(pid, signum)
        assert job.end() == 128 + signum, job.err
    assert (tmp_path / "told0").exists()
    assert (tmp_path / "told1").exists()
    assert "Traceback" not in job.err
    assert job.said[2] == f"{signum.name} received; stopping this node's workers ({signum.name}, SIGKILL after 30 s)"
    assert job.said[-2:] == [f"the job stopped: {signum.name} received", STORY]


def test_a_worker_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    """The grace ends; a stubborn worker must not keep a node that the scheduler wants back."""
    with Run(tmp_path, "--shutdown-timeout=0.2", STUBBORN, "pids", "ignore", "grandchild") as job:
        read_pids(tmp_path / "pids", 2)
        job.signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    assert job.said[1:] == [
        "SIGTERM received; stopping this node's workers (SIGTERM, SIGKILL after 0.2 s)",
        "rank 0 did not end within 0.2 s: killed by SIGKILL",
        "the job stopped: SIGTERM received",
        STORY,
    ]


def test_a_restart_says_which_workers_did_not_obey(tmp_path: Path) -> None:
    """A worker that catches SIGTERM for ever delays every restart by the grace."""
    script = """
        import os, signal, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            sys.exit(0)
        if os.environ["RANK"] in "13":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            open("up" + os.environ["RANK"], "w").close()
        while os.environ["RANK"] != "0" or not (os.path.exists("up1") and os.path.exists("up3")):
            signal.sigtimedwait([], 0.01)
        sys.exit(7)
    """
    status, job = run(
        tmp_path, "--nproc-per-node=4", "--max-restarts=1", "--shutdown-timeout=0.2", "w.py", script=script
    )
    assert status == 0
    at = job.said.index("ranks 1,3 did not end within 0.2 s: killed by SIGKILL")
    assert job.said[at + 1].startswith("round 1 (restart 1 of 1): ")


def test_every_further_signal_shortens_the_grace(tmp_path: Path) -> None:
    """Ctrl-C again means sooner. With torchrun it starts the grace anew; here an hour of it ends at the third."""
    with Run(tmp_path, "--shutdown-timeout=3600", STUBBORN, "pids", "ignore") as job:
        read_pids(tmp_path / "pids", 1)
        assert job.process.stderr is not None
        give_up = time.monotonic() + PATIENCE_S
        while job.process.poll() is None:
            # Two within half a second are one request: a scheduler tells the agent and its parent alike.
            assert time.monotonic() < give_up
            job.signal(signal.SIGTERM)
            select.select([job.process.stderr], [], [], 0.1)
        assert job.end() == 128 + signal.SIGTERM
    assert job.said[1:3] == [
        "SIGTERM received; stopping this node's workers (SIGTERM, SIGKILL after 3600 s)",
        "asked again to stop: the workers get SIGKILL within 5 s",
    ]


def test_ctrl_c_reaches_the_workers_once(tmp_path: Path) -> None:
    """The terminal signals its whole foreground group; two for one would take the grace away."""
    script = """
        import os, signal
        def told(*_): os.write(1, b"told\\n")
        signal.signal(signal.SIGINT, told)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # it may come before anybody waits for it
        open("up0", "w").close()
        signal.sigwait([signal.SIGINT])
        told()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        open("first", "w").close()
        signal.sigwait([signal.SIGTERM])
    """
    with Run(tmp_path, "--shutdown-timeout=600", "w.py", script=script, start_new_session=True) as job:
        started(tmp_path)
        os.killpg(job.pid, signal.SIGINT)
        until((tmp_path / "first").exists, "the signal")
        worker = [pid for pid in job.left_over() if pid not in (job.pid, job.keeper)]
        os.kill(worker[0], signal.SIGTERM)
        job.end()
    assert job.out == "told\n"
    assert "asked again" not in job.err


@pytest.mark.slow
def test_a_signal_while_it_starts(tmp_path: Path) -> None:
    """From the moment that there are two of us, no signal is lost and none leaves a traceback."""
    for attempt in range(20):
        signum = (signal.SIGTERM, signal.SIGINT)[attempt % 2]
        with Run(tmp_path, "--no-python", "sleep", "infinity") as job:
            assert job.keeper
            # The moment of the signal is the subject: each attempt sends it a little later. Any moment is right.
            select.select([job.process.stderr], [], [], attempt / 200)
            job.signal(signum)
            assert job.end() in (128 + signum, -signum)
        assert "Traceback" not in job.err


def test_a_signal_that_nobody_handles_takes_the_workers_along(tmp_path: Path) -> None:
    """SIGUSR1 orphans torchrun's workers. Here it ends them."""
    with Run(tmp_path, "w.py", script=WAITS) as job:
        started(tmp_path)
        job.signal(signal.SIGUSR1)
        assert job.end() == -signal.SIGUSR1
    assert job.err.splitlines()[-1] == "reknit: the agent is gone; its keeper has ended 1 process of the job"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a pid namespace")
def test_as_the_first_process_of_a_container(tmp_path: Path) -> None:
    """There a signal without a handler changes nothing, and orphans are this process's to reap."""
    script = """
        import os, signal, subprocess, time
        assert os.getpid() != 1
        subprocess.run(["sh", "-c", "(setsid sleep 0.01 &)"])
        os.kill(1, signal.SIGUSR1)
        open("up0", "w").close()
    """
    argv = ["unshare", "--pid", "--fork", "--mount-proc", REKNIT, "run", "w.py"]
    status, job = run(tmp_path, sys.executable, "-c", f"import os; os.execvp('unshare', {argv!r})", script=script)
    assert status == 0, job.err
    assert (tmp_path / "up0").exists()


def test_chosen_signals_are_handled_instead(tmp_path: Path) -> None:
    """Slurm sends SIGUSR1 as a warning; `--signals-to-handle` makes it an orderly end."""
    with Run(tmp_path, "--signals-to-handle=SIGUSR1", "w.py", script=WAITS) as job:
        started(tmp_path)
        job.signal(signal.SIGUSR1)
        assert job.end() == 128 + signal.SIGUSR1
    assert job.said[-2:] == ["the job stopped: SIGUSR1 received", STORY]


# ---- nothing is left ----


@pytest.mark.parametrize("victim", ["agent", "keeper", "both"])
def test_sigkill_leaves_nothing(tmp_path: Path, victim: str) -> None:
    """An agent killed by the kernel for memory must free the GPUs, daemonised grandchildren included."""
    # Whoever survives finds a daemon. If nobody does, the kernel ends the workers' groups, and no more than these.
    wishes = ["ignore"] if victim == "both" else ["ignore", "grandchild"]
    with Run(tmp_path, "--nproc-per-node=2", STUBBORN, "pids", *wishes) as job:
        pids = read_pids(tmp_path / "pids", 2 * len(wishes))
        keeper = job.keeper
        for pid in {"agent": (job.pid,), "keeper": (keeper,), "both": (keeper, job.pid)}[victim]:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(is_alive, [*pids, keeper])), "their end")
        status = job.end()
    assert status == (137 if victim == "keeper" else -9)


def test_a_failed_worker_leaves_no_grandchild(tmp_path: Path) -> None:
    """The group of a leader that is dead already is still to be ended; torchrun skips it."""
    options = ("--nproc-per-node=2", "--shutdown-timeout=0.2", "--max-restarts=1")
    status, _ = run(tmp_path, *options, STUBBORN, "pids", "grandchild", "die")
    assert status == 3
    assert not any(map(is_alive, read_pids(tmp_path / "pids", 4)))


def test_a_succeeded_worker_leaves_no_grandchild(tmp_path: Path) -> None:
    """A data loader that outlives its trainer holds the port and the GPU of the next job."""
    status, _ = run(tmp_path, STUBBORN, "pids", "grandchild", "exit0")
    assert status == 0
    assert not any(map(is_alive, read_pids(tmp_path / "pids", 2)))


# ---- what the agent itself is ----


def test_the_agent_has_no_torch(tmp_path: Path) -> None:
    """A quarter of a gigabyte and more than a second, for nothing: the agent's memory map names no torch."""
    with Run(tmp_path, "--nproc-per-node=2", "w.py", script=WAITS) as job:
        started(tmp_path, 2)
        for pid in (job.pid, job.keeper):
            with open(f"/proc/{pid}/maps") as file:
                assert "torch" not in file.read()
        job.signal(signal.SIGTERM)
        job.end()


def test_an_idle_agent_does_not_wake_up(tmp_path: Path) -> None:
    """No polling: while the workers work, the kernel's own count of the switches of agent and keeper stands still. A
    process that spins makes no switch, and takes a whole processor."""
    script = """
        import os, signal, time
        open("up0", "w").close()
        while not os.path.exists("counted"): time.sleep(0.001)
        time.sleep(1)  # the time in which nothing happens is what is measured, and any length is right
        open("worked", "w").close()
        signal.pause()
    """
    with Run(tmp_path, "w.py", script=script) as job:
        started(tmp_path)
        idle = job.pid, job.keeper
        for pid in idle:
            until(lambda pid=pid: "S" in _status(pid, "State"), "the process to sleep")
        before = [int(_status(pid, "voluntary_ctxt_switches")) for pid in idle]
        (tmp_path / "counted").touch()
        until((tmp_path / "worked").exists, "the work")
        for pid, switches in zip(idle, before, strict=True):
            assert int(_status(pid, "voluntary_ctxt_switches")) - switches <= 1, "one late look at the start is allowed"
            assert processor_share(pid) < 0.5


def _status(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/status") as file:
        return next(line.split(":", 1)[1].strip() for line in file if line.startswith(name + ":"))


def test_other_verbs(tmp_path: Path) -> None:
    """The first thing that anybody types."""

    def say(*argv: str, **settings: Any) -> tuple[int, str, str]:
        done = subprocess.run([REKNIT, *argv], capture_output=True, text=True, timeout=PATIENCE_S, **settings)
        return done.returncode, done.stdout, done.stderr

    from reknit import __version__

    assert say("--version") == (0, f"reknit {__version__}\n", "")
    assert say("--help")[0] == 0
    assert say("--help")[1].startswith("usage: reknit run")
    assert say() == (2, "", say("--help")[1])
    assert say("frob") == (2, "", "reknit: frob is no command; see reknit --help\n")
    assert "--nproc-per-node N" in say("run", "--help")[1]
    assert say("keeper", "--help")[1].startswith("usage: reknit keeper\n")
    assert say("keeper", "frob")[0] == 2
    for argv in (["--help"], ["--version"], ["run", "--help"]):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([REKNIT, *argv], stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b""), "nobody needs to read it"
    done = subprocess.run([sys.executable, "-m", "reknit", "--version"], capture_output=True)
    assert done.returncode == 0


def test_every_verb_that_is_named_explains_itself() -> None:
    """On the smallest terminal, in one screen and a half. Nothing is named that is not there."""

    def help_of(*verb: str) -> str:
        env = {**os.environ, "COLUMNS": "80"}
        done = subprocess.run([REKNIT, *verb, "--help"], env=env, capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stderr) == (0, ""), verb
        lines = done.stdout.splitlines()
        assert len(lines) <= 40, verb
        assert max(map(len, lines)) <= 80 or not verb, verb
        return done.stdout

    named = re.findall(r"^  (\w+) {2,}\S", help_of(), re.M)
    assert {"run", "status", "stacks", "explain", "timeline", "replay"} <= set(named)
    assert tuple(named) == VERBS
    for verb in named:
        assert help_of(verb).startswith(f"usage: reknit {verb}")
