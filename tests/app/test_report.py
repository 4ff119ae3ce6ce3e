"""What people and schedulers get at the end: a report that names the failure to blame, and a status that agrees."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any, get_args

import pytest
from attrs import evolve

from reknit.app.report import Reporter, exit_status, final_lines, origin
from reknit.core.agent import reasons as own
from reknit.core.agent.agent import Agent, Spec
from reknit.core.agent.commands import Append, Result
from reknit.core.agent.events import Woken
from reknit.core.agent.states import WorkerState
from reknit.core.job import reasons
from reknit.core.job.entries import Filler, Node, NodeId, Opened, RestartPolicy, Terms
from reknit.core.job.workers import NoProgress, WorkerFailure
from tests.support.command import REKNIT, STORY, run
from tests.support.playbook import Playbook, joined, read, start
from tests.support.waiting import PATIENCE_S, until

N = Node(NodeId("n"))


def failed(rank: int = 0, exitcode: int = 3, **more: Any) -> WorkerFailure:
    return WorkerFailure(local_rank=rank, rank=rank, exitcode=exitcode, pid=40 + rank, **more)


def result(*failures: WorkerFailure) -> Result:
    root = reasons.WorkerFailed(N, failures[0])
    return Result(WorkerState.FAILED, reasons.BudgetSpent(0, root), failures={f.rank: f for f in failures})


def report(*failures: WorkerFailure) -> list[str]:
    return list(final_lines(result(*failures), 0))


# ---- the status ----


@pytest.mark.parametrize(("exitcode", "status"), [(1, 1), (3, 3), (255, 255), (-9, 137), (-15, 143), (-64, 192)])
def test_the_status_is_the_culprits(exitcode: int, status: int) -> None:
    """As a shell says it: the code, or 128 and the signal."""
    assert exit_status(result(failed(exitcode=exitcode))) == status


STATUSES = {
    reasons.AllSucceeded(): 0,
    own.AlreadyFinished(): 0,
    own.SignalReceived(signal.SIGTERM): 143,
    own.SignalReceived(signal.SIGINT): 130,
    own.CannotStop((1,)): 71,
    own.StoreLost("x"): 74,
    reasons.TooFewNodes(1, 2): 75,
    own.Replaced(N): 76,
    own.JournalRefused(reasons.Refusal.FORMAT, "x"): 65,
    own.JournalRefused(reasons.Refusal.SETUP, "x"): 69,
    own.JournalRefused(reasons.Refusal.IDENTITY, "x"): 72,
    own.JournalRefused(reasons.Refusal.OTHER_JOB, "x"): 73,
    own.JournalRefused(reasons.Refusal.SECRET, "x"): 77,
    own.TermsDiffer(()): 78,
    reasons.Unstable(3): 1,
    reasons.LongOver(3): 1,
    reasons.AbortedByOperator("x"): 1,
    reasons.BudgetSpent(0, reasons.WorkerFailed(N, failed())): 3,
}


@pytest.mark.parametrize("why", STATUSES, ids=lambda why: type(why).__name__)
def test_every_reason_has_a_status(why: own.RunEnd) -> None:
    """A scheduler tells a job that failed from one that never had a chance (sysexits)."""
    assert exit_status(Result(WorkerState.FAILED, why)) == STATUSES[why]


def test_no_reason_is_forgotten() -> None:
    """A new one needs a status, and none but success may be 0."""
    assert {type(why) for why in STATUSES} == set(get_args(own.RunEnd))
    assert [type(why).__name__ for why, status in STATUSES.items() if not status] == ["AllSucceeded", "AlreadyFinished"]


def test_a_status_that_may_be_anybodys_names_its_origin() -> None:
    """71 from a script and 71 from a full process table ask for different hands."""
    assert origin(result(failed(rank=1, exitcode=71))) == "exit status 71: from the worker of rank 1"
    assert origin(result(failed(exitcode=2))) == "exit status 2: from the worker of rank 0"
    never_started = WorkerFailure(local_rank=0, rank=3, exitcode=71)
    assert origin(result(never_started)) == "exit status 71: reknit could not run the worker of rank 3"
    lost = Result(WorkerState.FAILED, own.StoreLost("x"))
    assert origin(lost) == "exit status 74: reknit could not reach or use the job's store"


def test_every_status_that_a_worker_may_share_names_its_origin() -> None:
    """The rule of exit-status.md, for all reasons: 65 to 78 are never left open."""
    for why, status in STATUSES.items():
        line = origin(Result(WorkerState.FAILED, why))
        assert (line is not None) == (65 <= status <= 78)
        assert line is None or line.startswith(f"exit status {status}: ")
    assert all(origin(result(failed(exitcode=code))) for code in (2, 65, *range(69, 79)))


def test_the_origin_is_the_last_line() -> None:
    """Scripts look there."""
    assert report(failed(exitcode=71))[-1] == "exit status 71: from the worker of rank 0"
    assert not report(failed(exitcode=3))[-1].startswith("exit status")


def test_an_exit_code_that_no_process_has_ended_with_is_not_the_workers() -> None:
    """The machine's limit is to be looked for, and not a bug of the script."""
    lines = report(evolve(failed(exitcode=71), pid=0))
    assert lines[-1] == "exit status 71: reknit could not run the worker of rank 0"
    assert not any("pid" in line for line in lines)


