"""Importing modules for processes that will be forked later, and finding out whether that is harmless.

A module is imported once, in the zygote, and not in each worker. This is harmless if the import would have done the
same in each of them. It has not if the module, or one that it imports, has

1. read a variable that tells workers apart, for example RANK, or looked through all variables,
2. changed a variable or removed one,
3. left a thread that a fork does not carry over, an open or temporary file, or memory that processes share, or run a
   process,
4. changed what a process handles, blocks, waits for or is limited by, its working folder, its mask of new files, its
   streams, `sys.argv`, or where modules are looked for first,
5. drawn from a generator of random numbers or seeded it, or
6. raised an error.

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
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

LOOKERS = frozenset({"tqdm.utils", "fsspec.config", "dask.config", "networkx.utils.backends"})
"""Modules with a function that looks through all variables, and keeps only those whose names begin with a word of its
own, for example `TQDM_`."""
_BETWEEN = ("os", "collections.abc", "collections", __name__)
"""Modules whose frames stand between a look through all variables and the function that wanted it."""
_PLAIN = type(os.environ)
_MAKERS = ("mkdtemp", "mkstemp", "NamedTemporaryFile")
"""Functions of the module `tempfile`."""


class _Recording(_PLAIN):  # type: ignore[misc,valid-type]  # mypy takes the class of a value for no class
    """`os.environ` and `os.environb` while a module is imported. They are the same objects as ever: only their class is
    another one."""

    importer: Importer | None = None
    """Who is told. None: nobody, because a module has kept a method of this class."""

    def __getitem__(self, key: Any) -> Any:
        if _Recording.importer is not None:
            _Recording.importer.is_read(key)
        return _PLAIN.__getitem__(self, key)

    def __iter__(self) -> Iterator[Any]:
        if _Recording.importer is not None:
            _Recording.importer.are_looked_through()
        return iter([*_PLAIN.__iter__(self)])

    def __repr__(self) -> str:
        return repr({**self})

    def __deepcopy__(self, memo: object) -> Any:
        return {**self}


class Importer:
    """Imports modules in this process."""

    def __init__(self, telling: Collection[str]) -> None:
        """`telling`: names of variables that tell workers apart."""
        self._telling = frozenset(telling)
        self._harm = ""
        """What the module that is being imported has done to the environment. Empty: nothing bad."""
        self.added: dict[str, str] = {}
        """Variables that imports have made."""
        self.read: set[str] = set()
        """Variables that imports have read."""

    def import_(self, name: str) -> str:
        """Import a module. Returns what was not harmless about it. Empty: nothing was."""
        if name in sys.modules:
            return ""
        own, before, environ = os.getpid(), _state(), dict(os.environ)
        self._harm = error = ""
        try:
            with self._watching():
                importlib.import_module(name)
        except KeyboardInterrupt:
            raise  # somebody wants this process to end
        except BaseException as raised:
            text = " ".join(str(raised).split())
            error = f"cannot be imported: {type(raised).__name__}: {text:.200}"
        if os.getpid() != own:
            os._exit(0)  # the module has forked. The parent sees a child, and goes on
        return self._harm or error or self._changed(environ) or _difference(before, _state())

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        variables, in_bytes = os.environ, os.environb
        recorded: Sequence[Any] = variables, in_bytes
        programs: Any = os.execv, os.execve
        tempfile: Any = sys.modules.get("tempfile")
        makers = {name: getattr(tempfile, name) for name in _MAKERS if tempfile is not None}
        _Recording.importer = self
        for each in recorded:
            each.__class__ = _Recording
        os.execv, os.execve = map(_refusing, programs)
        for name, maker in makers.items():
            setattr(tempfile, name, _remembering(maker))
        try:
            yield
        finally:
            for name, maker in makers.items():
                setattr(tempfile, name, maker)
            os.execv, os.execve = programs
            if os.environ is not variables:
                self._harm = "puts another object in the place of os.environ"
            os.environ, os.environb = variables, in_bytes  # those that were there
            for each in recorded:
                each.__class__ = _PLAIN
            _Recording.importer = None

    def is_read(self, key: Any) -> None:
        """A module reads this variable."""
        if isinstance(key, str | bytes) and (reader := _reader()) not in LOOKERS:
            name = os.fsdecode(key)
            self.read.add(name)
            if name in self._telling:
                self._harm = self._harm or f"reads {name} while it is imported (in {reader})"

    def are_looked_through(self) -> None:
        """A module reads the names of all variables."""
        if (reader := _reader()) not in LOOKERS:
            self._harm = self._harm or f"looks through all variables while it is imported (in {reader})"

    def _changed(self, before: Mapping[str, str]) -> str:
        for name, value in os.environ.items():
            if name not in before and name not in self._telling:
                self.added[name] = value
            elif before.get(name) != value:
                return f"changes the variable {name} while it is imported"
        gone = sorted(before.keys() - os.environ.keys())
        return f"removes the variable {gone[0]} while it is imported" if gone else ""


def _reader() -> str:
    """The module whose code wants to know something of the environment."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?"))


