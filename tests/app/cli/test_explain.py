"""`reknit explain` after real jobs, and beside one that runs."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import places
from tests.support.command import REKNIT, STUBBORN, Run, run
from tests.support.nodes import BAD, GOOD, Nodes, at_file, ended
from tests.support.verbs import ask
from tests.support.waiting import PATIENCE_S, read_pids, until

FAILS_ONCE = """
    import os
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        raise ValueError("no such file")
"""
WAITS = "import signal; open('up', 'w').close(); signal.pause()"


def test_the_latest_job_is_explained(tmp_path: Path) -> None:
    """No argument is needed right after a run: who failed first, why, what followed, where the time went."""
    run(tmp_path, "--rdzv-id=before", "w.py", script="pass")
    status, job = run(tmp_path, "--nproc-per-node=2", "--max-restarts=3", "--rdzv-id=digits", "w.py", script=FAILS_ONCE)
    assert status == 0
    status, out, err = ask(job, "explain")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[1] == 'job "digits": succeeded after 1 restart'
    assert lines[3].startswith("workers: ")
    assert lines[3].endswith(" -u w.py")
    (cause,) = [line for line in lines if "failed: exit code 1" in line]
    assert cause.endswith("rank 1 on node " + os.uname().nodename + " failed: exit code 1, ValueError: no such file")
    assert "    so all workers were stopped and started again: restart 1 of 3 (rule 2)" in lines
    assert '    raise ValueError("no such file")' in out
    assert "where the time went" in lines
    assert ask(job, "explain", "before")[1].splitlines()[1] == 'job "before": succeeded'


def test_a_job_that_was_stopped(tmp_path: Path) -> None:
    """By a signal, and one of its workers only by SIGKILL. There are no other nodes, and so nothing is said of them."""
    with Run(tmp_path, "--shutdown-timeout=0.2", "--rdzv-id=digits", STUBBORN, "pids", "ignore") as job:
        read_pids(tmp_path / "pids", 1)
        job.signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    lines = ask(job, "explain")[1].splitlines()
    assert lines[1] == 'job "digits": stopped by SIGTERM'
    host = os.uname().nodename
    assert any(line.endswith(f"  node {host}: asked to stop: SIGTERM") for line in lines)
    assert any(line.endswith(": the job was stopped by SIGTERM") for line in lines)
    assert any(line.endswith(f"  node {host}: rank 0 did not end within 0.2 s: killed by SIGKILL") for line in lines)
    assert not [line for line in lines if "others" in line or "is leaving" in line]


def test_a_job_whose_worker_asks_nobody(tmp_path: Path) -> None:
    """It has no terminal, and is not started again. That is the end of the job, although a restart is left."""
    status, job = run(tmp_path, "--max-restarts=2", "--rdzv-id=digits", "w.py", script="input()")
    assert status == 1
    assert sum("EOFError" in line for line in job.said) == 2, "when it happens, and in the report"
    lines = ask(job, "explain")[1].splitlines()
    assert lines[1] == 'job "digits": failed: rank 0 failed, and a worker that waits for input is not started again'
    assert "    so the job failed: a worker that waits for input is not started again" in lines


def test_a_node_that_was_refused_does_not_go_on(tmp_path: Path) -> None:
    """Of an agent with other terms nobody expects that it ends the job, or that it goes on with it."""
    with Nodes(tmp_path, "--nnodes=1:2", "--log-dir=logs", *at_file(tmp_path)) as nodes:
        (a,) = nodes.start("a")
        nodes.formed(a)
        (b,) = nodes.start("b", argv=("--max-restarts=7",))
        assert b.end() == 78
        a.signal(signal.SIGTERM)
        assert a.end() == 128 + signal.SIGTERM
        out = ask(a, "explain", str(tmp_path / "logs"))[1]
    assert 'job "j": stopped by SIGTERM' in out
    assert "others go on" not in out


def test_several_nodes_are_one_story(tmp_path: Path) -> None:
    """One worker fails, later one node is killed: each is told once, with its rule."""
    with Nodes(tmp_path, "--nnodes=2:3", "--max-restarts=1", "--log-dir=logs", *at_file(tmp_path)) as nodes:
        runs = nodes.start("a", "b", "c")
        first = nodes.formed(*runs)
        os.kill(first[1].pid, BAD)
        nodes.formed(*runs, after=first)
        runs[2].signal(signal.SIGKILL)
        runs[0].says("fell silent")
        until(lambda: len(runs[0].ups) == 3 and len(runs[1].ups) == 3, "the third round")
        for one in runs[:2]:
            one.tell(GOOD)
        assert ended(*runs[:2]) == [0, 0]
        status, out, _ = ask(runs[0], "explain", str(tmp_path / "logs"))
    assert status == 0
    assert out.count("restart 1 of 1 (rule 2)") == 1
    assert out.count("counts as lost (rule 6)") == 1
    assert "nothing was heard of node c for" in out
    assert "the agent of node c ended without a word some time after " in out
    assert "as seen by 3 nodes (a, b, c)" in out


def test_a_job_that_runs(tmp_path: Path) -> None:
    """Its story so far."""
    with Run(tmp_path, "--rdzv-id=digits", "w.py", script=WAITS) as job:
        until((tmp_path / "up").exists, "the worker")
        out = until(lambda: text if "now running" in (text := ask(job, "explain")[1]) else "", "the story")
    assert 'job "digits": runs' in out
    assert f"the agent of node {os.uname().nodename} runs: now running, round 0" in out


def test_what_is_no_trace_is_one_line(tmp_path: Path) -> None:
    """And the status of a wrong command line."""
    status, job = run(tmp_path, "--no-trace", "w.py", script="pass")
    assert status == 0
    assert ask(job, "explain") == (
        2,
        "",
        "reknit: no agent has left a trace on this host; name a folder with traces\n",
    )
    assert ask(job, "explain", "nix")[2] == "reknit: nix is no folder, and no job that ran on this host\n"
    (tmp_path / "empty").mkdir()
    assert ask(job, "explain", "empty") == (2, "", "reknit: empty holds no trace\n")
    assert ask(job, "explain", "empty", "--al")[2] == "reknit: empty holds no trace\n", "options may come last"
    assert ask(job, "explain", "empty", "--every")[2] == "reknit: unknown option --every; see reknit explain --help\n"


@pytest.mark.parametrize("content", [b"rubbish\n", b"", b'{"time":1e300,"event":{},"commands":[]}\n'])
def test_a_file_that_is_no_trace_has_a_status_of_its_own(tmp_path: Path, content: bytes) -> None:
    """A script sees that nothing was told."""
    (tmp_path / "000000.jsonl").write_bytes(content)
    asked = subprocess.run([REKNIT, "explain", str(tmp_path)], capture_output=True, text=True, check=False)
    assert asked.returncode == 65
    assert "reknit: nothing in these traces can be read" in asked.stderr
    assert "Traceback" not in asked.stderr


def test_a_folder_with_links(tmp_path: Path) -> None:
    """As the folder of this host, which links to the traces in log folders. A link to a folder around it ends."""
    status, job = run(tmp_path, f"--log-dir={tmp_path}/logs", "w.py", script="pass")
    assert status == 0
    linked = places.below(tmp_path) / "traces"
    os.symlink(linked, linked / "round")
    told, out, err = ask(job, "explain", str(linked))
    assert (told, err, out.count('job "')) == (0, "", 1)


def test_a_reader_that_goes_is_no_failure(tmp_path: Path) -> None:
    """`reknit explain | head -1`"""
    _, job = run(tmp_path, "w.py", script="pass")
    piped = f"{REKNIT} explain | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", piped], check=True, env=job.base_env, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_a_worker_cannot_write_on_the_terminal_of_the_reader(tmp_path: Path) -> None:
    """The text of its exception is shown with escapes."""
    _, job = run(tmp_path, "w.py", script="raise ValueError('\\x1b[2J cleared')")
    out = ask(job, "explain")[1]
    assert "\x1b" not in out
    assert "cleared" in out