# ---- the report ----


def test_a_worker_that_never_told_of_progress() -> None:
    """The last lines ask the likeliest question: does the script call it at all?"""
    silent = failed(exitcode=-9, cause=NoProgress(30.0, since_start=True))
    asks = "this worker has never called reknit.progress(): does the script call it?"
    (line,) = [line for line in report(silent) if line.startswith(asks)]
    assert line.endswith("--start-timeout")
    assert not [line for line in report(evolve(silent, cause=NoProgress(30.0, 4))) if line.startswith(asks)]


def test_a_terminal_helps_the_worker_that_has_it() -> None:
    """Another worker that asks has none."""
    asks = failed(message="EOFError: EOF when reading a line")
    for terminal, count in ((None, 1), (1, 1), (0, 0)):
        lines = final_lines(result(asks), 0, terminal=terminal)
        assert sum("and has no terminal" in line for line in lines) == count


def test_success_is_one_line() -> None:
    """And says how often the job had to be knit together again."""
    good = Result(WorkerState.SUCCEEDED, reasons.AllSucceeded())
    assert list(final_lines(good, 0)) == ["the job succeeded"]
    assert list(final_lines(good, 1)) == ["the job succeeded after 1 restart"]
    assert list(final_lines(good, 2)) == ["the job succeeded after 2 restarts"]


def test_a_job_that_has_not_succeeded_leads_to_its_story() -> None:
    """Before the origin of the status, which scripts look for in the last line. A node that was refused has no
    story."""
    told = [*final_lines(result(failed(exitcode=71)), 0, trace="/a b/trace")]
    assert told[-2:] == ["the whole story: reknit explain '/a b/trace'", "exit status 71: from the worker of rank 0"]
    stopped = Result(WorkerState.STOPPED, own.SignalReceived(15))
    story = "the whole story: reknit explain /t"
    assert [*final_lines(stopped, 0, trace="/t")] == ["the job stopped: SIGTERM received", story]
    good = Result(WorkerState.SUCCEEDED, reasons.AllSucceeded())
    refused = Result(WorkerState.FAILED, own.JournalRefused(reasons.Refusal.SECRET, "wrong secret"))
    for silent in (good, refused):
        assert story not in final_lines(silent, 0, trace="/t")


def test_a_stop_is_no_failure() -> None:
    """Preempted is not failed."""
    stopped = Result(WorkerState.STOPPED, own.SignalReceived(15))
    assert list(final_lines(stopped, 0)) == ["the job stopped: SIGTERM received"]


def test_the_culprit_comes_first_and_others_after_it() -> None:
    """Whoever reads one line reads the right one."""
    lines = report(failed(1, -9), failed(0, 1, message="ConnectionError: reset\nby peer"))
    assert lines == [
        "the job failed: rank 1 failed, and --max-restarts=0 allows no restart",
        "  rank 1 failed first (node n, local rank 1, pid 41): killed by SIGKILL",
        "  likewise rank 0 failed: exit code 1, ConnectionError: reset",
    ]


