"""Binding processes to CPUs, by torch's own functions. There is no GPU here: what it is near to is made up."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from reknit.elastic.multiprocessing.numa import bind_function, bind_program


def options(**more: Any) -> Any:
    from torch.numa.binding import AffinityMode, NumaOptions

    return NumaOptions(affinity_mode=AffinityMode.NODE, **more)


@pytest.fixture
def one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A CPU that is near every GPU, and a `numactl` that writes down what it is asked for."""
    from torch.numa import binding

    cpu = min(os.sched_getaffinity(0))
    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", lambda **given: {cpu})
    numactl = tmp_path / "numactl"
    numactl.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/asked\nshift\nexec "$@"\n')
    numactl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return cpu


def test_a_program_is_started_by_numactl(tmp_path: Path, one_cpu: int) -> None:
    """As torch does it."""
    context = start_processes(
        "t",
        "/bin/sh",
        {0: ("-c", f"echo ran > {tmp_path}/ran")},
        {0: {}},
        DefaultLogsSpecs("/dev/null"),
        numa_options=options(),
    )
    result = context.wait()
    context.close()
    assert result is not None
    assert not result.is_failed()
    assert (tmp_path / "asked").read_text() == f"--physcpubind={one_cpu}\n"
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.alone
def test_a_function_binds_its_own_process(one_cpu: int) -> None:
    """In the worker. Here it is called in a child, which is bound in its place."""
    bound = bind_function(lambda: sorted(os.sched_getaffinity(0)), 0, options())
    if (pid := os.fork()) == 0:
        os._exit(0 if bound() == [one_cpu] else 1)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
def test_a_binding_that_fails_is_torchs_error_or_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options say which."""
    from torch.numa import binding

    def fails(**given: Any) -> None:
        raise RuntimeError("no such GPU")

    monkeypatch.setattr(binding, "_get_logical_cpus_to_bind_to", fails)
    with pytest.raises(RuntimeError, match="no such GPU"):
        bind_program(("true",), 0, options())
    assert bind_program(("true",), 0, options(should_fall_back_if_binding_fails=True)) == ("true",)
    assert bind_program(("true",), 0, None) == ("true",)


def test_a_torch_without_this_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of torch that do it are not public, and have changed their names before."""
    from torch.numa import binding

    monkeypatch.delattr(binding, "_maybe_wrap_command_args_with_numa_binding")
    with pytest.raises(RuntimeError, match="this version of torch has no"):
        bind_program(("true",), 0, options())
