"""The variables that a worker gets (docs/torchelastic.md#environment), seen by real workers of the real command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reknit.adapters.host.orphans import MARK
from reknit.adapters.keeper.common.environment import TELLING, given_by, handed_down
from reknit.adapters.keeper.protocol.wire import Configure
from reknit.adapters.keeper.watchdog.timerpipe import is_read
from reknit.core.job.workers import WorkerRanks
from tests.support.command import run
from tests.support.processes import assignment

WRITES = """
    import json, os, sys
    with open(f"env{os.environ['REKNIT_ROUND']}_{os.environ['RANK']}", "w") as file:
        json.dump([dict(os.environ), sys.argv, sys.executable], file)
    sys.exit(os.environ["REKNIT_ROUND"] < os.environ.get("UNTIL", "0"))
"""
TABLE = {
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "3",
    "ROLE_NAME": "trainer",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "OMP_NUM_THREADS": "1",
    "REKNIT_ROUND": "0",
}
"""What is the same for all workers of the first round."""
PER_WORKER = {"RANK", "LOCAL_RANK", "ROLE_RANK", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "REKNIT_PROGRESS"}
OPTIONS = ("--nproc-per-node=3", "--max-restarts=2", "--role=trainer", "--rdzv-id=job-7", "--log-dir=logs")


def told(tmp_path: Path, round_: int, rank: int) -> Any:
    return json.loads((tmp_path / f"env{round_}_{rank}").read_text())


def test_the_whole_table(tmp_path: Path) -> None:
    """Names and values are the interface to every training script there is."""
    before = {"KEPT": "ä", "PET_TEE": "0", "CUDA_VISIBLE_DEVICES": "4,5"}
    status, job = run(tmp_path, *OPTIONS, "w.py", script=WRITES, env=before)
    assert status == 0, job.err
    ports = set()
    for rank in range(3):
        env = told(tmp_path, 0, rank)[0]
        ports.add(env["MASTER_PORT"])
        assert {name: env[name] for name in TABLE} == TABLE
        assert {name: env[name] for name in before} == before, "what the agent has, its workers have"
        assert env["RANK"] == env["LOCAL_RANK"] == env["ROLE_RANK"] == str(rank)
        (folder,) = tmp_path.glob("logs/job-7_*")
        assert env["TORCHELASTIC_ERROR_FILE"] == f"{folder}/round_0/{rank}/error.json"
        assert env.keys() - before.keys() - TABLE.keys() - PER_WORKER <= {*job.base_env, "LC_CTYPE", MARK}
    assert len(ports) == 1
    assert 1024 <= int(ports.pop()) < 65536


def test_what_the_user_has_set_stays(tmp_path: Path) -> None:
    """These two are defaults; the rest is ours to say, whatever a surrounding launcher has left there."""
    env = {"OMP_NUM_THREADS": "5", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "RANK": "9", "MASTER_PORT": "1"}
    status, _ = run(tmp_path, "w.py", script=WRITES, env=env)
    found = told(tmp_path, 0, 0)[0]
    assert status == 0
    assert (found["OMP_NUM_THREADS"], found["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("5", "0")
    assert found["MASTER_PORT"] != "1"


def test_each_round_has_its_own_port_and_count(tmp_path: Path) -> None:
    """A store of an earlier round cannot be met, and a script sees which attempt this is."""
    status, job = run(tmp_path, *OPTIONS, "--nproc-per-node=1", "w.py", script=WRITES, env={"UNTIL": "2"})
    assert status == 0, job.err
    rounds = [told(tmp_path, round_, 0)[0] for round_ in range(3)]
    assert [env["TORCHELASTIC_RESTART_COUNT"] for env in rounds] == ["0", "1", "2"]
    assert len({env["MASTER_PORT"] for env in rounds}) == 3
    assert len({env["TORCHELASTIC_RUN_ID"] for env in rounds}) == 1
    assert len({env["TORCHELASTIC_ERROR_FILE"] for env in rounds}) == 3


def test_an_unnamed_job_has_a_name(tmp_path: Path) -> None:
    """torchrun's literal `none` makes two unnamed jobs one."""
    names = []
    for _ in range(2):
        run(tmp_path, "w.py", script=WRITES)
        names.append(told(tmp_path, 0, 0)[0]["TORCHELASTIC_RUN_ID"])
    assert names[0] != names[1]


