"""What an import must not do if its module is to be shared by workers. There is a small package for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.alone import run_alone

LOOKS = "looks through all variables while it is imported"
PACKAGES = {
    "nothing": ("VALUE = 1", ""),
    "exits_well": ("import atexit; atexit.register(print, 'bye')", ""),
    "reads_something": ("import os; USER = os.environ.get('USER', '')", ""),
    "makes_a_variable": ("import os; os.environ['CACHE_OF_MINE'] = '/tmp/x'", ""),
    "reads_its_rank": (
        "import os; RANK = int(os.environ.get('RANK', 0))",
        "reads RANK while it is imported",
    ),
    "asks_for_its_rank": (
        "import os; IS_FIRST = 'RANK' not in os.environ",
        "reads RANK while it is imported",
    ),
    "reads_by_another": ("import helper", ""),
    "reads_by_a_function": ("import functions; RANK = functions.rank()", "reads RANK while it is imported"),
    "copies_all": ("import os; ALL = dict(os.environ)", LOOKS),
    "copies_all_too": ("import os; ALL = os.environ.copy()", LOOKS),
    "copies_bytes": ("import os; ALL = dict(os.environb)", LOOKS),
    "copies_deeply": ("import copy, os; ALL = copy.deepcopy(os.environ)", LOOKS),
    "shows_all": ("import os; ALL = repr(os.environ)", LOOKS),
    "searches_all": ("import os; MINE = {k: v for k, v in os.environ.items() if k.startswith('MINE')}", LOOKS),
    "finds_its_rank": ("import os; IS = any(k in ('RANK', 'X') for k in os.environ)", LOOKS),
    "changes_all": ("import os; MINE = {k.lower(): v.lower() for k, v in os.environ.items()}", LOOKS),
    "looks_for_its_own": ("import tqdm", ""),
    "keeps_a_reader": ("import os; READ = os.environ.__getitem__", ""),
    "expands": ("import os; PATH = os.path.expandvars('/x/$RANK')", "reads RANK while it is imported"),
    "sets_for_a_moment": ("import os; os.environ['RANK'] = '0'; import nothing; del os.environ['RANK']", ""),
    "sets_by_another": ("import sets_its_rank_too", ""),
    "sets_its_rank": ("import os; os.environ['RANK'] = '0'", "changes the variable RANK while it is imported"),
    "changes_a_variable": ("import os; os.environ['HOME'] = '/x'", "changes the variable HOME while it is imported"),
    "removes_a_variable": ("import os; del os.environ['HOME']", "removes the variable HOME while it is imported"),
    "starts_a_thread": (
        "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
        "starts a thread",
    ),
    "starts_a_process": (
        "import subprocess as s; P = s.Popen(['sleep', '1000'], stdout=s.DEVNULL, stderr=s.DEVNULL)",
        "starts a process",
    ),
    "opens_a_file": ("import os; FD = os.open('/dev/full', os.O_RDONLY)", "opens /dev/full and leaves it open"),
    "opens_a_device": ("import os; FD = os.open(os.environ['DEVICE'], os.O_RDONLY)", "opens DEVICE and leaves it open"),
    "handles_a_signal": ("import signal; signal.signal(signal.SIGUSR1, print)", "handles a signal"),
    "blocks_a_signal": ("import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])", "blocks a signal"),
    "forks": (
        "import os, time\nif os.fork() == 0:\n  time.sleep(1)  # a zombie is a process as well",
        "starts a process",
    ),
    "reads_bytes": (
        "import os; RANK = os.environb.get(b'RANK')",
        "reads RANK while it is imported",
    ),
    "runs_a_process": ("import os; os.system('true')", "runs a process"),
    "shares_memory": ("import mmap; M = mmap.mmap(-1, 4096)", "shares memory with other processes"),
    "makes_a_lock": ("import multiprocessing; L = multiprocessing.Lock()", "shares memory with other processes"),
    "changes_arguments": ("import sys; sys.argv.append('x')", "changes the arguments of the script"),
    "execs": (
        "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'pass'])",
        "cannot be imported: OSError: a module that is imported ahead of the workers runs another program in its place",
    ),
    "replaces_environ": (
        "import os; os.environ = {}",
        "puts another object in the place of os.environ",
    ),
    "changes_its_umask": ("import os; os.umask(0o7)", "changes the mask of new files"),
    "goes_elsewhere": ("import os; os.chdir('/')", "changes the working folder"),
    "limits_itself": (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (99, r.getrlimit(r.RLIMIT_NOFILE)[1]))",
        "changes a limit of the process",
    ),
    "looks_elsewhere_first": ("import sys; sys.path.insert(0, '/x')", "changes where modules are looked for first"),
    "looks_elsewhere_last": ("import sys; sys.path.append('/x')", ""),
    "replaces_stdout": (
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer)",
        "replaces sys.stdin, sys.stdout or sys.stderr",
    ),
    "makes_a_folder": ("import tempfile; D = tempfile.TemporaryDirectory()", "leaves a temporary file"),
    "makes_a_file": ("import os, tempfile; fd, F = tempfile.mkstemp(); os.close(fd)", "leaves a temporary file"),
    "makes_no_file": ("import os, tempfile; d = tempfile.mkdtemp(); os.rmdir(d)", ""),
    "sets_a_timer": ("import signal; signal.setitimer(signal.ITIMER_REAL, 1000)", "sets a timer"),
    "replaces_import": (
        "import builtins; builtins.__import__ = lambda *args, old=__import__: old(*args)",
        "puts another function in the place of __import__",
    ),
    "seeds_random": ("import random; random.seed(1)", "uses the random numbers of `random`"),
    "seeds_numpy": ("import numpy; numpy.random.seed(1)", "uses the random numbers of numpy"),
    "raises": ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "ends": ("raise SystemExit('no')", "cannot be imported: SystemExit: no"),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By package: what its import did. All are imported in one process, one after the other."""
    folder = tmp_path_factory.mktemp("packages")
    device = folder / "nvidia0"
    device.touch()
    (folder / "helper.py").write_text("import os; RANK = os.getenv('LOCAL_RANK')")
    (folder / "functions.py").write_text("import os\ndef rank(): return os.environ.get('RANK')")
    (folder / "sets_its_rank_too.py").write_text("import os; os.environ['LOCAL_RANK'] = '0'")
    (folder / "tqdm").mkdir()
    (folder / "tqdm" / "__init__.py").write_text("from .utils import variables; MINE = variables()")
    (folder / "tqdm" / "utils.py").write_text(
        "import os\ndef variables(): return {k: v for k, v in os.environ.items() if k.startswith('TQDM_')}"
    )
    for name, (text, _) in PACKAGES.items():
        (folder / f"{name}.py").write_text(text)
    script = f"""
        import json, os, signal, sys
        from reknit.adapters.keeper.zygote.harmless import Importer
        sys.path.append({str(folder)!r})
        os.environ["DEVICE"] = {str(device)!r}
        import random, numpy.random, tempfile
        importer = Importer(["RANK", "LOCAL_RANK"])
        for name in {[*PACKAGES]!r}:
            importer.import_(name)
        kept, found = importer.harms, {{name: importer.harms.get(name, "") for name in {[*PACKAGES]!r}}}
        assert kept["helper"] == "reads LOCAL_RANK while it is imported"
        assert kept["sets_its_rank_too"] == "changes the variable LOCAL_RANK while it is imported"
        imports = {{"reads_by_another": "imports helper", "sets_by_another": "imports sets_its_rank_too"}}
        assert importer.importers() == imports, importer.importers()
        assert sys.modules["keeps_a_reader"].READ("DEVICE") == os.environ["DEVICE"]
        assert importer.added == {{"CACHE_OF_MINE": "/tmp/x"}}, importer.added
        assert {{"RANK", "USER", "LOCAL_RANK"}} <= importer.read
        assert type(os.environ).__name__ == "_Environ"
        sys.modules["starts_a_process"].P.kill()
        os.write(1, json.dumps(found).encode())
        os._exit(0)
    """
    result: dict[str, str] = json.loads(run_alone(script))
    return {name: what.replace(str(device), "DEVICE") for name, what in result.items()}


