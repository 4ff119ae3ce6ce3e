"""What an import must not do if its module is to be shared by workers. There is a small package for each."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.alone import run_alone

LOOKS, READS = "looks through all variables while it is imported", "reads RANK while it is imported"
PACKAGES = {
    "nothing": ("VALUE = 1", ""),
    "exits_well": ("import atexit; atexit.register(print, 'bye')", ""),
    "reads_something": ("import os; USER = os.environ.get('USER', '')", ""),
    "makes_a_variable": ("import os; os.environ['CACHE_OF_MINE'] = '/tmp/x'", ""),
    "reads_its_rank": (
        "import os; RANK = int(os.environ.get('RANK', 0))",
        READS,
    ),
    "asks_for_its_rank": (
        "import os; IS_FIRST = 'RANK' not in os.environ",
        READS,
    ),
    "reads_by_another": ("import helper", "reads LOCAL_RANK while it is imported"),
    "reads_by_a_function": ("import functions; RANK = functions.rank()", READS),
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
    "expands": ("import os; PATH = os.path.expandvars('/x/$RANK')", READS),
    "sets_for_a_moment": ("import os; os.environ['RANK'] = '0'; import nothing; del os.environ['RANK']", ""),
    "sets_by_another": ("import sets_its_rank_too", "changes the variable LOCAL_RANK while it is imported"),
    "opens_nothing": ("FILE = open('/dev/null')", ""),
    "keeps_execv": ("from os import execv", ""),
    "makes_a_named_file": (
        "import tempfile\nwith tempfile.NamedTemporaryFile(delete=False) as file: pass",
        "leaves a temporary file",
    ),
    "makes_a_file_for_a_moment": ("import tempfile\nwith tempfile.NamedTemporaryFile() as file: pass", ""),
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
        READS,
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
        os.environ["GROUP_RANK"] = "7"  # as in a container whose agent is a worker of another one
        import random, numpy.random, tempfile
        importer = Importer(["RANK", "LOCAL_RANK", "GROUP_RANK"])
        found = {{name: importer.import_(name) for name in {[*PACKAGES]!r}}}
        assert sys.modules["keeps_a_reader"].READ("DEVICE") == os.environ["DEVICE"]
        assert importer.added == {{"CACHE_OF_MINE": "/tmp/x"}}, importer.added
        assert {{"RANK", "USER", "LOCAL_RANK"}} <= importer.read
        try:
            sys.modules["keeps_execv"].execv("/no/such/program", ["x"])
        except FileNotFoundError:
            pass
        assert type(os.environ).__name__ == "_Environ"
        sys.modules["starts_a_process"].P.kill()
        os.write(1, json.dumps(found).encode())
        os._exit(0)
    """
    result: dict[str, str] = json.loads(run_alone(script))
    return {name: re.sub(r" \(in [\w.]+\)$", "", what.replace(str(device), "DEVICE")) for name, what in result.items()}


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
        print([Importer([]).import_("careful")])
        os.remove(os.path.join(folder, "careful.py"))
    """
    assert run_alone(script) == "['']\n"


@pytest.mark.slow
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
            print(name, importer.import_(name))
    """
    assert run_alone(script).splitlines() == [
        "random ",
        "numpy.random ",
        "torch ",
        "seeds_torch uses the random numbers of torch",
        "draws uses the random numbers of torch",
        "takes_devices initialises CUDA",
    ]