def test_arguments_with_the_local_rank(tmp_path: Path) -> None:
    """docs/torchelastic.md#command-line: `${local_rank}` in arguments; everything else stays as it was typed."""
    words = ["${local_rank}", "--x=$local_rank.log", "$HOME", "$$", "${unknown}", "", " a  b ", "ä", "--role"]
    status, _ = run(tmp_path, "--nproc-per-node=2", "w.py", *words, script=WRITES)
    assert status == 0
    assert told(tmp_path, 0, 1)[1] == [
        "w.py",
        "1",
        "--x=1.log",
        "$HOME",
        "$$",
        "${unknown}",
        "",
        " a  b ",
        "ä",
        "--role",
    ]


def test_another_interpreter(tmp_path: Path) -> None:
    """PYTHON_EXEC: the agent's own interpreter need not be the workers'."""
    python = tmp_path / "my python"
    python.write_text("#!/bin/sh\necho mine $1 $2\n")
    python.chmod(0o755)
    assert run(tmp_path, "w.py", script="", env={"PYTHON_EXEC": str(python)})[0] == 2, "the script must still exist"
    assert run(tmp_path, "w.py", script="pass", env={"PYTHON_EXEC": str(python)})[1].out == "mine -u w.py\n"


def test_a_module_and_a_program(tmp_path: Path) -> None:
    """-m puts the folder on the path as Python does, --no-python executes what it is given."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "mod.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run(tmp_path, "-m", "pkg.mod", "-m")[1].out == "__main__ ['-m']\n"
    assert run(tmp_path, "--no-python", "echo", "-n", "${local_rank}")[1].out == "0"


@pytest.mark.beside_torch
def test_torch_itself_takes_it(tmp_path: Path) -> None:
    """The only judge that counts: init_process_group from this environment, in every round anew."""
    import pytest

    pytest.importorskip("torch")
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.ones(1) * (dist.get_rank() + 1)
        dist.all_reduce(value)
        if os.environ["RANK"] == "1": print(int(value), flush=True)
        if os.environ["REKNIT_ROUND"] == "0" and os.environ["RANK"] == "1": os._exit(1)
        dist.destroy_process_group()
    """
    status, job = run(tmp_path, "--nproc-per-node=2", "--max-restarts=1", "w.py", script=script)
    assert (status, job.out) == (0, "3\n3\n"), job.err


def test_the_path_of_the_pipe_for_timers_is_that_of_the_keeper(tmp_path: Path) -> None:
    """A worker that finds a path at which nobody reads fails in its first step. torch hands such a path down."""
    pipe = tmp_path / "timers"
    own = {"TORCHELASTIC_TIMER_FILE": str(pipe), "HOME": "/", "SECRET": "x"}
    wanted = Configure(argv=(), run_id="job", withheld=("SECRET",), env=(("A", "b"),), mark="m")
    rest = {"HOME": "/", "A": "b", MARK: "m"}
    assert handed_down(own, wanted, "", is_read) == rest
    os.mkfifo(pipe)
    assert handed_down(own, wanted, "", is_read) == rest
    fd = os.open(pipe, os.O_RDWR)  # another program serves timers here
    assert handed_down(own, wanted, "", is_read) == {**rest, "TORCHELASTIC_TIMER_FILE": str(pipe)}
    os.close(fd)
    assert handed_down(own, wanted, "/p", is_read) == {**rest, "TORCHELASTIC_TIMER_FILE": "/p"}


def test_a_socket_that_an_outer_keeper_has_given_is_not_handed_down() -> None:
    """Of the workers of an agent inside a worker, only one could make it, and the others would fail."""
    outer = {"TORCH_WORKER_SERVER_SOCKET": "/tmp/reknit_scratch_torch_0123abcd/0.0"}
    users = {"TORCH_WORKER_SERVER_SOCKET": "/tmp/mine"}
    assert [handed_down(own, Configure((), "job"), "", is_read) for own in (outer, users)] == [{}, users]


def test_what_tells_workers_apart_is_what_they_are_given() -> None:
    """A module that reads such a variable must not be imported once for all of them."""
    given = given_by({}, assignment(2), WorkerRanks(0, 2, 2), run_id="job", virtual_local_rank=False)
    assert {*given, "TORCHELASTIC_ERROR_FILE"} == TELLING
