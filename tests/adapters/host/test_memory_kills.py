"""Whether the kernel has killed a process because no memory was left."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from reknit.adapters.host import memory_kills
from tests.support.command import run
from tests.support.waiting import until

GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with a limit of 100 MiB."""
    parent, limit = (
        (GROUPS / "memory", "memory.limit_in_bytes") if (GROUPS / "memory").is_dir() else (GROUPS, "memory.max")
    )
    group = parent / f"reknit-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(100 << 20))
    except OSError:
        group.rmdir() if group.is_dir() else None
        pytest.skip("no memory cgroup can be made here")
    yield group
    until(lambda: not (group / "cgroup.procs").read_text(), "the end of all processes in the cgroup")
    group.rmdir()


def test_a_worker_that_the_kernel_kills_for_lack_of_memory(tmp_path: Path, limited: Path) -> None:
    """The report says so, and how much memory there was."""
    script = """
        import os
        open(os.environ["GROUP"] + "/cgroup.procs", "w").write(str(os.getppid()))  # the keeper, which looks there
        open(os.environ["GROUP"] + "/cgroup.procs", "w").write(str(os.getpid()))
        if os.environ["REKNIT_ROUND"] == "1":
            filled = [bytearray(b"x") * 1_000_000 for _ in range(1000)]
        raise SystemExit(9)
    """
    status, job = run(tmp_path, "--max-restarts=1", "w.py", script=script, env={"GROUP": str(limited)})
    assert status == 137
    last = job.said[-2]
    assert "killed by SIGKILL, probably by the kernel for lack of memory (at most 100 MiB of 100 MiB were used)" in last


def test_a_worker_that_something_else_kills(tmp_path: Path) -> None:
    """Nobody should look for a leak then."""
    status, job = run(tmp_path, "w.py", script="import os; os.kill(os.getpid(), 9)")
    assert status == 137
    assert job.said[-2].endswith("killed by SIGKILL, but not by the kernel for lack of memory")


def test_the_files_of_cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container they lie at the root of what is mounted."""
    if "0::/" not in Path("/proc/self/cgroup").read_text():
        pytest.skip("this kernel has no cgroup v2")
    monkeypatch.setattr(memory_kills, "_ROOT", str(tmp_path))
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n")
    (tmp_path / "memory.peak").write_text("8053063680\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_kills.count() == 2
    assert memory_kills.usage_text() == "at most 7.5 GiB were used"
    (tmp_path / "memory.max").write_text("8589934592\n")
    assert memory_kills.usage_text() == "at most 7.5 GiB of 8.0 GiB were used"


def test_without_cgroups_the_host_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some containers hide them."""
    monkeypatch.setattr(memory_kills, "_ROOT", str(tmp_path))
    told = subprocess.run(["grep", "-c", "^oom_kill ", "/proc/vmstat"], capture_output=True, text=True, check=False)
    assert (memory_kills.count() is not None) is (told.stdout == "1\n")
    assert memory_kills.usage_text() == ""