def _refusing(run: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs another program in the place of this one, and not while a module is imported."""

    @wraps(run)
    def refuse(*args: Any) -> Any:
        if _Recording.importer is not None:
            raise OSError("a module that is imported ahead of the workers runs another program in its place")
        return run(*args)

    return refuse


# ---- what an import must leave as it was ----

_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals())
_THREADS, _PROCESSES, _FILES, _PATHS, _CUDA = (
    "starts a thread",
    "starts a process",
    "leaves a file open",
    "changes where modules are looked for first",
    "initialises CUDA",
)
SPREADING = (_THREADS, _PROCESSES)
"""What goes on while the next module is imported, so that this one could not be judged."""
_made: list[str] = []
"""Temporary files and folders that were made while a module was imported."""


def _state() -> dict[str, Any]:
    """By what a change of it means: the value now. None: there is no such value yet."""
    torch, numpy, random = (sys.modules.get(name) for name in ("torch", "numpy.random", "random"))
    return {
        _THREADS: len(os.listdir("/proc/self/task")),
        _PROCESSES: children(),
        "runs a process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt,
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
        "shares memory with other processes": _shared_memory(),
        "uses the random numbers of `random`": random and getattr(random, "getstate", lambda: None)(),
        "uses the random numbers of numpy": numpy and _numpy_state(numpy),
        "uses the random numbers of torch": torch and _torch_state(torch),
        _CUDA: torch and _answer(getattr(getattr(torch, "cuda", None), "is_initialized", None)),
    }


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    for what, value in after.items():
        was: Any = bool(before[what]) if what == _CUDA else before[what]
        if value is None or was is None or value == was:
            continue
        if what == _THREADS:
            if value > was and threads_after_a_fork() > 1:
                return what
        elif what == _FILES:
            if new := sorted(path for fd, path in value.items() if was.get(fd) != path and path != os.devnull):
                return f"opens {new[0]} and leaves it open"
        elif what != _PATHS or value[: len(was)] != was:
            return what
    return ""


def _remembering(maker: Callable[..., Any]) -> Callable[..., Any]:
    """One of the functions that make temporary files, which also remembers what it has made."""

    @wraps(maker)
    def make(*args: Any, **kwargs: Any) -> Any:
        made = maker(*args, **kwargs)
        path = made[1] if isinstance(made, tuple) else getattr(made, "name", made)
        if _Recording.importer is not None and isinstance(path, str | bytes):  # and no descriptor
            _made.append(os.fsdecode(path))
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
    return (bytes(state[1]), state[2:]) if isinstance(state, tuple) else state


def _torch_state(torch: Any) -> object:
    state = _answer(getattr(getattr(torch, "default_generator", None), "get_state", None))
    return state if state is None else state.tolist()


def _answer(function: Any) -> Any:
    """What this function returns. None: it cannot say that yet, because its module is being imported."""
    try:
        return function()
    except Exception:  # also another module of this name
        return None


def threads_after_a_fork() -> int:
    """How many threads this process has after a fork. A library may end its own before each fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on Python warns of what is being found out here
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))
