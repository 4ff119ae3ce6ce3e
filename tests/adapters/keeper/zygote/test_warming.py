"""What becomes of a zygote, and of the rounds meanwhile: no round is lost, whatever happens to it."""

from __future__ import annotations

import errno
import os
import re
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from reknit.adapters.keeper.common.guard import Guard
from reknit.adapters.keeper.process import launcher
from reknit.adapters.keeper.zygote import warming
from reknit.adapters.keeper.zygote import zygote as zygotes
from tests.support.keepers import wait_gone
from tests.support.leaks import nothing_left
from tests.support.warming import PACKAGES, Warmed, environ_of, install, needs_linux, wait_dead

pytestmark = needs_linux

SCRIPT = """if True:
    import counted, os, sys
    print(counted.PID, counted.__file__)
    print(os.environ.get("RANK"), sys.argv)
"""
WAITS = """if True:
    import os, sys, time
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit(4)
"""
Make = Callable[..., Warmed]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes keepers whose workers run `SCRIPT`."""
    made: list[Warmed] = []
    install(tmp_path, counted="import os; PID = os.getpid()")
    (tmp_path / "train.py").write_text(SCRIPT)

    def warmed(warm: dict[str, Any] | None = None, *args: str, **configure: Any) -> Warmed:
        made.append(Warmed(tmp_path, ["train.py", *args], {"modules": ("counted",), **(warm or {})}, **configure))
        return made[-1]

    yield warmed
    for each in made:
        each.close()


def imported_by(warmed: Warmed, round_: int = 0, count: int = 1) -> set[int]:
    """Runs a round. Returns the processes in which its workers' package was imported."""
    ended = warmed.run(round_, count)
    assert [each.exitcode for each in ended] == [0] * count, ended
    return {int(each.out.split()[0]) for each in ended}


def test_all_workers_of_all_rounds_share_one_import(make: Make) -> None:
    """This is what it is for."""
    warmed = make()
    (zygote,) = imported_by(warmed, count=3)
    assert zygote == warmed.zygote
    assert imported_by(warmed, 1, 2) == {zygote}
    assert warmed.said() == ""


def test_arguments_that_differ_by_local_rank_make_workers_cold(make: Make) -> None:
    """A module that looks at the arguments would see those of no worker."""
    warmed = make(None, "${local_rank}", "x")
    said = [ended.out.splitlines()[1] for ended in warmed.run(count=2)]
    assert said == ["2 ['train.py', '0', 'x']", "3 ['train.py', '1', 'x']"]
    why = "the arguments of the script differ from one worker to the next (${local_rank})"
    assert warmed.said() == f"reknit: the workers start cold: {why}\n"


def test_a_zygote_is_marked_guarded_and_no_stray(make: Make) -> None:
    """It ends with its keeper, whatever kills that."""
    warmed = make()
    imported_by(warmed)
    zygote = warmed.zygote
    environ = environ_of(zygote)
    assert environ["REKNIT_NODE"] == warmed.kept.mark
    assert os.getpgid(zygote) == zygote
    os.kill(warmed.kept.pid, signal.SIGKILL)
    wait_gone([zygote])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_another_zygote_follows_one_that_has_ended(signum: int, make: Make, tmp_path: Path) -> None:
    """Also while workers run, so that their restart is warm."""
    warmed = make()
    (first,) = imported_by(warmed)
    (tmp_path / "train.py").write_text(WAITS)
    warmed.begin(1)
    warmed.kept.drive_until(lambda: warmed.kept.keeper.pids(1))
    os.kill(first, signum)
    warmed.kept.drive_until(lambda: warmed.zygote not in (0, first))
    (tmp_path / "go").touch()
    assert [ended.exitcode for ended in warmed.end(1)] == [4], "the worker did not notice"
    (tmp_path / "train.py").write_text(SCRIPT)
    assert imported_by(warmed, 2) == {warmed.zygote}
    assert warmed.said() == ""