@pytest.mark.parametrize("name", PACKAGES)
def test_what_an_import_did_is_found(name: str, found: dict[str, str]) -> None:
    """Otherwise it would have been done for all workers at once, or for none."""
    assert found[name] == PACKAGES[name][1]


def test_a_thread_that_ends_before_each_fork_is_harmless() -> None:
    """As those of OpenBLAS."""
    script = """
        import os, sys, tempfile
        from reknit.adapters.keeper.zygote.harmless import Importer
        folder = tempfile.mkdtemp()
        sys.path.append(folder)
        with open(os.path.join(folder, "careful.py"), "w") as file:
            file.write('''if True:
                import os, threading
                stop = threading.Event()
                thread = threading.Thread(target=stop.wait)
                thread.start()
                os.register_at_fork(before=lambda: (stop.set(), thread.join()))
            ''')
        importer = Importer([])
        importer.import_("careful")
        print(importer.harms)
        os.remove(os.path.join(folder, "careful.py"))
    """
    assert run_alone(script) == "{}\n"


def test_the_generator_and_the_devices_of_torch_are_watched(tmp_path: Path) -> None:
    """All workers would draw the same numbers, or could not use their devices."""
    (tmp_path / "seeds_torch.py").write_text("import torch; torch.manual_seed(1)")
    (tmp_path / "draws.py").write_text("import torch; W = torch.rand(2)")
    (tmp_path / "takes_devices.py").write_text("import torch; torch.cuda.is_initialized = lambda: True")
    script = f"""
        import sys
        from reknit.adapters.keeper.zygote.harmless import Importer
        sys.path.append({str(tmp_path)!r})
        importer = Importer([])
        for name in ("random", "numpy.random", "torch", "seeds_torch", "draws", "takes_devices"):
            importer.import_(name)
        for name, what in importer.harms.items():
            print(name, what)
    """
    assert run_alone(script).splitlines() == [
        "seeds_torch seeds the random numbers of torch",
        "draws uses the random numbers of torch",
        "takes_devices initialises CUDA",
    ]


