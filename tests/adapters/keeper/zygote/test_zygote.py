"""One zygote whose keeper is this test: what it answers, and what happens if it does not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.alone import ENV
from tests.support.keepers import wait_gone
from tests.support.warming import needs_linux

pytestmark = needs_linux

DRIVER = """
    import json, os, select, signal, sys, time
    from reknit.adapters.host.children import become_subreaper, children
    from reknit.adapters.keeper.common.guard import Guard
    from reknit.adapters.keeper.zygote import zygote as zygotes
    from reknit.adapters.keeper.zygote.zygote import NotForked, Zygote, ZygoteFailed
    become_subreaper()
    zygotes._ANSWER_S = 0.5
    argv = [sys.executable, "train.py"]
    plan = {"argv": argv, "environ": {**os.environ, "A": "1", "OMP_NUM_THREADS": "1"}, "modules": ["reads"],
            "program": "", "first": [],
            "paths": [], "folders": [os.getcwd()], "telling": ["RANK"], "left_out": []}
    guard = Guard()
    def begin(plan=plan):
        zygote = Zygote(plan, [], guard=guard, given_back=(), is_abandoned=lambda: False)
        select.select([zygote.fd], [], [], 60)
        return zygote, zygote.hear()
    def fork(zygote, argv=argv, **env):
        try:
            pid = zygote.fork(argv, plan["environ"] | {"RANK": "3"} | env, {}, guard=guard)
        except (NotForked, ZygoteFailed) as error:
            return str(error)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    def show(*what):
        print(json.dumps(what), flush=True)
"""


def drive(folder: Path, script: str, status: int = 0) -> list[object]:
    """Run this script after the driver, until it ends with this status. Returns what it shows."""
    (folder / "train.py").write_text("import os, sys; sys.exit(int(os.environ['RANK']))")
    (folder / "reads.py").write_text("import os; A = os.environ['A']")
    text = textwrap.dedent(DRIVER) + textwrap.dedent(script)
    env = {**ENV, "PYTHONPATH": os.pathsep.join([ENV["PYTHONPATH"], str(folder)])}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, cwd=folder, env=env, timeout=100
    )
    assert done.returncode == status, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_worker_whose_variables_differ_is_refused(tmp_path: Path) -> None:
    """It would have imported something else. Variables that nothing has read may differ."""
    script = """
        zygote, said = begin()
        show(said["ready"], fork(zygote), fork(zygote, B="other"))
        show(fork(zygote, A="other"), fork(zygote, OMP_NUM_THREADS="2"), fork(zygote, ["python", "other.py"]))
        show(fork(zygote), True)
        zygote.close()
    """
    differs = "the variable {} has another value than when the modules were imported"
    assert drive(tmp_path, script) == [
        [{}, 3, 3],
        [differs.format("A"), differs.format("OMP_NUM_THREADS"), "its command line begins in another way"],
        [3, True],
    ]


def test_a_worker_that_comes_late_never_runs(tmp_path: Path) -> None:
    """Its keeper has started another one in its place by then."""
    script = """
        zygote, _ = begin()
        os.kill(zygote.pid, signal.SIGSTOP)
        show(fork(zygote))
        os.kill(zygote.pid, signal.SIGCONT)
        zygote._line.socket.close()
        ended = {}
        while children():
            pid, status = os.wait()
            ended[pid] = os.waitstatus_to_exitcode(status)
        show(ended.pop(zygote.pid), sorted(ended.values()))
    """
    assert drive(tmp_path, script) == [["it has not answered within 0.5 s"], [0, [1]]]


def test_a_zygote_that_cannot_fork_says_why(tmp_path: Path) -> None:
    """A limit on processes makes a worker cold, and the zygote goes on."""
    (tmp_path / "refuses.py").write_text("""if True:
        import errno, os
        real = os.fork
        def fork():
            if os.path.exists("full"): raise OSError(errno.EAGAIN, "full")
            return real()
        os.fork = fork
    """)
    script = """
        zygote, said = begin(plan | {"modules": ["refuses"]})
        open("full", "w").close()
        show(fork(zygote), fork(zygote))
        os.unlink("full")
        show(fork(zygote))
        zygote.close()
    """
    assert drive(tmp_path, script) == [["full", "full"], [3]]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_zygote_that_has_ended_is_told(signum: int, tmp_path: Path) -> None:
    """At once, and not when a time is over."""
    script = f"""
        zygote, _ = begin()
        os.kill(zygote.pid, {int(signum)})
        select.select([zygote.fd], [], [])
        try: zygote.hear()
        except ZygoteFailed as error: show(str(error))
        show(fork(zygote))
        zygote.close()
    """
    (heard,), (answered,) = drive(tmp_path, script)  # type: ignore[misc]  # objects to mypy
    assert heard == "its process has ended"
    assert answered in ("Broken pipe", "its process has ended", "Connection reset by peer")


def test_it_ends_with_its_keeper(tmp_path: Path) -> None:
    """Its socket and its guard both say so."""
    script = """
        zygote, _ = begin()
        show(zygote.pid)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    ((pid,),) = drive(tmp_path, script, -signal.SIGKILL)  # type: ignore[misc]  # objects to mypy
    wait_gone([pid])