def test_a_zygote_that_stops_answering_costs_no_round(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced."""
    monkeypatch.setattr(zygotes, "_ANSWER_S", 0.5)
    warmed = make(how="fork")
    (first,) = imported_by(warmed)
    os.kill(first, signal.SIGSTOP)
    assert first not in imported_by(warmed, 1, 2)
    wait_gone([first])
    assert warmed.said() == "reknit: the zygote is replaced: it has not answered within 0.5 s\n"
    assert imported_by(warmed, 2) == {warmed.zygote}


def test_what_has_changed_on_disk_is_imported_again(make: Make, tmp_path: Path) -> None:
    """An upgrade of a package, between two rounds."""
    warmed = make()
    (first,) = imported_by(warmed)
    install(tmp_path, counted="import os; PID = os.getpid()  # changed")
    (second,) = imported_by(warmed, 1)
    assert second == warmed.zygote != first
    changed = tmp_path / "site-packages" / "counted.py"
    assert warmed.said() == f"reknit: the zygote is replaced: {changed} has changed\n"


def test_the_script_itself_may_change(make: Make, tmp_path: Path) -> None:
    """It is read by each worker."""
    warmed = make()
    (zygote,) = imported_by(warmed)
    (tmp_path / "train.py").write_text("import counted; print(counted.PID, 'changed')")
    (ended,) = warmed.run(1)
    assert ended.out == f"{zygote} changed\n"


def test_a_module_beside_the_script_hides_an_installed_one(make: Make, tmp_path: Path) -> None:
    """As Python has it. Which module it is cannot be changed once it is imported, so nothing is warm."""
    (tmp_path / "counted.py").write_text("import os; PID = os.getpid()")
    warmed = make()
    (ended,) = warmed.run()
    assert ended.out.split()[1] == str(tmp_path / "counted.py")
    assert "the workers start cold" in warmed.said()
    assert "counted.py has the name of the module counted" in warmed.said()


def test_a_module_in_the_zip_file_of_the_program_hides_one_too(tmp_path: Path) -> None:
    """Python looks there first."""
    install(tmp_path, counted="")
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as packed:
        packed.writestr("__main__.py", "import counted; print(counted.__file__)")
        packed.writestr("counted.py", "")
    warmed = Warmed(tmp_path, ["app.pyz"], {"modules": ("counted",)})
    (ended,) = warmed.run()
    assert ended.out == f"{tmp_path / 'app.pyz' / 'counted.py'}\n"
    assert f"{tmp_path / 'app.pyz' / 'counted.py'} has the name of the module counted" in warmed.said()
    warmed.close()


def test_a_package_that_is_spread_over_folders_has_a_part_beside_the_script(make: Make, tmp_path: Path) -> None:
    """Python looks for its modules in both."""
    for folder, where in ((tmp_path, "beside"), (tmp_path / PACKAGES, "installed")):
        (folder / "spread").mkdir(parents=True)
        (folder / "spread" / "part.py").write_text(f"WHERE = '{where}'")
    (tmp_path / "train.py").write_text("from spread.part import WHERE; print(WHERE)")
    warmed = make({"modules": ("spread.part", "counted")})
    (ended,) = warmed.run()
    assert ended.out == "beside\n"
    assert f"{tmp_path / 'spread'} has the name of the module spread" in warmed.said()


@pytest.mark.parametrize("how", ["by itself", "by another module", "by its package"])
def test_the_program_of_m_is_not_imported_ahead(how: str, tmp_path: Path) -> None:
    """Python would warn of it, and run it twice."""
    install(tmp_path, counted="", imports_it="import own.train")
    own = tmp_path / PACKAGES / "own"
    own.mkdir()
    (own / "__init__.py").write_text("")
    for name in ("train", "__main__"):
        (own / f"{name}.py").write_text("import counted; print(__name__)")
    argv, module = (["-m", "own"], "own.__main__") if how == "by its package" else (["-m", "own.train"], "own.train")
    modules = ("counted", "imports_it") if how == "by another module" else ("counted", module)
    warmed = Warmed(tmp_path, ["-W", "error", *argv], {"modules": modules})
    (ended,) = warmed.run()
    assert (ended.exitcode, ended.out) == (0, "__main__\n"), ended.err
    assert warmed.zygote
    imported = "imports_it imports the program of the workers" in warmed.said()
    assert imported == (how == "by another module")
    warmed.close()


def test_a_folder_of_data_hides_nothing(make: Make, tmp_path: Path) -> None:
    """For example `wandb` or `datasets` beside the script."""
    (tmp_path / "counted").mkdir()
    warmed = make()
    assert imported_by(warmed) == {warmed.zygote}


def test_what_is_harmful_is_left_out_and_named(make: Make, tmp_path: Path) -> None:
    """And whatever imports it."""
    install(
        tmp_path,
        harmful="import os; RANK = os.environ.get('RANK')",
        innocent="import harmful",
    )
    (tmp_path / "train.py").write_text("import counted, harmful, innocent; print(counted.PID, harmful.RANK)")
    warmed = make({"modules": ("harmful", "counted", "innocent", "nowhere", "nowhere.at.all")})
    ended = warmed.run(count=2)
    assert [each.out for each in ended] == [f"{warmed.zygote} 2\n", f"{warmed.zygote} 3\n"]
    line = (
        "reknit: not imported ahead of the workers: harmful reads RANK while it is imported (in harmful); "
        "innocent reads RANK while it is imported (in harmful); nowhere was not found among the installed packages\n"
    )
    assert warmed.said() == line


def test_what_a_harmful_module_has_started_ends(make: Make, tmp_path: Path) -> None:
    """It would hold the port of the one that the worker starts."""
    started = tmp_path / "started"
    install(
        tmp_path,
        server=f"""if True:
        import subprocess
        for _ in range(2):
            with open({str(started)!r}, "a") as file:
                print(subprocess.Popen(["sh", "-c", "sleep 1000 & sleep 1000"]).pid, file=file)
        """,
    )
    warmed = make({"modules": ("server", "counted")})
    assert imported_by(warmed) == {warmed.zygote}
    assert "server starts a process" in warmed.said()
    for pid in map(int, started.read_text().split()):
        wait_dead(pid)
    assert not [child for child in psutil.Process(warmed.kept.pid).children() if child.pid != warmed.zygote]


@pytest.mark.parametrize(
    "word", ['{"ready": 1}', '{"ready": {}}', '{"harms": {}}', "[]", '{"fails": 7}', "[" * 200_000]
)
@pytest.mark.slow
def test_a_module_that_writes_to_the_socket_costs_no_round(word: str, make: Make, tmp_path: Path) -> None:
    """Also if it writes what a zygote might say."""
    (tmp_path / "word").write_text(word + "\n")
    install(tmp_path, writes="import os; os.write(8, open('word', 'rb').read())")
    warmed = make({"modules": ("writes",)})
    imported_by(warmed)
    assert warmed.said() == "reknit: the workers start cold: the zygote has ended 3 times before it was ready\n"


def test_a_variable_that_differs_after_all_makes_a_worker_cold(make: Make, tmp_path: Path) -> None:
    """Here the one that says where the virtual device is."""
    install(tmp_path, counted="import os; PID = os.getpid(); D = os.environ.get('CUDA_VISIBLE_DEVICES')")
    warmed = make(virtual_local_rank=True)
    assert warmed.zygote not in imported_by(warmed, count=2)
    assert "counted reads CUDA_VISIBLE_DEVICES while it is imported" in warmed.said()


def test_a_module_is_not_blamed_for_what_another_one_has_started(make: Make, tmp_path: Path) -> None:
    """Its import is looked at by the next zygote, in which nothing of it runs."""
    install(
        tmp_path,
        busy="""if True:
        import os, threading, time
        def work():
            while True: os.environ["BUSY"] = str(time.time()); time.sleep(0.001)
        threading.Thread(target=work, daemon=True).start()
        """,
        innocent="import os, time; PID = os.getpid(); time.sleep(0.3)",
    )
    (tmp_path / "train.py").write_text("import innocent; print(innocent.PID)")
    warmed = make({"modules": ("busy", "innocent")})
    assert imported_by(warmed) == {warmed.zygote}
    assert warmed.said() == "reknit: not imported ahead of the workers: busy starts a thread\n"


def test_a_signal_to_a_zygote_leaves_no_module_out(make: Make, tmp_path: Path) -> None:
    """`pkill -INT -f train.py` reaches it as well."""
    install(tmp_path, slow="import os, time\nopen('up', 'w').close()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    warmed = make({"modules": ("slow", "counted")})
    warmed.kept.drive_until((tmp_path / "up").exists)
    first = warmed.zygote
    os.kill(first, signal.SIGINT)
    warmed.kept.drive_until(lambda: warmed.zygote not in (0, first))
    (tmp_path / "go").touch()
    assert imported_by(warmed) == {warmed.zygote}
    assert warmed.said() == ""


def test_a_line_names_three(make: Make, tmp_path: Path) -> None:
    """It is read in a terminal."""
    install(tmp_path, **{f"bad{number}": "import os; os.environ['RANK']" for number in range(5)})
    warmed = make({"modules": ("counted", *(f"bad{number}" for number in range(5)), "unwritten.part")})
    assert imported_by(warmed) == {warmed.zygote}
    line = warmed.said()
    assert "workers: bad0 reads RANK while it is imported (in bad0); bad1" in line
    assert line.endswith("; and 3 more\n")


def test_with_v_it_is_said_what_the_workers_are(make: Make, tmp_path: Path) -> None:
    """And when a zygote was lost."""
    warmed = make({"is_verbose": True})
    (first,) = imported_by(warmed)
    (tmp_path / "train.py").write_text(WAITS)
    warmed.begin(1)
    warmed.kept.drive_until(lambda: warmed.kept.keeper.pids(1))
    os.kill(first, signal.SIGKILL)
    warmed.kept.drive_until(lambda: warmed.zygote not in (0, first))
    (tmp_path / "go").touch()
    warmed.end(1)
    (tmp_path / "train.py").write_text(SCRIPT)
    imported_by(warmed, 2)
    assert [re.sub("[0-9.]+ ", "", line) for line in warmed.said().splitlines()] == [
        ready := "reknit: workers are now forks of a zygote: modules, in s",
        "reknit: the zygote has ended, and another one is started",
        ready,
    ]


def test_a_round_that_waits_for_long_says_so(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may take a minute, and somebody sits before the terminal."""
    monkeypatch.setattr(warming, "_PATIENCE_S", 0.1)
    install(tmp_path, slow="import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    warmed = make({"modules": ("slow", "counted")}, how="fork")
    warmed.begin()
    line = "reknit: the workers wait until their modules are imported (120 s at most)\n"
    warmed.kept.drive_until(lambda: warmed.kept.console.read_text() == line)
    (tmp_path / "go").touch()
    (ended,) = warmed.end()
    assert ended.out.split()[0] == str(warmed.zygote)


def test_a_zygote_that_is_never_ready_is_given_up(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module may hang at its import, and a zygote may be stopped."""
    monkeypatch.setattr(warming, "READY_S", 0.3)
    install(tmp_path, slow="import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)")
    warmed = make({"modules": ("slow",)}, how="fork")
    imported_by(warmed)
    assert warmed.zygote == 0
    assert warmed.said() == "reknit: the workers start cold: the modules were not imported within 0.3 s\n"


def test_what_looks_at_a_whole_python_makes_it_cold(make: Make, tmp_path: Path) -> None:
    """Coverage for example, which begins with Python and looks for a process of its own."""
    install(tmp_path, sitecustomize="import sys; sys.settrace(lambda *args: None)")
    warmed = make()
    imported_by(warmed)
    why = "a debugger, a profiler or a measurement of coverage has begun with Python"
    assert warmed.said() == f"reknit: the workers start cold: {why}\n"


def test_a_stop_ends_the_wait_for_the_modules(make: Make, tmp_path: Path) -> None:
    """A second Ctrl-C must not be needed."""
    install(tmp_path, slow="import threading; threading.Event().wait()")
    warmed = make({"modules": ("slow",)})
    warmed.begin()
    assert warmed.kept.stop().stuck == ()


def test_a_keeper_without_descriptors_starts_its_workers_cold(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not fail because of a zygote."""
    left = [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def guard() -> Guard:
        if left:
            raise left.pop()
        return Guard()

    monkeypatch.setattr(launcher, "Guard", guard)
    warmed = make(how="fork")
    imported_by(warmed)
    assert warmed.zygote == 0
    assert warmed.said() == "reknit: the workers start cold: Too many open files\n"


def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, descriptor or file."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    install(tmp_path, counted="import os; PID = os.getpid()")
    (tmp_path / "train.py").write_text(SCRIPT)
    with nothing_left():
        warmed = Warmed(tmp_path, ["train.py"], {"modules": ("counted",)})
        warmed.run(count=2)
        zygote = warmed.zygote
        warmed.close()
        wait_dead(zygote)
