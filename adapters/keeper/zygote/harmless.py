"""Importing modules for processes that will be forked later, and finding out whether that is harmless.

A module is imported once, in the zygote, and not in each worker. This is harmless if the import would have done the
same in each of them. It has not if the module, while it was imported, has

1. read a variable that tells workers apart, for example RANK, or looked through all variables,
2. changed a variable or removed one,
3. left a thread that a fork does not carry over, an open or temporary file, or memory that processes share, or run a
   process,
4. changed what a process handles, blocks, waits for or is limited by, its working folder, its mask of new files, its
   streams, `sys.argv`, or where modules are looked for first,
5. drawn from a generator of random numbers or seeded it, or
6. raised an error.

If that is looked at closely, it is found out which module has done it: the one whose code ran at that moment, and not
a function of another module that this code has called. A module that has imported a harmful one is harmful as well.
This takes half as long again as the imports.

A thread is harmless if it is gone after a fork: OpenBLAS ends its threads before each fork, and starts them again when
it needs them. A variable that was not there is carried over to the workers. Not seen are C code that reads the
environment, and a module that keeps the time, the pid or a random number of its own (docs/warm.md).

The standard library alone is imported here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from importlib.machinery import ExtensionFileLoader
from types import FunctionType, ModuleType
from typing import Any, NoReturn

LOOKERS = frozenset({"tqdm.utils", "fsspec.config", "dask.config"})
"""Modules with a function that looks through all variables, and keeps only those whose names begin with a word of its
own, for example `TQDM_`."""
_BETWEEN = ("os", "collections.abc", "collections", __name__)
"""Modules whose frames stand between a look through all variables and the function that wanted it."""
_ENVIRON, _PLAIN = os.environ, type(os.environ)


class _Recording(_PLAIN):  # type: ignore[misc,valid-type]  # mypy takes the class of a value for no class
    """`os.environ` and `os.environb` while a module is imported. They are the same objects as ever: only their class is
    another one."""

    importer: Importer | None = None
    """Who is told. None: nobody, because a module has kept a method of this class."""

    def __getitem__(self, key: Any) -> Any:
        if _Recording.importer is not None:
            _Recording.importer.is_read(key)
        return _PLAIN.__getitem__(self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        if _Recording.importer is not None:
            _Recording.importer.is_changed(key)
        _PLAIN.__setitem__(self, key, value)

    def __delitem__(self, key: Any) -> None:
        if _Recording.importer is not None:
            _Recording.importer.is_changed(key)
        _PLAIN.__delitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        if _Recording.importer is not None:
            _Recording.importer.are_looked_through()
        return iter([*_PLAIN.__iter__(self)])

    def __repr__(self) -> str:
        return repr({**self})

    def __deepcopy__(self, memo: object) -> Any:
        return {**self}


class _Run:
    """The code of a module, while it runs."""

    def __init__(self, module: str, changes: int) -> None:
        self.module = module
        self.before = _state()
        self.changes = changes
        """So many changes of variables were made before."""
        self.explained: set[str] = set()
        """What modules have done that this one has imported."""


class Importer:
    """Imports modules in this process."""

    def __init__(self, telling: Collection[str], *, closely: bool = True) -> None:
        """`telling`: names of variables that tell workers apart. `closely`: find out which modules do harm. False:
        whether any does. Then `harms` may name another module, which has imported it."""
        self._telling = frozenset(telling)
        self._closely = closely
        self.added: dict[str, str] = {}
        """Variables that imports have made."""
        self.read: set[str] = set()
        """Variables that imports have read."""
        self.harms: dict[str, str] = {}
        """By module: what its import did that was not harmless."""
        self._importers: dict[str, set[str]] = {}
        """By module: those that have imported it."""
        self._runs: list[_Run] = []
        """What runs now. The last one runs within those before it."""
        self._changes: list[tuple[str, str | None]] = []
        """Each change of a variable: its name, and the value that it had. None: it did not exist."""
        self._thread = threading.get_ident()

    def import_(self, name: str) -> None:
        """Import a module. What it does that is not harmless is found in `harms`."""
        if name not in sys.modules:
            self.watch(name, lambda: importlib.import_module(name))

    def watch(self, name: str, act: Callable[[], object]) -> None:
        """Do something that runs the code of modules. `name`: who has done what none of these modules has done."""
        own, before = os.getpid(), _slow_state()
        try:
            with self._watching(), self.running(name):
                act()
        except BaseException as raised:
            text = " ".join(str(raised).split())
            self._blame(name, f"cannot be imported: {type(raised).__name__}: {text:.200}")
        if os.getpid() != own:
            os._exit(0)  # the module has forked. The parent sees a child, and goes on
        for what in _differences(before, _slow_state()):
            self._blame(name, what)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        variables, in_bytes = os.environ, os.environb
        recorded: Sequence[Any] = variables, in_bytes
        programs, importing = (os.execv, os.execve), __import__
        tempfile: Any = sys.modules.get("tempfile")
        makers: Any = tempfile and (tempfile.mkdtemp, tempfile.mkstemp)
        refuse: Any = _refuse
        finder = _Finder(self)
        noting = self._noting(importing)
        _Recording.importer = self
        for each in recorded:
            each.__class__ = _Recording
        os.execv = os.execve = refuse
        builtins: Any = sys.modules["builtins"]
        if self._closely:
            builtins.__import__ = noting
            sys.meta_path.insert(0, finder)
        if tempfile is not None:
            tempfile.mkdtemp, tempfile.mkstemp = (_remembering(maker) for maker in makers)
        try:
            yield
        finally:
            if tempfile is not None:
                tempfile.mkdtemp, tempfile.mkstemp = makers
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(finder)
            builtins.__import__ = importing
            os.execv, os.execve = programs
            os.environ, os.environb = variables, in_bytes  # those that were there
            for each in recorded:
                each.__class__ = _PLAIN
            _Recording.importer = None

    def _noting(self, importing: Callable[..., Any]) -> Callable[..., Any]:
        """The function behind the statement `import`, which also notes who imports what."""

        @wraps(importing)
        def import_(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            module = importing(name, globals, locals, fromlist, level)
            importer = str((globals or {}).get("__name__", ""))
            imported = getattr(module, "__name__", name) if level or fromlist else name
            self._note_import(importer, imported)
            for part in fromlist or ():
                if f"{imported}.{part}" in sys.modules:
                    self._note_import(importer, f"{imported}.{part}")
            return module

        return import_

    def _note_import(self, importer: str, imported: str) -> None:
        while imported:
            if imported != importer:
                self._importers.setdefault(imported, set()).add(importer)
            imported = imported.rpartition(".")[0]  # a package is imported with each of its modules

    @contextlib.contextmanager
    def running(self, module: str) -> Iterator[None]:
        """The code of this module runs."""
        if _Recording.importer is not self or threading.get_ident() != self._thread:
            yield
            return
        if self._runs:
            self._note_import(self._runs[-1].module, module)
        run = _Run(module, len(self._changes))
        self._runs.append(run)
        try:
            yield
        finally:
            self._runs.pop()
            done = {*_differences(run.before, _state()), *self._changed(run)}
            for what in done - run.explained:
                self._blame(module, what)
            if self._runs:
                self._runs[-1].explained |= done | run.explained

    def _changed(self, run: _Run) -> Iterator[str]:
        """What this code has done to variables."""
        before: dict[str, str | None] = {}
        for name, value in self._changes[run.changes :]:
            before.setdefault(name, value)
        for name, was in before.items():
            now = _value(name)
            if was is None and name not in self._telling:
                self.added.pop(name, None)
                if now is not None:
                    self.added[name] = now
            elif now is None and was is not None:
                yield f"removes the variable {name} while it is imported"
            elif now != was:
                yield f"changes the variable {name} while it is imported"

    # ---- what the code of modules does to the environment ----

    def is_read(self, key: Any) -> None:
        """This variable is read."""
        if isinstance(key, str | bytes):
            name = os.fsdecode(key)
            self.read.add(name)
            if name in self._telling:
                self._blame_running(f"reads {name} while it is imported")

    def is_changed(self, key: Any) -> None:
        """This variable is about to be set or removed."""
        if isinstance(key, str | bytes):
            self._changes.append((os.fsdecode(key), _value(os.fsdecode(key))))

    def are_looked_through(self) -> None:
        """The names of all variables are read."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
            frame = frame.f_back
        if frame.f_globals.get("__name__") not in LOOKERS:
            self._blame_running("looks through all variables while it is imported")

    def _blame_running(self, what: str) -> None:
        if self._runs:
            self._blame(self._runs[-1].module, what)

    def _blame(self, module: str, what: str) -> None:
        self.harms.setdefault(module, what)

    def importers(self) -> dict[str, str]:
        """Which modules have imported harmful ones, directly or not, so that importing them does the same harm. By
        module: which one it has imported."""
        found: dict[str, str] = {}
        rest = [*self.harms]
        while rest:
            harmful = rest.pop()
            for importer in self._importers.get(harmful, ()):
                if importer not in found and importer not in self.harms:
                    found[importer] = f"imports {harmful}"
                    rest.append(importer)
        return found


