"""A worker that was forked from a zygote is the same as one that was started by exec, as far as its script can see.

Each probe runs under two keepers, one with a zygote. What both workers print must be equal.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import probes
from tests.support.warming import Ended, Warmed, install, needs_linux

pytestmark = needs_linux

PROBES = [
    name
    for name, value in vars(probes).items()
    if inspect.isfunction(value) and value.__module__ == probes.__name__ and name not in ("show", "double")
]
STATUS = {"exits_with_a_status": 7, "exits_at_once": 9, "is_interrupted": -signal.SIGINT, "aborts": -signal.SIGABRT}


def normal(ended: Ended) -> Ended:
    """Without numbers that differ from one process to the next."""

    def text(said: str) -> str:
        # First: a random name may hold "0x" or "pid", like keeper-c0x1fjnw.
        said = re.sub(r"(job_|keeper-)\w+", r"\1…", said)
        said = re.sub(r"0x[0-9a-f]+|#\d+ \(deleted\)", "…", said)
        said = re.sub(r"(pid|psm|mp-|pym-)[-_=: ]?\w+", r"\1…", said)
        return re.sub(
            r"(MASTER_PORT=|TORCHELASTIC_RUN_ID=|REKNIT_PROGRESS=/proc/|pipe:|socket:|port )\[?[\w/]+\]?", r"\1…", said
        )

    return Ended(ended.exitcode, text(ended.out), text(ended.err))


@pytest.mark.parametrize("name", ["keeper-c0x1fjnw", "keeper-apid_3x", "job_mp_0x12", "keeper-plainabc"])
def test_a_random_name_is_no_difference(name: str) -> None:
    """Also where a part of it looks like an address or a pid."""
    kind = "job_" if name.startswith("job_") else "keeper-"
    assert normal(Ended(0, f"/tmp/{name}/logs", "")).out == f"/tmp/{kind}…/logs"


class Both:
    """The same command line under two keepers."""

    def __init__(self, folder: Path, **configure: Any) -> None:
        self.folder = folder
        self._configure = configure

    def compare(self, argv: Sequence[str], modules: Sequence[str] = ("ahead",), **configure: Any) -> Ended:
        """Raises `AssertionError` if they differ. Returns what the warm one did."""
        ((cold, warm_one),) = self.ended(argv, modules, **configure)
        assert warm_one == cold
        return warm_one

    def ended(
        self, argv: Sequence[str], modules: Sequence[str] = ("ahead",), count: int = 1, **configure: Any
    ) -> list[tuple[Ended, ...]]:
        """How so many workers have ended: of each the cold one and the warm one."""
        found = []
        for warm in (None, {"modules": tuple(modules)}):
            warmed = Warmed(self.folder, argv, warm, **{**self._configure, **configure})
            try:
                ended = warmed.run(count=count)
                if warm is not None:
                    assert os.path.realpath(f"/proc/{warmed.zygote}/exe"), "there is a zygote"
                    assert warmed.said() == "", "nothing is left out"
            finally:
                warmed.close()
            found.append(map(normal, ended))
        return [*zip(*found, strict=True)]


def prepared(folder: Path) -> Both:
    install(folder, ahead="import json, random, multiprocessing, threading, socket, asyncio, tempfile, logging")
    (folder / "beside.py").write_text("NAME = __name__")
    return Both(folder)


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, ...]]:
    """How each probe has ended, cold and warm. Each is a worker of one round."""
    both = prepared(tmp_path_factory.mktemp("probes"))
    shutil.copy(probes.__file__, both.folder / "train.py")
    ended = both.ended(["-u", "train.py", *PROBES], count=len(PROBES), stdin="a line\nanother")
    return dict(zip(PROBES, ended, strict=True))


@pytest.mark.parametrize("probe", PROBES)
def test_a_script_cannot_tell(probe: str, probed: dict[str, tuple[Ended, ...]]) -> None:
    """It was written for a process of its own."""
    cold, warm = probed[probe]
    assert warm == cold
    assert warm.exitcode == STATUS.get(probe, warm.exitcode)
    assert warm.out or warm.err or warm.exitcode, "the probe says something"


OTHER_WAYS: dict[str, tuple[list[str], Callable[[Path], object]]] = {
    "module": (["-m", "own.train", "a"], lambda folder: None),
    "package": (["-m", "own"], lambda folder: None),
    "text": (
        ["-c", "import sys, traceback; print(sys.argv, sys.path[0], *traceback.format_stack())", "a"],
        lambda folder: None,
    ),
    "folder": (["own", "a"], lambda folder: None),
    "link": (["link.py"], lambda folder: (folder / "link.py").symlink_to(folder / "own" / "plain.py")),
    "buffered": (["own/plain.py"], lambda folder: None),
    "optimised": (["-OO", "-W", "error", "-X", "dev", "own/plain.py"], lambda folder: None),
    "safe path": (["-P", "own/plain.py"], lambda folder: None),
    "standard input": (["-u", "-"], lambda folder: None),
    "no such script": (["missing.py"], lambda folder: None),
    "no such module": (["-m", "own.missing"], lambda folder: None),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_a_program_cannot_tell_however_it_is_named(way: str, both: Both) -> None:
    """Python has many ways to be told what to run."""
    own = both.folder / "own"
    own.mkdir()
    show = """if True:
        import sys, traceback
        print(__name__, __package__, __file__, sys.argv, sys.path, sys.flags, __spec__ and __spec__.name)
        print(*traceback.format_stack())
        assert not sys.argv[1:], "arguments"
    """
    (own / "plain.py").write_text(show)
    (own / "__init__.py").write_text("")
    for name in ("train", "__main__"):
        (own / f"{name}.py").write_text(show)
    argv, prepare = OTHER_WAYS[way]
    prepare(both.folder)
    both.compare(argv, stdin="import sys; print(sys.argv, __name__, sys.stdin.readline())\n1")


def test_a_variable_that_an_import_has_made_is_there(both: Both) -> None:
    """As if the worker had imported the module itself."""
    install(both.folder, makes="import os; os.environ['CACHE_OF_MINE'] = '/tmp/x'")
    (both.folder / "train.py").write_text("import makes, os; print(os.environ['CACHE_OF_MINE'])")
    assert both.compare(["train.py"], ["makes"]).out == "/tmp/x\n"


def test_each_worker_has_numbers_of_its_own(both: Both) -> None:
    """Forks of one process would draw the same ones."""
    (both.folder / "train.py").write_text("""if True:
        import multiprocessing as mp, numpy, random, torch
        print(random.random(), numpy.random.random(), torch.rand(1).item(), mp.current_process().authkey.hex())
        torch.manual_seed(1); numpy.random.seed(1); random.seed(1)
        print(random.random(), numpy.random.random(), torch.rand(1).item())
    """)
    warmed = Warmed(both.folder, ["train.py"], {"modules": ("torch", "numpy", "ahead")}, env={"OMP_NUM_THREADS": "1"})
    try:
        first, second = (ended.out.splitlines() for ended in warmed.run(count=2))
        assert all(one != other for one, other in zip(first[0].split(), second[0].split(), strict=True))
        assert first[1] == second[1]
        assert "cold" not in warmed.said()
    finally:
        warmed.close()


def test_a_folder_of_the_paths_may_be_made_later(both: Both) -> None:
    """Python notes which ones do not exist. A round makes one, with a module for the next round."""
    (both.folder / "train.py").write_text("""if True:
        import os
        if os.path.exists("gen"):
            import made
        else:
            os.mkdir("gen")
            with open("gen/made.py", "w") as file: file.write("print(3)")
    """)
    warmed = Warmed(both.folder, ["train.py"], {"modules": ("json",)}, env={"PYTHONPATH": str(both.folder / "gen")})
    assert [warmed.run(round_)[0].out for round_ in range(2)] == ["", "3\n"]
    assert warmed.zygote
    warmed.close()


def test_an_empty_variable_for_paths_is_none(both: Both) -> None:
    """Python takes it for none."""
    (both.folder / "train.py").write_text("print(1)")
    both.compare(["train.py"], ["json"], env={"PYTHONPATH": ""})


def test_a_folder_for_temporary_files_that_the_script_names(both: Both) -> None:
    """The module looks for it once, and that may have been done at an import."""
    install(both.folder, looks="import tempfile; tempfile.gettempdir()")
    (both.folder / "mine").mkdir()
    (both.folder / "train.py").write_text(
        "import os; os.environ['TMPDIR'] = os.path.abspath('mine'); import tempfile; print(tempfile.gettempdir())"
    )
    assert both.compare(["train.py"], ["looks"]).out == f"{both.folder / 'mine'}\n"
