"""What runs in a zygote: it imports modules, checks that this was harmless, and forks the workers.

A zygote is a Python with the command line of a worker. It stops at the moment at which Python imports `sitecustomize`,
just before it runs the program of its command line. Each fork goes on from there. So everything that a program can see
of its start is done by Python itself: `__main__`, `sys.argv`, `sys.path[0]`, tracebacks, the exit functions and status.

1. A zygote begins as a Python with the same options, whose program only fails (`checks`). When it comes to this module,
   it execs the command line of the workers (`holds`). So a Python that never comes here cannot run the workers' program
   in the place of a worker.
2. A zygote that has imported something harmful says so and ends. Its keeper starts another one, which leaves that out.
3. A worker is forked twice. The process between ends at once, so the keeper adopts the worker, as a subreaper.
4. A worker runs nothing before its keeper has said so, and has put it under its guard. If the keeper does not say so,
   it ends.
5. A zygote never computes with torch: forks of a process with threads of libgomp hang. It only reads the state of
   torch's generator of random numbers, which starts no thread.

This module, and each module of reknit that it imports, uses the standard library alone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from reknit.adapters.keeper.common.settling import descriptors, settle

from .harmless import SPREADING, Importer, children, threads_after_a_fork
from .zygote_line import HOOK, PLAN, SOCKET, VARIABLE, Line

USUAL = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
"""What most scripts with torch import. The first optimizer of a process imports the last one."""
_ADOPTED_S = 0.0005
"""The pause between two looks of a worker whether its keeper is its parent. Seconds."""
_NO_HOOK = 78
_PR_SET_CHILD_SUBREAPER = 36
_GENERATORS = ("numpy.random", "torch")
"""Modules with a generator of random numbers, besides `random`, which is always imported first."""
_TRACERS = {"coverage", "debugpy", "pydevd", "viztracer"}
_ALWAYS_READ = ("PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "MKL_", "OPENBLAS_", "KMP_")
"""What the names of variables begin with that C code reads when a process starts, or when a library is loaded."""
_NOT_READ = frozenset({"PYTHONFAULTHANDLER"})
"""A worker does itself what this variable asks for (`_as_started`)."""


def checking(options: Sequence[str], python: str) -> list[str]:
    """The command line with which a zygote begins. `options`: those of Python."""
    return [python, *options, "-c", f"raise SystemExit({_NO_HOOK})"]


def hold(stage: str, loaded: Collection[str]) -> None:
    """Be a zygote. Returns in each worker, and nowhere else.

    `stage`: the value of `VARIABLE`. `loaded`: the modules that every Python has loaded when it comes here."""
    plan = json.loads(os.pread(PLAN, os.fstat(PLAN).st_size, 0))
    if stage == "checks":
        os.execvpe(plan["argv"][0], plan["argv"], environment(os.environ, "holds"))
    os.close(PLAN)
    os.set_inheritable(SOCKET, False)  # a module may run another program in the place of this one
    zygote = _Zygote(Line(socket.socket(fileno=SOCKET)), plan, loaded)
    zygote.check_start()
    zygote.import_all()
    zygote.serve()


def environment(environ: Mapping[str, str], what: str) -> dict[str, str]:
    """The environment of a Python that is asked to do this by `hook/sitecustomize.py`."""
    paths = [HOOK, *([environ["PYTHONPATH"]] if environ.get("PYTHONPATH") else [])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), VARIABLE: what}


class _Zygote:
    def __init__(self, line: Line, plan: Mapping[str, Any], loaded: Collection[str]) -> None:
        self._line = line
        self._plan = plan
        self._loaded = frozenset(name.partition(".")[0] for name in loaded)
        self._environ: dict[str, str] = plan["environ"]
        self._importer = Importer(plan["telling"])
        self._files: dict[str, tuple[int, int]] = {}
        self._own = descriptors() - {0, 1, 2}
        self._keeper = os.getppid()
        self._name = _call_itself("reknit zygote")

    # ---- importing ----

    def check_start(self) -> None:
        """Tell the keeper, and end this process, if the start of this Python was not harmless. Import the module
        `sitecustomize` that Python would have found without ours."""
        # A file `.pth` may have made variables. What else it may have done is not seen (docs/warm.md).
        for name in (self._environ.keys() | os.environ.keys()) - {"PYTHONPATH"}:
            was, now = self._environ.get(name), os.environ.get(name)
            if was is None and now is not None:
                self._importer.added[name] = now
            elif was != now:
                self._give_up(f"Python changes the variable {name} when it starts, for example by a file .pth")
        del sys.modules["sitecustomize"]
        is_there = importlib.util.find_spec("sitecustomize") is not None
        if is_there and (harm := self._importer.import_("sitecustomize")):
            self._give_up(f"the module sitecustomize of this Python {harm}")
        # What looks at a whole Python must be started in each worker.
        if sys.gettrace() is not None or sys.getprofile() is not None or _TRACERS & sys.modules.keys():
            self._give_up("a debugger, a profiler or a measurement of coverage has begun with Python")

    def _give_up(self, why: str) -> NoReturn:
        self._line.send({"fails": why})
        os._exit(0)

    def import_all(self) -> None:
        """Import what the plan says, and tell the keeper how that went. Ends this process if it did harm."""
        if self._plan["paths"]:
            sys.path[:] = self._plan["paths"]
        _adopt(True)  # so a daemon that a module starts is seen among the children of this process
        harms, first, missing = self._import_each()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # otherwise each worker would write once more what is in the buffer
        if harms or first:
            # Whether a module seeds one of these generators can be seen only if that was imported before it.
            _end_children()
            self._line.send({"harms": harms, "first": first})
            os._exit(0)
        _adopt(False)  # the keeper adopts the workers
        tasks = len(os.listdir("/proc/self/task"))
        if tasks > 1 and threads_after_a_fork() > 1:
            self._give_up("Python itself starts a thread here, for example by a file .pth")
        self._files = _stamps(sys.modules.values())
        if why := self._hidden():
            self._give_up(why)
        gc.collect()
        gc.freeze()  # the collector of a worker does not write to what all workers share
        self._line.send({"ready": missing, "modules": len(sys.modules)})

    def _import_each(self) -> tuple[dict[str, str], list[str], dict[str, str]]:
        """By module that did harm or is missing: why. Between them: generators that must be imported before all
        others."""
        programs = {self._plan["program"], f"{self._plan['program']}.__main__"}
        harms: dict[str, str] = {}
        first: list[str] = []
        missing: dict[str, str] = {}
        for name in self._names():
            if is_within(name, (*harms, *missing)) or name in programs:
                continue
            if name not in sys.modules and importlib.util.find_spec(name.partition(".")[0]) is None:
                missing[name] = "was not found among the installed packages"
                continue
            not_yet = programs - sys.modules.keys()
            unloaded = [generator for generator in _GENERATORS if generator not in sys.modules]
            if harm := self._importer.import_(name):
                harms[name] = harm
                if harm in SPREADING:
                    break
            elif any("__path__" not in attributes(sys.modules[other]) for other in not_yet & sys.modules.keys()):
                harms[name] = "imports the program of the workers"
            first += [generator for generator in unloaded if generator in sys.modules and generator != name]
        return harms, first, missing

    def _names(self) -> list[str]:
        names = [*self._plan["first"], *self._plan["modules"]]
        roots = {name.partition(".")[0] for name in names}
        if {"torch", "numpy"} & roots and importlib.util.find_spec("numpy"):
            names = ["numpy.random", *names]  # both import it
        if names:
            names = ["random", "tempfile", *names]  # what is made by the second one is seen
        # A package comes before its modules, because it is imported with each of them.
        return [
            name
            for name in dict.fromkeys(part for name in names for part in _packages_and(name))
            if not is_within(name, self._plan["left_out"])
        ]

    # ---- forking ----

    def serve(self) -> None:
        """Returns in each worker."""
        while True:
            message, files = self._line.receive()
            if message is None:
                os._exit(0)
            if "fork" not in message:
                self._line.send({"stale": self._stale()})
                continue
            request = message["fork"]
            link, others = Line(socket.socket(fileno=files[0])), files[1:]
            if why := self._differs(request):
                link.send({"fails": why})
            elif len(others) != request["files"]:
                link.send({"fails": "its open files did not all arrive"})  # this process may have no more of them
            elif self._fork(request, link, others):
                return
            for fd in others:
                os.close(fd)
            link.socket.close()

    def _stale(self) -> str:
        """Why what was imported is not what a worker would import now. Empty: it is the same."""
        for path, stamp in self._files.items():
            if _stamp(path) != stamp:
                return f"{path} has changed"
        return self._hidden()

    def _hidden(self) -> str:
        """Which module a worker would have found elsewhere. Empty: none."""
        names = {name.partition(".")[0] for name in sys.modules} - self._loaded - set(sys.builtin_module_names)
        for folder in self._plan["folders"]:
            for name in sorted(_perhaps_in(folder, names)):
                spec = importlib.machinery.PathFinder.find_spec(name, [folder])
                if spec is None or (spec.loader is None and not _is_spread(name)):
                    continue  # Python looks further for a module that is no folder of data
                if spec.loader is None or _path_of(sys.modules.get(name)) != spec.origin:
                    where = spec.origin or os.path.join(folder, name)
                    return (
                        f"{where} has the name of the module {name}, which was imported ahead of the workers; rename it"
                    )
        return ""

    def _differs(self, request: Mapping[str, Any]) -> str:
        """Why this worker would have imported something else. Empty: it would not."""
        env = request["env"]
        for name in sorted({*self._environ, *env}):
            if self._environ.get(name) == env.get(name) or name in _NOT_READ:
                continue
            if name in self._importer.read or name.startswith(_ALWAYS_READ):
                return f"the variable {name} has another value than when the modules were imported"
        if request["argv"] != self._plan["argv"]:
            return "its command line begins in another way"
        return ""

    def _fork(self, request: Mapping[str, Any], link: Line, files: Sequence[int]) -> bool:
        """Fork a worker. True in the worker."""
        # Python forgets at a fork which signals have come, so a worker would lose one that comes right after it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            between = os.fork()
            if between == 0:
                _fork_again(link, self._keeper)
                self._become(request, link, files, mask)
                return True
            os.waitpid(between, 0)  # from now on the worker is a child of the keeper
        except OSError as error:
            link.send({"fails": error.strerror or str(error)})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return False

    def _become(self, request: Mapping[str, Any], link: Line, files: Sequence[int], mask: Collection[int]) -> None:
        """In the worker: be as a process that was started by exec with this request."""
        try:
            numbers = request["numbers"]
            ends = dict(zip(numbers, files, strict=False))  # the guard's ticket has no number
            ticket = files[len(numbers)] if len(files) > len(numbers) else -1
            kept = fcntl.fcntl(link.socket, fcntl.F_DUPFD_CLOEXEC, max(numbers, default=2) + 1)
            settle(request["env"], ends, ticket, {*self._own, link.socket.detach(), *files})
            link = Line(socket.socket(fileno=kept))
            try:
                for name, value in self._importer.added.items():
                    os.environ.setdefault(name, value)
                _call_itself(self._name)
                _as_started()
            except Exception as error:
                link.send({"fails": f"{type(error).__name__}: {error}"})
                os._exit(1)
            link.send({"pid": os.getpid()})
            if link.receive()[0] is None:
                os._exit(1)  # the keeper does not want this worker any more
            link.socket.close()
            self._line.socket.detach()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except OSError:
            os._exit(1)  # the keeper is gone


def _end_children() -> None:
    """Kill what modules have started at their import, which is all below this process. It adopts what they leave."""
    while pids := children().split():
        for pid in map(int, pids):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # a thread of a module awaits it as well
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _adopt(is_wanted: bool) -> None:
    """Whether this process adopts its orphaned descendants."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0)