class _Finder:
    """Finds modules as Python does, and tells the importer when their code runs."""

    def __init__(self, importer: Importer) -> None:
        self._importer = importer

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        for finder in [*sys.meta_path]:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None or (spec := find(name, path, target)) is None:
                continue
            if spec.loader is not None and not isinstance(spec.loader, type) and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, self._importer)
            return spec
        return None

    def invalidate_caches(self) -> None:
        """The other finders do that."""


class _Loader:
    """A loader of Python that also tells when the code of its module runs."""

    def __init__(self, loader: Any, importer: Importer) -> None:
        self._loader = loader
        self._importer = importer

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def create_module(self, spec: Any) -> Any:
        if not isinstance(self._loader, ExtensionFileLoader):
            return self._loader.create_module(spec)
        with self._importer.running(spec.name):
            return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        with self._importer.running(module.__name__):
            self._loader.exec_module(module)


def _refuse(*args: object) -> NoReturn:
    raise OSError("a module that is imported ahead of the workers runs another program in its place")


def _value(name: str) -> str | None:
    try:
        value: str = _PLAIN.__getitem__(_ENVIRON, name)
    except KeyError:
        return None
    return value


def attributes(module: object) -> dict[str, Any]:
    """The attributes of a module, without loading one that loads itself when it is asked for any."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def held(name: str, module: ModuleType) -> set[str]:
    """The modules of which this one holds something: themselves, functions or classes."""
    found = set()
    for value in [*attributes(module).values()]:
        # Its type, because some objects make another one when they are asked for their class.
        if issubclass(type(value), ModuleType):
            found.add(attributes(value).get("__name__"))
        elif issubclass(type(value), FunctionType):
            found.add(value.__module__)
        elif issubclass(type(value), type):
            found.add(type.__getattribute__(value, "__dict__").get("__module__"))
    # A package holds each of its modules that anybody has imported.
    return {other for other in found if isinstance(other, str) and not other.startswith(name + ".")}


# ---- what an import must leave as it was ----

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_THREADS, _FILES, _PATHS, _CUDA = (
    "starts a thread",
    "leaves a file open",
    "changes where modules are looked for first",
    "initialises CUDA",
)
_faults_of_ours = 0
"""Page faults of processes that this module itself has forked."""
_made: list[str] = []
"""Temporary files and folders that were made while a module was imported."""


def _state() -> dict[str, Any]:
    """By what a change of it means: the value now. None: there is no such value yet."""
    torch, numpy, random = (sys.modules.get(name) for name in ("torch", "numpy.random", "random"))
    return {
        _THREADS: len(os.listdir("/proc/self/task")),
        "starts a process": children(),
        "runs a process": _faults_of_children() - _faults_of_ours,
        "changes the arguments of the script": [*sys.argv],
        _PATHS: [*sys.path],
        "replaces sys.stdin, sys.stdout or sys.stderr": [_stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
        _FILES: _descriptors(),
        "leaves a temporary file": [path for path in _made if os.path.lexists(path)],
        "handles a signal": [signal.getsignal(signum) for signum in _SIGNALS],
        "blocks a signal": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "sets a timer": [any(signal.getitimer(which)) for which in _TIMERS],
        "changes the working folder": _folder(),
        "changes the mask of new files": _umask(),
        "changes a limit of the process": [resource.getrlimit(which) for which in _LIMITS],
        "puts another object in the place of os.environ": (id(os.environ), id(os.environb)),
        "puts another function in the place of __import__": id(__import__),
        "uses the random numbers of `random`": random and getattr(random, "getstate", lambda: None)(),
        "uses the random numbers of numpy": numpy and _numpy_state(numpy),
        "seeds the random numbers of torch": torch and _answer(getattr(torch, "initial_seed", None)),
        _CUDA: torch and _answer(getattr(getattr(torch, "cuda", None), "is_initialized", None)),
    }


def _slow_state() -> dict[str, Any]:
    """The same, for what takes long to see. So it is not looked at for each module, but for what was asked for."""
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    state = generator and _answer(getattr(generator, "get_state", None))
    return {
        "shares memory with other processes": _shared_memory(),
        "uses the random numbers of torch": None if state is None else state.tolist(),
    }


_SIGNALS = sorted(signal.valid_signals())


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    for what, value in after.items():
        was: Any = bool(before[what]) if what == _CUDA else before[what]
        if value is None or was is None or value == was:
            continue
        if what == _THREADS:
            if value > was and threads_after_a_fork() > 1:
                yield what
        elif what == _FILES:
            for path in sorted(path for fd, path in value.items() if was.get(fd) != path)[:1]:
                yield f"opens {path} and leaves it open"
        elif what != _PATHS or value[: len(was)] != was:
            yield what


def _remembering(maker: Callable[..., Any]) -> Callable[..., Any]:
    """One of the functions that make temporary files, which also remembers what it has made."""

    @wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = maker(*args, **kwargs)
        _made.append(os.fsdecode(made[1] if isinstance(made, tuple) else made))
        return made

    return make


def _stream(stream: Any) -> tuple[Any, ...]:
    return stream, *(getattr(stream, name, None) for name in ("line_buffering", "write_through", "encoding", "errors"))


def _umask() -> int:
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""  # it was removed


def _shared_memory() -> list[str]:
    """What forks of this process would write to together, for example a lock of `multiprocessing`."""
    with open("/proc/self/maps") as file:
        return [line for line in file if line.split(None, 2)[1] in ("rw-s", "rwxs")]


def _faults_of_children() -> int:
    """Page faults of processes that have ended and were awaited. Each process has some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def children() -> str:
    """The pids of the children of this thread, with spaces between them."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read()


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # this is the descriptor through which the list was read
    return found


def _numpy_state(numpy: Any) -> object:
    state = _answer(getattr(numpy, "get_state", None))
    return state and (bytes(state[1]), state[2:])


def _answer(function: Any) -> Any:
    """What this function returns. None: it cannot say that yet, because its module is being imported."""
    try:
        return function()
    except Exception:  # also another module of this name
        return None


def threads_after_a_fork() -> int:
    """How many threads this process has after a fork. A library may end its own before each fork."""
    global _faults_of_ours
    before = _faults_of_children()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on Python warns of what is being found out here
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    _faults_of_ours += _faults_of_children() - before
    return len(os.listdir("/proc/self/task"))
