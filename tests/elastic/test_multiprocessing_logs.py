"""Where the output of workers goes, beside torch's own answer."""

from __future__ import annotations

import gc
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from reknit.elastic.multiprocessing.logs import DefaultLogsSpecs, LogsDest, Std, to_map
from tests.support.alone import run_alone
from tests.support.leaks import nothing_left

VARIABLE = "TORCHELASTIC_ERROR_FILE"


def envs(count: int = 3, restarts: int = 1) -> dict[int, dict[str, str]]:
    return {rank: {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": str(restarts)} for rank in range(count)}


def relative(dest: Any, folder: Path) -> dict[str, Any]:
    """The destinations as a dictionary, without the random part of the paths."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(path) for key, path in value.items()}
        return re.sub(r"/job_\w+/", "/job/", value).replace(str(folder), "")

    return {name: short(value) for name, value in asdict(dest).items()}


@pytest.mark.parametrize("local_ranks_filter", [None, {0}, {1, 2}])
@pytest.mark.parametrize("tee", [0, 1, 2, 3, {0: 3, 2: 1}])
@pytest.mark.parametrize("redirects", [0, 1, 3, {1: 2}])
def test_the_files_are_torchs(tmp_path: Path, redirects: Any, tee: Any, local_ranks_filter: set[int] | None) -> None:
    """Tools collect logs by these paths."""
    from torch.distributed.elastic.multiprocessing import api as torchs

    found = []
    for name, specs, std in (("ours", DefaultLogsSpecs, Std), ("theirs", torchs.DefaultLogsSpecs, torchs.Std)):
        masks = [{r: std(m) for r, m in x.items()} if isinstance(x, dict) else std(x) for x in (redirects, tee)]
        folder = tmp_path / name
        variables = envs()
        dest = specs(str(folder), *masks, local_ranks_filter).reify(variables)
        assert {rank: env[VARIABLE] for rank, env in variables.items()} == dest.error_files
        assert all(os.path.isdir(os.path.dirname(path)) for path in dest.error_files.values())
        found.append(relative(dest, folder))
    assert found[0] == found[1]


def test_dev_null_means_no_files() -> None:
    """As in torch, with one difference: there is no path below /dev/null that nobody can open."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs as Torchs

    variables, theirs = envs(), envs()
    dest, torchs = DefaultLogsSpecs("/dev/null", Std.ALL).reify(variables), Torchs("/dev/null").reify(theirs)
    assert variables == theirs
    assert asdict(dest) == {**asdict(torchs), "filtered_stdout": "", "filtered_stderr": ""}


def test_a_hidden_worker_is_hidden_without_files_too() -> None:
    """torch shows it: the filter is forgotten with /dev/null."""
    dest = DefaultLogsSpecs("/dev/null", local_ranks_filter={1}).reify(envs(2))
    assert (dest.stdouts, dest.stderrs) == ({0: os.devnull, 1: ""}, {0: os.devnull, 1: ""})


def test_an_earlier_start_keeps_its_logs(tmp_path: Path) -> None:
    """A round that ends because a node joins does not count as a restart. torch deletes what its workers wrote."""
    specs = DefaultLogsSpecs(str(tmp_path), Std.ALL)
    for text in ("first", "second", "third"):
        Path(specs.reify(envs(1)).stdouts[0]).write_text(text)
    (run,) = tmp_path.iterdir()
    kept = {path.name: (path / "0" / "stdout.log").read_text() for path in run.iterdir()}
    assert kept == {"attempt_1": "third", "attempt_1.1": "first", "attempt_1.2": "second"}
    assert specs.reify(envs(1, restarts=2)).stdouts[0] == str(run / "attempt_2" / "0" / "stdout.log")


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    """As in torch: before anything is started."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is a file"):
        DefaultLogsSpecs(str(tmp_path / "file"))


def test_the_folder_is_made_at_once(tmp_path: Path) -> None:
    """A path that cannot be made is a mistake that the caller learns of here."""
    specs = DefaultLogsSpecs(str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert specs.root_log_dir == str(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        DefaultLogsSpecs(str(tmp_path / "file" / "c"))


def test_without_a_folder_error_files_are_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch leaves a folder in /tmp for each launch."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with nothing_left(tmp_path):
        specs = DefaultLogsSpecs()
        assert not list(tmp_path.iterdir()), "nothing is made before it is needed"
        dest = specs.reify(envs(1))
        assert specs.root_log_dir.startswith(str(tmp_path))
        Path(dest.error_files[0]).write_text("{}")
        del specs
        gc.collect()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the type that torch raises, and the path. Without output to keep, there are no error files then."""
    specs = DefaultLogsSpecs(str(tmp_path / "logs"))
    (tmp_path / "logs").rmdir()
    (tmp_path / "logs").touch()
    with pytest.raises(NotADirectoryError, match="logs"):
        specs.reify(envs(1))
    monkeypatch.setattr(os, "makedirs", fails)
    with pytest.raises(OSError, match="no space"):
        DefaultLogsSpecs(None, Std.OUT).reify(envs(1))
    assert DefaultLogsSpecs().reify(envs(1)).error_files == {0: os.devnull}


def fails(*given: object, **more: object) -> None:
    raise OSError(28, "no space left on device")


def test_a_run_id_does_not_lead_elsewhere(tmp_path: Path) -> None:
    """A run id is any text."""
    variables = {0: {"TORCHELASTIC_RUN_ID": "../up/job"}}
    path = DefaultLogsSpecs(str(tmp_path / "logs")).reify(variables).error_files[0]
    assert Path(path).parents[3] != tmp_path
    assert Path(path).parents[2].name.startswith(".._up_job_")


@pytest.mark.parametrize("masks", [{"redirects": Std.OUT}, {"tee": {0: Std.ERR}}])
def test_without_a_folder_output_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, masks: Any) -> None:
    """The user has asked for files, and must find them after the run."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs(None, **masks)
    dest = specs.reify(envs(1))
    del specs
    gc.collect()
    path = dest.stdouts[0] or dest.stderrs[0]
    assert Path(path).parent.is_dir()


def test_a_forked_child_leaves_its_parents_folder(tmp_path: Path) -> None:
    """A host program forks, and the child ends first."""
    run_alone(
        """
        import os, sys
        os.environ["TMPDIR"] = sys.argv[1]
        from reknit.elastic.multiprocessing.logs import DefaultLogsSpecs
        specs = DefaultLogsSpecs()
        folder = specs.root_log_dir
        if (pid := os.fork()) == 0:
            sys.exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.path.isdir(folder)
        """,
        str(tmp_path),
    )
    assert not list(tmp_path.iterdir()), "and the parent's end removes it"


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:3,1:0,2:1,3:2", "0:1"])
def test_streams_are_read_as_by_torch(text: str) -> None:
    """`Std.from_str` reads what users write on the command line."""
    from torch.distributed.elastic.multiprocessing.api import Std as Torchs

    ours, theirs = Std.from_str(text), Torchs.from_str(text)
    assert ours == theirs
    assert isinstance(ours, (Std, dict))


def test_a_local_rank_of_two_digits_is_read() -> None:
    """A node may have sixteen GPUs. torch refuses the text."""
    assert Std.from_str("10:3,9:1") == {10: Std.ALL, 9: Std.OUT}


@pytest.mark.parametrize("text", ["", "4", "0:4", "x", "0:1,", "1,2"])
def test_nonsense_is_no_stream(text: str) -> None:
    """With the type that torch raises."""
    with pytest.raises(ValueError, match="does not match"):
        Std.from_str(text)


def test_missing_ranks_have_no_streams() -> None:
    """As in torch's documentation."""
    assert to_map(Std.OUT, 2) == {0: Std.OUT, 1: Std.OUT}
    assert to_map({1: Std.OUT}, 2) == {0: Std.NONE, 1: Std.OUT}


def test_destinations_are_empty_by_default() -> None:
    """Specs of users make them step by step."""
    assert LogsDest() == LogsDest({}, {}, {}, {}, {}, "", "")


def test_specs_are_equal_by_their_settings(tmp_path: Path) -> None:
    """As in torch: configurations are compared in tests of users."""
    assert DefaultLogsSpecs(str(tmp_path), Std.OUT) == DefaultLogsSpecs(str(tmp_path), Std.OUT)
    assert DefaultLogsSpecs(str(tmp_path), Std.OUT) != DefaultLogsSpecs(str(tmp_path), Std.ERR)
    assert DefaultLogsSpecs("/dev/null") != "specs"
    assert "redirects=" in repr(DefaultLogsSpecs("/dev/null"))