def _fork_again(link: Line, keeper: int) -> None:
    """Returns in the process that becomes the worker, once the keeper is its parent."""
    here = os.getpid()
    try:
        if os.fork():
            os._exit(0)
    except OSError as error:
        link.send({"fails": error.strerror or str(error)})
        os._exit(0)
    while os.getppid() == here:
        time.sleep(_ADOPTED_S)
    if os.getppid() != keeper:
        link.send({"fails": "another process than the keeper adopts orphans"})
        os._exit(1)


def _as_started() -> None:
    """What a Python does when it starts, as far as it depends on the one worker."""
    # At its end Python collects what is left of the modules. What is frozen would not be finalised.
    atexit.register(gc.unfreeze)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # stderr always writes whole lines
    tempfile: Any = sys.modules.get("tempfile")
    if tempfile is not None:
        tempfile.tempdir = None  # the script may name another folder by a variable
    importlib.invalidate_caches()  # folders that did not exist may exist now
    if os.environ.get("PYTHONFAULTHANDLER"):
        import faulthandler

        faulthandler.enable()
    # Each Python begins with other random numbers. `random` sees to that by itself.
    if (numpy := sys.modules.get("numpy.random")) is not None:
        numpy.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()  # not `torch.seed()`, because that seeds the devices as well
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)