def test_a_module_is_found_and_loaded_as_ever(tmp_path: Path) -> None:
    """Nothing of what watches is left in it."""
    (tmp_path / "plain.py").write_text("")
    (tmp_path / "late.py").write_text("VALUE = 1")
    (tmp_path / "lazy.py").write_text("""if True:
        import importlib.util, sys
        spec = importlib.util.find_spec("late")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        late = importlib.util.module_from_spec(spec)
        sys.modules["late"] = late
        spec.loader.exec_module(late)
    """)
    script = f"""
        import builtins, copy, sys
        from reknit.adapters.keeper.zygote.harmless import Importer
        sys.path.append({str(tmp_path)!r})
        before = [*sys.meta_path], builtins.__import__
        importer = Importer([])
        for name in ("plain", "lazy", "_bisect", "_decimal"):
            importer.import_(name)
        for name in ("plain", "lazy", "_bisect", "_decimal"):
            module = sys.modules[name]
            print(name, type(module.__loader__).__name__, module.__loader__ is module.__spec__.loader)
        print(sys.modules["lazy"].late.VALUE, importer.harms, before == ([*sys.meta_path], builtins.__import__))
        print(type(sys.modules["late"].__loader__).__name__, type(copy.copy(sys.modules["late"].__spec__)).__name__)
    """
    assert run_alone(script).splitlines() == [
        "plain SourceFileLoader True",
        "lazy SourceFileLoader True",
        "_bisect ExtensionFileLoader True",
        "_decimal ExtensionFileLoader True",
        "1 {} True",
        "SourceFileLoader ModuleSpec",
    ]


def test_what_a_module_holds_is_found_without_loading_it(tmp_path: Path) -> None:
    """A lazy module loads itself when it is asked for any attribute, and may fail."""
    (tmp_path / "fails.py").write_text("raise ImportError('optional')")
    script = f"""
        import importlib.util, sys, types
        from reknit.adapters.keeper.zygote.harmless import held
        sys.path.append({str(tmp_path)!r})
        spec = importlib.util.find_spec("fails")
        spec.loader = importlib.util.LazyLoader(spec.loader)
        lazy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(lazy)
        holder = types.ModuleType("holder")
        holder.lazy, holder.function, holder.cls = lazy, held, importlib.util.LazyLoader
        print(sorted(held("holder", holder)))
    """
    names = ["fails", "importlib.util", "reknit.adapters.keeper.zygote.harmless"]
    assert run_alone(script) == f"{names}\n"
