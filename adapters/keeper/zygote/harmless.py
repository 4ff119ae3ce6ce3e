"""Importing modules for processes that will be forked later, and finding out whether that is harmless.

A module is imported once, in the zygote, and not in each worker. This is harmless if the import would have done the
same in each of them. It has not if it has

1. read a variable that tells workers apart, for example RANK, or kept a copy of the whole environment,
2. changed a variable or removed one,
3. left a thread that a fork does not carry over, an open file or memory that processes share, or run a process,
4. changed what a process handles, blocks or is limited by, its working folder, its mask of new files or `sys.argv`,
5. drawn from a generator of random numbers or seeded it, or
6. raised an error.

Many modules look through the whole environment for variables of their own, tqdm for example. They are shown the
variables of rule 1 as well, with a key that notes what it is compared with, and a value whose references are counted.

A thread is harmless if it is gone after a fork: OpenBLAS ends its threads before each fork, and starts them again when
it needs them. A variable that was not there is carried over to the workers. Not seen are C code that reads the
environment, and a module that keeps the time, the pid or a random number of its own (docs/warm.md).

The standard library alone is imported here.
"""

from __future__ import annotations

import gc
import importlib
import os
import resource
import signal
import sys
import warnings
from collections.abc import Collection, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, NoReturn

_OWN = ("os", "_collections_abc", "collections.abc", __name__)
"""Modules whose frames stand between a read of a variable and the module that wanted it."""


class _Recording(type(os.environ)):  # type: ignore[misc]  # mypy takes the class of a value for no class
    """`os.environ` while a module is imported. It is the same object as ever: only its class is another one."""

    def __getitem__(self, key: str) -> str:
        if isinstance(key, _TellingName) and (shown := _shown.get(key)) is not None:
            return shown
        _reads.setdefault(key, _reader())
        value: str = super().__getitem__(key)
        return value

    def __iter__(self) -> Iterator[str]:
        if _shown:
            _reads.setdefault(_ALL, _reader())
        told = {str(key) for key in _shown}
        yield from (key for key in super().__iter__() if key not in told)
        yield from _shown

    def __deepcopy__(self, memo: object) -> Any:
        return {**self}  # as any other copy, which counts its references


class _RecordingBytes(type(os.environ)):  # type: ignore[misc]  # see above
    """`os.environb` meanwhile."""

    def __getitem__(self, key: bytes) -> bytes:
        _reads.setdefault(os.fsdecode(key), _reader())
        value: bytes = super().__getitem__(key)
        return value