def test_failures_with_the_same_text_are_one_line() -> None:
    """A mistake that all ranks make."""
    lines = report(*(failed(rank, message="" if rank else "E: x") for rank in (3, 0, 2, 1)))
    assert lines[2:] == ["  likewise rank 0 failed: exit code 3, E: x", "  likewise ranks 1-2 failed: exit code 3"]


def test_all_that_is_known_is_told() -> None:
    """Traceback, last lines, where the rest is."""
    failure = failed(message="E: x", traceback="Traceback …\nE: x\n", stderr=("a", "later"), log="/logs/0")
    assert report(failure)[1:] == [
        "  rank 0 failed first (node n, local rank 0, pid 40): exit code 3, E: x",
        "  its traceback:",
        "    Traceback …",
        "    E: x",
        "  its last lines of output:",
        "    a",
        "    later",
        "  its output: /logs/0",
    ]


def test_an_echo_is_called_one() -> None:
    """When nobody else can be blamed, the reader must not look for a bug where there is none."""
    failure = failed(message="RuntimeError: Connection closed by peer")
    assert "  this looks like the consequence of another worker's end" in report(failure)
    assert len(report(failed())) < len(report(failure))


def test_torchs_rank_prefix_makes_no_other_lines_of_it() -> None:
    """Once a process group is there, torch puts the rank before each line of a traceback."""
    failure = failed(traceback="Traceback …\nE: x\n", stderr=("[rank0]: Traceback …", "[rank0]: E: x"))
    assert "  its last lines of output:" not in report(failure)


def test_nothing_is_told_twice() -> None:
    """The traceback came from stderr: the same lines again would hide it."""
    assert "  its last lines of output:" not in report(failed(traceback="T\nE: x\n", stderr=("T", "E: x")))


def test_who_was_never_started_has_no_pid() -> None:
    """There is no process 0 to look for."""
    lines = report(WorkerFailure(0, 0, 127, message="cannot start x: No such file or directory"))
    how = "exit code 127, cannot start x: No such file or directory"
    assert lines[1:] == [f"  rank 0 failed first (node n, local rank 0): {how}"]


# ---- saying ----


def test_verbose_says_every_step() -> None:
    """For the day when a decision is in doubt."""
    said: list[str] = []
    agent = Agent(Spec(NodeId("n"), "a"))
    Reporter(said.append, verbose=True)(agent, Woken(1.5), agent, [Append(Filler())])
    assert said == ["reknit: << woken", "reknit: >> say Filler"]
    Reporter(said.append, verbose=False)(agent, Woken(1.5), agent, [Append(Filler())])
    assert len(said) == 2, "most steps decide nothing"


@pytest.mark.parametrize("names_options", [True, False])
def test_a_host_of_other_terms_says_so_at_once(names_options: bool) -> None:
    """It stays for the others, and its last lines may come much later. No signal has come, so any ends it."""
    said: list[str] = []
    spec = Spec(NodeId("n0"), "a", Terms(1, 2, RestartPolicy(3)), hosts_journal=True)
    playbook = Playbook(Agent(spec)) >> start()
    before = playbook.agent
    assert playbook >> read(Opened(Terms(1, 2), "x"), joined("n1", nonce="x"))
    Reporter(said.append, verbose=False, names_options=names_options)(before, Woken(1.5), playbook.agent, [])
    name = "--max-restarts" if names_options else "max_restarts"
    assert said == [
        (
            f"reknit: this node cannot take part: the job runs on other terms: {name}: 0 there, 3 here"
            " (node n1 began the job); start it again with the job's values"
        ),
        "reknit: this node hosts the store, and stays until the other nodes have ended; a signal ends it at once",
    ]


@pytest.mark.parametrize("where", ["2>&-", "2>/dev/full", "2>&1 >&3 | :", "2>/dev/null"])
def test_nobody_needs_to_read_it(tmp_path: Path, where: str) -> None:
    """A log collector that dies takes no job with it."""
    (tmp_path / "w.py").write_text("print('ran'); raise SystemExit(4)")
    script = f"(exec 3>&1; ({REKNIT} run --max-restarts=1 w.py; echo $? >status) {where})"
    done = subprocess.run(["sh", "-c", script], cwd=tmp_path, stdout=subprocess.PIPE, timeout=PATIENCE_S)
    assert done.stdout == b"ran\nran\n"
    until(lambda: (tmp_path / "status").exists() and (tmp_path / "status").read_text())
    assert (tmp_path / "status").read_text() == "4\n"


