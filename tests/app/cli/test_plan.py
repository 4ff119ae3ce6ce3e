"""`reknit run --dry-run`: what would be started."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import run

SCRIPT = "open('ran', 'w').close()"


def test_the_plan_is_what_the_workers_get(tmp_path: Path) -> None:
    """Each worker's command line and variables, as the worker itself would print them."""
    script = "import os, sys; print(sys.argv[1], *(f'{n}={os.environ[n]}' for n in sys.argv[2:]), flush=True)"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_MAX_RESTARTS", "MASTER_PORT")
    argv = ("--nproc-per-node=2", "--max-restarts=2", "--master-port=29511", "w.py", "${local_rank}", *names)
    status, planned = run(tmp_path, "--dry-run", *argv, script=script)
    assert (status, planned.err) == (0, "")
    _, job = run(tmp_path, *argv, script=script)
    for line in job.out.splitlines():
        rank, *variables = line.split()
        _, _, worker = planned.out.partition(f"worker {rank}: ")
        assert worker.splitlines()[1].endswith(f"w.py {rank} {' '.join(names)}")
        for variable in variables:
            own = variable.startswith(("RANK", "LOCAL_RANK"))
            assert variable in (worker.splitlines()[0] if own else planned.out)


@pytest.mark.parametrize(
    ("options", "env"),
    [
        ((), {}),
        (("--hang-after=60",), {"TORCH_FR_BUFFER_SIZE": "100"}),
        (("--virtual-local-rank", "--nproc-per-node=2"), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    ],
)
def test_no_variable_is_missing(tmp_path: Path, options: tuple[str, ...], env: dict[str, str]) -> None:
    """Every one that a worker has and `reknit run` has not."""
    script = "import os; open('names' + os.environ['RANK'], 'w').write(' '.join(os.environ))"
    _, planned = run(tmp_path, "--dry-run", *options, "w.py", script=script, env=env)
    status, job = run(tmp_path, *options, "w.py", script=script, env=env)
    assert status == 0
    new = set((tmp_path / "names0").read_text().split()) - {*job.base_env, *env}
    assert new >= {"RANK", "REKNIT_NODE"}
    assert [name for name in sorted(new) if f" {name}=" not in planned.out] == []


def test_where_each_option_comes_from(tmp_path: Path) -> None:
    """A variable in some profile is found so."""
    env = {"PET_MAX_RESTARTS": "3"}
    status, job = run(tmp_path, "--dry-run", "--tee=3", "-v", "w.py", script=SCRIPT, env=env)
    assert status == 0
    lines = job.out.splitlines()
    for line in (
        "  --max-restarts=3: variable PET_MAX_RESTARTS",
        "  --tee=3: command line",
        "  --verbose: command line",
        "  --quiet: not given",
        "  --hang-after: not given",
        "  --shutdown-timeout=30",
    ):
        assert line in lines
    assert lines.index("options that are set, and where:") < lines.index("defaults:")
    assert not (tmp_path / "ran").exists()


def test_defaults_do_not_hide_what_was_set(tmp_path: Path) -> None:
    """They are counted, and shown with -v. Those of options that mean nothing for one node are not even counted."""
    _, job = run(tmp_path, "--dry-run", "--standalone", "w.py", script=SCRIPT)
    lines = job.out.splitlines()
    at = lines.index("options that are set, and where:")
    assert lines[at + 1 : -1] == ["  --log-times=never: variable PET_LOG_TIMES", "  --standalone: command line"]
    assert lines[0] == "name of the job: (a random name)"
    _, verbose = run(tmp_path, "--dry-run", "--standalone", "-v", "w.py", script=SCRIPT)
    told = verbose.out.splitlines()
    defaults = told[told.index("defaults:") + 1 : -1]
    assert lines[-1] == f"{len(defaults) + 1} defaults: -v before the script shows them", "-v itself is set now"
    assert not [line for line in defaults if "--rdzv-backend" in line or "--master-port" in line]
    assert told[-1].startswith("not given, and without effect for one node: --rdzv-backend, --rdzv-endpoint")


def test_a_job_without_a_name(tmp_path: Path) -> None:
    """As with torchrun, all nodes take the name `none`. It is no word of reknit's for something that is missing."""
    options = ("--dry-run", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400")
    _, job = run(tmp_path, *options, "w.py", script=SCRIPT)
    assert "name of the job: none (no --rdzv-id is given)\n" in job.out
    _, job = run(tmp_path, *options, "-v", "w.py", script=SCRIPT)
    assert "  --master-port=29500" in job.out.splitlines()


def test_several_nodes_and_no_secret(tmp_path: Path) -> None:
    """The ranks depend on who comes. A plan may be shown to others."""
    meeting = (
        "--rdzv-backend=etcd",
        "--rdzv-endpoint=h:1",
        "--rdzv-id=j",
        "--rdzv-conf=user=u,password=hush,heartbeat=3",
    )
    options = ("--dry-run", "--nnodes=2:4", *meeting, "--rdzv-secret=whisper")
    status, job = run(tmp_path, *options, "w.py", script=SCRIPT)
    assert status == 0
    assert "nodes: 2 to 4\n" in job.out
    assert "WORLD_SIZE=(known when the nodes have met)" in job.out
    assert "password=(not shown),heartbeat=3" in job.out
    assert "hush" not in job.out
    assert "whisper" not in job.out


def test_a_mistake_is_found_without_a_start(tmp_path: Path) -> None:
    """The same line as without the option."""
    status, job = run(tmp_path, "--dry-run", "no.py")
    assert (status, job.err) == (2, "reknit: script no.py does not exist\n")