class _TellingName(str):
    """The name of a variable that tells workers apart, as it is shown to who looks through all. A comparison with which
    it is found counts as a read."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self._noted(str.__eq__(self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __contains__(self, part: object) -> bool:
        return self._noted(str.__contains__(self, part))  # type: ignore[operator]  # as `str` does it

    def startswith(self, *args: Any) -> bool:
        return self._noted(super().startswith(*args))

    def endswith(self, *args: Any) -> bool:
        return self._noted(super().endswith(*args))

    def lower(self) -> str:
        return _TellingName(super().lower())

    def upper(self) -> str:
        return _TellingName(super().upper())

    def _noted(self, is_so: bool) -> bool:
        if is_so is True and (reader := _reader()):
            _reads.setdefault(str(self).upper(), reader)
        return is_so


_ALL = "*"
_reads: dict[str, str] = {}
"""By variable: the first module that has read it. `_ALL`: the first one that has looked through the environment."""
_shown: dict[_TellingName, str] = {}
"""By name: the value of a variable of rule 1, for who looks through all."""


def _reader() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__") in _OWN:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?"))


class Importer:
    """Imports modules in this process."""

    def __init__(self, telling: Collection[str]) -> None:
        """`telling`: names of variables that tell workers apart."""
        self._telling = frozenset(telling)
        _shown.clear()
        _shown.update({_TellingName(name): f"only the worker knows {name}" for name in telling})
        self.added: dict[str, str] = {}
        """Variables that imports have made."""
        self.read: set[str] = set()
        """Variables that imports have read."""
        self.culprit = ""
        """The module that has read what it should not. Empty: the latest import did no such harm."""

    def import_(self, name: str) -> str:
        """Import a module. Returns what was not harmless about it. Empty: nothing was."""
        self.culprit = ""
        if name in sys.modules:
            return ""
        before, environ, references = _state(), dict(os.environ), _references()
        _reads.clear()
        variables, plain, own = os.environ, type(os.environ), os.getpid()
        in_bytes: Any = os.environb
        variables.__class__, in_bytes.__class__ = _Recording, _RecordingBytes
        programs = os.execv, os.execve
        refuse: Any = _refuse
        os.execv = os.execve = refuse
        try:
            importlib.import_module(name)
            error = ""
        except BaseException as raised:
            error = f"cannot be imported: {type(raised).__name__}: {' '.join(str(raised).split()):.200}"
        finally:
            variables.__class__ = in_bytes.__class__ = plain
            os.execv, os.execve = programs
        if os.getpid() != own:
            os._exit(0)  # the module has forked. The parent sees a child, and goes on
        if os.environ is not variables:
            error = "puts another object in the place of os.environ"
            os.environ = variables  # noqa: B003  # it is the one that was there
        self.read |= _reads.keys()
        return (
            self._read() or error or self._kept(references) or self._changed(environ) or _difference(before, _state())
        )

    def _read(self) -> str:
        told = sorted(self._telling & _reads.keys())
        if told:
            self.culprit = _reads[told[0]]
            return f"reads {told[0]} while it is imported (in {self.culprit})"
        return ""

    def _kept(self, before: list[tuple[int, int]]) -> str:
        if _ALL not in _reads:
            return ""
        gc.collect()
        if _references() == before:
            return ""
        self.culprit = _reads[_ALL]
        return f"keeps a copy of the environment (in {self.culprit})"

    def _changed(self, before: Mapping[str, str]) -> str:
        for name, value in os.environ.items():
            if name not in before and name not in self._telling:
                self.added[name] = value
            elif before.get(name) != value:
                return f"changes the variable {name} while it is imported"
        gone = sorted(before.keys() - os.environ.keys())
        return f"removes the variable {gone[0]} while it is imported" if gone else ""


def _refuse(*args: object) -> NoReturn:
    raise OSError("a module that is imported ahead of the workers runs another program in its place")


def attributes(module: object) -> dict[str, Any]:
    """The attributes of a module, without loading one that loads itself when it is asked for any."""
    found: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return found


def _references() -> list[tuple[int, int]]:
    return [(sys.getrefcount(name), sys.getrefcount(value)) for name, value in _shown.items()]


def importers(harms: Mapping[str, str]) -> dict[str, str]:
    """Which loaded modules have imported these harmful ones, so that importing them would do the same harm. `harms`: by
    module, what its import did. The result has this form as well.

    They are found by what they hold. One that holds nothing of a harmful module is found when it is imported next."""
    found = dict(harms)
    modules = {name: module for name, module in [*sys.modules.items()] if issubclass(type(module), ModuleType)}
    while new := {
        name: f"imports {told[0]}"
        for name, module in modules.items()
        if name not in found and (told := [other for other in held(name, module) if other in found])
    }:
        found |= new
    return {name: why for name, why in found.items() if name not in harms}


def held(name: str, module: ModuleType) -> set[str]:
    """The modules of which this one holds something."""
    found = set()
    for value in [*attributes(module).values()]:
        # Its type, because some objects make another one when they are asked for their class.
        if issubclass(type(value), ModuleType):
            found.add(value.__name__)
        elif issubclass(type(value), FunctionType | type):
            found.add(value.__module__)
    # A package holds each of its modules that anybody has imported.
    return {other for other in found if not str(other).startswith(name + ".")}


# ---- what an import must leave as it was ----


def _state() -> dict[str, Any]:
    """By what a change of it means: the value now. None: there is no such value yet."""
    torch, numpy, random = (sys.modules.get(name) for name in ("torch", "numpy.random", "random"))
    return {
        "starts a thread": len(os.listdir("/proc/self/task")),
        "starts a process": _children(),
        "runs a process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt,
        "shares memory with other processes": _shared_memory(),
        "changes the arguments of the script": [*sys.argv],
        "leaves a file open": _descriptors(),
        "handles a signal": [signal.getsignal(signum) for signum in sorted(signal.valid_signals())],
        "blocks a signal": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "changes the working folder": _folder(),
        "changes the mask of new files": _umask(),
        "changes a limit of the process": [resource.getrlimit(which) for which in _LIMITS],
        "uses the random numbers of `random`": random and getattr(random, "getstate", lambda: None)(),
        "uses the random numbers of numpy": numpy and _numpy_state(numpy),
        "seeds the random numbers of torch": torch and _told(torch, "initial_seed"),
        "initialises CUDA": torch and _told(getattr(torch, "cuda", None), "is_initialized"),
    }


_LIMITS = sorted({value for name, value in vars(resource).items() if name.startswith("RLIMIT_")})


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


def _children() -> str:
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
    try:
        state = numpy.get_state()
        return bytes(state[1]), state[2:]
    except Exception:  # it is being imported, or another module of this name
        return None


def _told(module: Any, function: str) -> object:
    try:
        return getattr(module, function)()
    except Exception:  # it is being imported, or another module of this name
        return None


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    for what, value in after.items():
        was = before[what]
        if what == "initialises CUDA":
            was = bool(was)
        if value is None or was is None or value == was:
            continue
        if what == "starts a thread":
            if value > was and threads_after_a_fork() > 1:
                return what
        elif what == "leaves a file open":
            if new := sorted(path for fd, path in value.items() if was.get(fd) != path):
                return f"opens {new[0]} and leaves it open"
        else:
            return what
    return ""


def threads_after_a_fork() -> int:
    """How many threads this process has after a fork. A library may end its own before each fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on Python warns of what is being found out here
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task"))