# ---- the whole of it, on real failures ----


def test_a_traceback_from_an_error_file(tmp_path: Path) -> None:
    """The file that `@record` writes tells it, with or without a word on stderr."""
    script = """
        import os, signal
        from reknit.elastic.multiprocessing.errors import record

        @record
        def main():
            if os.environ["RANK"] == "0": signal.pause()
            os.close(2)
            raise ValueError("from the file")

        main()
    """
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script)
    how = "exit code 1, ValueError: from the file"
    at = job.said.index(f"  rank 1 failed first (node N, local rank 1, pid P): {how}")
    assert (status, job.said[at + 1]) == (1, "  its traceback:")
    assert job.said[at + 2].strip() == "Traceback (most recent call last):"
    assert job.said[-2].strip() == "ValueError: from the file"
    assert "rank 0" not in "".join(job.said[at:]), "it was stopped by us, and is not blamed"


def test_a_traceback_without_record(tmp_path: Path) -> None:
    """Most scripts do not decorate their main."""
    script = "import os, signal\nif os.environ['RANK'] == '0': signal.pause()\nraise ValueError('no')"
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script)
    how = "exit code 1, ValueError: no"
    stop = "stopping this node's workers once no other fails (SIGTERM, SIGKILL after 30 s)"
    assert (status, job.said[2:]) == (
        1,
        [
            f"rank 1 on node N failed: {how}; {stop}",
            "the job failed: rank 1 failed, and --max-restarts=0 allows no restart; it had run for T s",
            f"  rank 1 failed first (node N, local rank 1, pid P): {how}",
            "  its traceback:",
            "    Traceback (most recent call last):",
            f'      File "{tmp_path}/w.py", line 3, in <module>',
            "        raise ValueError('no')",
            "    ValueError: no",
            STORY,
        ],
    )


def test_the_only_worker_has_shown_its_traceback(tmp_path: Path) -> None:
    """It stands just above, so the report does not show it once more. Not so if its stderr went to a file."""
    status, job = run(tmp_path, "w.py", script="raise ValueError('no')")
    assert (status, job.err.count("Traceback (most recent call last):")) == (1, 1)
    assert job.said[-2:] == ["  rank 0 failed first (node N, local rank 0, pid P): exit code 1, ValueError: no", STORY]
    _, job = run(tmp_path, "--redirects=2", "w.py", script="raise ValueError('no')")
    assert (job.err.count("Traceback (most recent call last):"), "  its traceback:" in job.said) == (1, True)


def test_a_traceback_with_the_rank_before_each_line_is_shown_once(tmp_path: Path) -> None:
    """As torch writes it in a process group. Lines of the others may stand between. Without the rank nobody could say
    whose lines they are, and the report shows them together."""
    script = """
        import os, signal, sys, traceback
        if os.environ["RANK"] == "0":
            signal.pause()
        try:
            raise ValueError("no")
        except ValueError:
            for line in traceback.format_exc().splitlines():
                print(f"[rank{os.environ[sys.argv[1]]}]: {line}", file=sys.stderr, flush=True)
        os._exit(1)
    """
    _, job = run(tmp_path, "--nproc-per-node=2", "w.py", "RANK", script=script)
    assert job.err.count("Traceback (most recent call last):") == 1
    at = job.said.index("  rank 1 failed first (node N, local rank 1, pid P): exit code 1, ValueError: no")
    assert job.said[at + 1 :] == ["  its traceback stands above, in the last lines that begin with [rank1]", STORY]
    for options in (["--redirects=2"], ["--local-ranks-filter=0"]):
        _, job = run(tmp_path, "--nproc-per-node=2", *options, "w.py", "RANK", script=script)
        assert "  its traceback:" in job.said
    _, job = run(tmp_path, "--nproc-per-node=2", "w.py", "LOCAL_WORLD_SIZE", script=script)
    assert "  its traceback:" in job.said, "these lines say that they are another worker's"