def _call_itself(name: str) -> str:
    """Change the name of this process, which `top` shows. Returns what it was."""
    try:
        with open("/proc/self/comm", "r+") as file:
            before = file.read().strip()
            file.write(name)
    except OSError:
        return name
    return before


# ---- what is imported ----


def _packages_and(name: str) -> list[str]:
    """The packages that hold this module, from the outermost one, and the module itself."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def with_usual(names: Sequence[str]) -> tuple[str, ...]:
    """These modules, and the usual ones if torch is among them."""
    return (*USUAL, *names) if any(is_within(name, ["torch"]) for name in names) else tuple(names)


def is_within(name: str, packages: Iterable[str]) -> bool:
    """Whether this is one of these modules, or a module of one of them."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def attributes(module: object) -> dict[str, Any]:
    """The attributes of a module, without loading one that loads itself when it is asked for any."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _path_of(module: object) -> str | None:
    """The file of a loaded module. None: it has none, or is something else than a module."""
    try:
        path = attributes(module).get("__file__")
    except AttributeError:
        return None
    return path if isinstance(path, str) else None


def _is_spread(name: str) -> bool:
    """Whether this loaded module is a package without a file, which Python puts together from several folders."""
    module = sys.modules[name]
    return _path_of(module) is None and "__path__" in attributes(module)


def _stamps(modules: Iterable[Any]) -> dict[str, tuple[int, int]]:
    found = {}
    for path in map(_path_of, [*modules]):
        if path is not None and (stamp := _stamp(path)) != (0, 0):
            found[path] = stamp
    return found


def _stamp(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _perhaps_in(folder: str, names: set[str]) -> set[str]:
    """Which modules this folder may hold. All of them, if it is a zip file."""
    try:
        return names & {entry.partition(".")[0] for entry in os.listdir(folder)}
    except NotADirectoryError:
        return names
    except OSError:
        return set()