def test_the_report_names_the_command_that_tells_more(tmp_path: Path) -> None:
    """It can be pasted, and shows this run even after others. Without a trace there is nothing to tell."""
    _, job = run(tmp_path, "--log-dir=my logs", "--rdzv-id=job", "w.py", script="raise SystemExit(3)")
    (line,) = [line for line in job.err.splitlines() if "reknit explain" in line]
    command = line.removeprefix("reknit: the whole story: ")
    (folder,) = tmp_path.glob("my logs/job_*/trace")
    assert command == f"reknit explain '{folder.relative_to(tmp_path)}'"
    where = {**job.base_env, "PATH": f"{Path(REKNIT).parent}:{os.environ['PATH']}"}
    told = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=where, capture_output=True, text=True, check=True)
    assert told.stdout.splitlines()[1] == 'job "job": failed: rank 0 failed, and --max-restarts=0 allows no restart'
    _, job = run(tmp_path, "--no-trace", "w.py", script="raise SystemExit(3)")
    assert "reknit explain" not in job.err
    _, job = run(tmp_path, "w.py", script="pass")
    assert "reknit explain" not in job.err, "a job that has succeeded needs no story"


@pytest.mark.parametrize("words", ["", "import sys; sys.stderr.write('ValueError: secret reason\\n')"])
def test_a_traceback_that_was_not_shown_is_told(tmp_path: Path, words: str) -> None:
    """A worker may tell the agent more than it writes, by its error file."""
    script = f"""
        import os
        from reknit.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("secret reason")

        try:
            main()
        except ValueError:
            {words}
            os._exit(1)
    """
    status, job = run(tmp_path, "w.py", script=script)
    assert (status, "  its traceback:" in job.said) == (1, True)
    assert job.said[-2].strip() == "ValueError: secret reason"


def test_last_words_and_where_the_rest_is(tmp_path: Path) -> None:
    """A crash in C has no traceback; its last lines say most, whatever bytes they hold."""
    script = r"import os, sys; os.write(2, b'x\n' * 100_000 + b'the \xff end\n'); os.abort()"
    status, job = run(tmp_path, "--redirects=2", "--log-dir=logs", "--rdzv-id=job", "w.py", script=script)
    assert status == 128 + signal.SIGABRT
    assert job.said[-3] == "    the \\xff end"
    (log,) = tmp_path.glob("logs/job_*/round_0/0")
    assert job.said[-2] == f"  its output: {log}"
    assert (log / "stderr.log").stat().st_size > 200_000
    assert len(job.said) < 40


@pytest.mark.parametrize("content", ["", "{", "[]", '{"message": 7}', "\\xff", '{"message": {"message": null}}'])
def test_a_corrupt_error_file_is_named(tmp_path: Path, content: str) -> None:
    """A worker that dies while it writes its error file must still be reported."""
    script = f"import os; open(os.environ['TORCHELASTIC_ERROR_FILE'], 'wb').write(b'''{content}'''); os._exit(5)"
    status, job = run(tmp_path, "w.py", script=script)
    assert status == 5
    assert f"the error file {tmp_path}/reknit_" in job.said[-2]
    assert "error.json cannot be understood: " in job.said[-2]
    assert "Traceback" not in job.err


@pytest.mark.slow
def test_a_ddp_crash_is_blamed_on_who_raised(tmp_path: Path) -> None:
    """Its peers see their connection reset, and are dead first here: torchrun blames them."""
    pytest.importorskip("torch")
    script = """
        import os, psutil, time, torch, torch.distributed as dist, traceback
        dist.init_process_group("gloo")
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        try:
            for i in range(1000):
                if i == 20 and os.environ["RANK"] == "1":
                    raise ValueError("boom")
                dist.all_reduce(torch.ones(1000))
        except Exception:
            dist.destroy_process_group()
            while os.environ["RANK"] == "1" and psutil.Process(pids[0]).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
            traceback.print_exc()
            os._exit(1)  # at once: how long Python takes to end is no part of this
    """
    status, job = run(tmp_path, "--nproc-per-node=2", "w.py", script=script)
    assert status == 1
    assert "  rank 1 failed first (node N, local rank 1, pid P): exit code 1, ValueError: boom" in job.said
