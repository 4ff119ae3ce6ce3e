"""Functions as workers, on the side of the agent.

1. A function and its arguments are pickled in this process, as `multiprocessing` does it when it spawns a process. So
   queues, events, locks and shared tensors can be arguments. The same function with the same arguments is pickled
   once.
2. The keeper gets open files and a command line. It never unpickles.
3. Each worker has one file without a name. This process writes into it what `multiprocessing` must know, and the worker
   replaces that by the value that its function has returned.
4. A mistake of the caller raises `FunctionError`, before any process is started.
"""

from __future__ import annotations

import errno
import inspect
import io
import mmap
import os
import pickle
import sys
import sysconfig
from collections import ChainMap
from collections.abc import Callable, Collection, Mapping
from functools import cache
from importlib.machinery import ModuleSpec
from multiprocessing import context, forkserver, process, resource_tracker, spawn
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any, ClassVar

from attrs import evolve, frozen

from reknit.adapters.keeper.functions.function_main import (
    RETURNED,
    FunctionWorker,
    InheritedFunction,
    Passed,
    Payload,
    one_line,
    write_error,
)
from reknit.adapters.keeper.functions.together import Together, meet
from reknit.adapters.keeper.protocol.files import WithFiles, new_file
from reknit.adapters.keeper.protocol.wire import Process, StartProcesses, Warm
from reknit.adapters.keeper.zygote.program import attributes, with_usual
from reknit.adapters.runtime.threads import is_main_thread
from reknit.core.agent.worker_words import WorkerExit, WorkersExited
from reknit.core.job.workers import WorkerFailure, WorkerRanks

from .forking import cuda_is_initialized, fork_keeper
from .start import Keeping

_TOLD, _FILE, _PAYLOAD, _TRACKER, _TOGETHER, _FIRST = 10, 11, 12, 13, (14, 15, 16), 17
"""Descriptors of a worker: what it is told, the file for its value (the same one), the pickled function, the resource
tracker, those of `Together`, and the first one of its arguments."""
_ENDED_EARLY = 1
_NAMED = (str, bytes, int, bool, type(None))
"""Types of arguments that are the same if they are equal. A float is none: 0.0 equals -0.0."""
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors while something is pickled that are not the caller's mistake."""


class FunctionError(ValueError):
    """This function cannot be a worker, or what it has returned cannot be read. The text is one line for the caller."""

    __module__ = "reknit"  # as people import it, and as a traceback shows it


@frozen(eq=False)
class Function:
    """What one worker calls."""

    fn: Callable[..., object]
    args: tuple[object, ...] = ()


class _Spawning:
    """Stands for a process that is being started: `multiprocessing` hands it the descriptors of what is pickled."""

    DupFd = Passed

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        """Returns the number of the descriptor in the worker."""
        self.descriptors.append(os.dup(fd))  # the value may be dropped before the descriptor is sent
        return _FIRST + len(self.descriptors) - 1


@frozen(eq=False)
class _Packed:
    """A function with its arguments, ready for any number of workers."""

    file: int
    descriptors: tuple[int, ...]


class Calls:
    """The functions of one round, and what has become of them."""

    def __init__(self, round_: int, functions: Mapping[int, Function], start_method: str) -> None:
        """`functions`: by local rank. Raises `FunctionError`, and `OSError` if no descriptor is free."""
        self.round = round_
        self._start_method = start_method
        self._files: dict[int, int] = {}
        """By local rank: the worker's file. It stays open until `close`."""
        self._packed: dict[object, _Packed] = {}
        self._which: dict[int, _Packed] = {}
        self._shared: list[int] = []
        """What the functions wait for each other with (`Together`). The workers alone use it."""
        self._sent: list[int] = []
        """What the keeper gets, until it has it."""
        # Without a subreaper, the forks of a zygote could not become children of the keeper.
        self._has_zygote = start_method == "forkserver" and sys.platform == "linux"
        self._modules = {str(getattr(function.fn, "__module__", "")) for function in functions.values()}
        self._functions = dict(functions) if start_method == "fork" else {}
        """Those that are not pickled."""
        if start_method == "fork" and cuda_is_initialized():
            raise FunctionError(
                "CUDA is initialised in this process, so its forks could not use it: use start method spawn"
            )
        try:
            self._shared += meet(len(functions))
            for local_rank, function in functions.items():
                self._files[local_rank] = new_file()
                if start_method == "fork":
                    check(function.fn)
                else:
                    self._which[local_rank] = self._pack(function)
        except BaseException:
            self.close()
            raise

    def _pack(self, function: Function) -> _Packed:
        key = (id(function.fn), *(_key(arg) for arg in function.args))
        if key not in self._packed:
            check(function.fn)
            self._packed[key] = _pack(function)
        return self._packed[key]

    def fork_keeper(self, ranks: Mapping[int, int], console: tuple[int, int]) -> Keeping:
        """Start a keeper that is a fork of this process, and whose workers call these functions. `ranks`: by local
        rank. `console`: the descriptors that become its stdout and stderr. Raises `OSError`."""
        workers = {
            rank: FunctionWorker(
                ranks[rank], "fork", self._files[rank], Together(*self._shared), InheritedFunction(each.fn, each.args)
            )
            for rank, each in self._functions.items()
        }
        return fork_keeper(workers, self._files, console)

    def parcel(self, command: StartProcesses) -> WithFiles:
        """The command and the files that a keeper needs to start these functions."""
        sent = self._sent
        processes = []
        told = _told()
        tracker = _tracker()
        for asked in command.processes:
            local_rank = asked.local_rank
            if local_rank not in self._files:
                processes.append(asked)  # it is a program
                continue
            file, packed = self._files[local_rank], self._which[local_rank]
            _write(
                file,
                told,
                FunctionWorker(asked.rank, self._start_method, _FILE, Together(*_TOGETHER), Payload(_PAYLOAD)),
            )
            numbers = {_TOLD: file, _FILE: file, _PAYLOAD: packed.file} | dict(
                zip(_TOGETHER, self._shared, strict=True)
            )
            numbers |= dict(enumerate(packed.descriptors, _FIRST))
            if tracker >= 0:
                numbers[_TRACKER] = tracker
            sent += [fd for fd in dict.fromkeys(numbers.values()) if fd not in sent]
            descriptors = tuple((number, sent.index(fd)) for number, fd in numbers.items())
            processes.append(evolve(asked, argv=_command_line(tracker), descriptors=descriptors))
        warm = warm_of_functions(self._modules) if self._has_zygote else None
        command = evolve(command, processes=tuple(processes), warm=warm)
        return WithFiles(evolve(command, descriptors=len(sent)), sent)

    def release(self) -> None:
        """Close what the keeper has by now. The workers' files stay open. May be repeated."""
        for packed in self._packed.values():
            for fd in (packed.file, *packed.descriptors):
                os.close(fd)
        self._packed, self._which = {}, {}
        self._sent.clear()
        while self._shared:
            os.close(self._shared.pop())

    def judged(self, event: WorkersExited, workers: Mapping[int, WorkerRanks | Process]) -> WorkersExited:
        """The event, in which a process that has ended well without a value is a failure. `workers`: by local rank."""
        return evolve(event, exits=tuple(self._judged(exit_, workers) for exit_ in event.exits))

    def _judged(self, exit_: WorkerExit, workers: Mapping[int, WorkerRanks | Process]) -> WorkerExit:
        local_rank = exit_.local_rank
        if exit_.failure is not None or local_rank not in self._files or self._has_returned(local_rank):
            return exit_
        why = "the function has ended without returning: its process has exited with status 0"
        rank = workers[local_rank].rank if local_rank in workers else local_rank
        failure = WorkerFailure(local_rank, rank, _ENDED_EARLY, message=why)
        return WorkerExit(local_rank, failure)

    def _has_returned(self, local_rank: int) -> bool:
        return os.pread(self._files[local_rank], len(RETURNED), 0) == RETURNED

    def values(self) -> dict[int, object]:
        """By local rank: what the functions that have returned so far have returned. Raises `FunctionError`."""
        return {local_rank: self._value(local_rank) for local_rank in self._files if self._has_returned(local_rank)}

    def _value(self, local_rank: int) -> object:
        data = mmap.mmap(self._files[local_rank], 0, access=mmap.ACCESS_READ)
        with data, memoryview(data) as view, view[len(RETURNED) :] as pickled:
            try:
                return pickle.loads(pickled)
            except Exception as error:
                what = f"what the function of local rank {local_rank} has returned cannot be read here"
                raise FunctionError(f"{what}: {one_line(error)}") from error

    def close(self) -> None:
        """Close everything. May be repeated."""
        self.release()
        for fd in self._files.values():
            os.close(fd)
        self._files = {}


# ---- what can be a worker ----


def verify(function: Function, start_method: str) -> None:
    """Raises `FunctionError` if this function cannot be a worker. Starts nothing."""
    end_import(start_method)
    Calls(0, {0: function}, start_method).close()


_UNGUARDED = (
    "a worker imports this script, and the script starts workers again: "
    'put the start below the line `if __name__ == "__main__":`'
)


def end_import(start_method: str) -> None:
    """End this process if it is a worker that imports the script of the program. No worker may be started then.

    Raises `SystemExit`, so that no traceback hides the sentence that matters. In another thread than the main thread
    this would end the thread without a word, so `FunctionError` is raised there."""
    if start_method == "fork" or not getattr(process.current_process(), "_inheriting", False):
        return
    if not is_main_thread():
        raise FunctionError(_UNGUARDED)
    write_error(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), _UNGUARDED, "")
    raise SystemExit(f"reknit: {_UNGUARDED}")


def check(fn: Callable[..., object]) -> None:
    """Raises `FunctionError` for a function that does nothing when it is called."""
    for is_one, what in (
        (inspect.isgeneratorfunction, "a generator function"),
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
    ):
        if is_one(fn):
            raise FunctionError(f"{_name(fn)} is {what}: a call of it runs nothing, so it cannot be a worker")


def _name(fn: object) -> str:
    return str(getattr(fn, "__qualname__", None) or repr(fn))


def _key(arg: object) -> object:
    return (type(arg), arg) if isinstance(arg, _NAMED) else id(arg)


# ---- pickling ----


def _pack(function: Function) -> _Packed:
    spawning = _Spawning()
    try:
        data = _pickled(function, spawning)
        file = new_file()
    except BaseException:
        for fd in spawning.descriptors:
            os.close(fd)
        raise
    with open(file, "wb", closefd=False) as opened:
        opened.write(data)
    return _Packed(file, tuple(spawning.descriptors))


def _pickled(function: Function, spawning: _Spawning) -> memoryview:
    buffer = io.BytesIO()
    try:
        with _as_spawning(spawning):
            ForkingPickler(buffer, pickle.HIGHEST_PROTOCOL).dump((function.fn, function.args))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LIMITS:
            raise
        raise FunctionError(_why_not(function, error)) from None
    if b"__main__" in buffer.getvalue() and not _has_main_file():
        return _by_value(function, spawning)
    return buffer.getbuffer()


def _by_value(function: Function, spawning: _Spawning) -> memoryview:
    """For what a notebook or an interactive session has defined, which no worker can import."""
    name = _name(function.fn)
    try:
        import cloudpickle  # type: ignore[import-untyped]  # it has no types
    except ImportError:
        raise FunctionError(
            f"{name} or one of its arguments is defined in an interactive session, which a worker cannot import: "
            "define it in a module, install cloudpickle (pip install 'reknit[notebook]'), or use start method fork"
        ) from None
    for fd in spawning.descriptors:
        os.close(fd)
    spawning.descriptors.clear()
    buffer = io.BytesIO()

    ours = ForkingPickler(io.BytesIO()).dispatch_table  # for queues and shared tensors

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]  # it has no types
        dispatch_table: ClassVar[Any] = ChainMap(ours, cloudpickle.CloudPickler.dispatch_table)

    try:
        with _as_spawning(spawning):
            Pickler(buffer).dump((function.fn, function.args))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _LIMITS:
            raise
        raise FunctionError(_why_not(function, error)) from None
    return buffer.getbuffer()


def _why_not(function: Function, error: Exception) -> str:
    name, cause = _name(function.fn), one_line(error)
    try:
        ForkingPickler.dumps(function.fn)
    except Exception:
        remedy = 'Define it at the top of a module, or use start_method="fork"'
        return f"{name} cannot be pickled, so a worker cannot import it. {remedy}: {cause}"
    return f"the arguments of {name} cannot be pickled: {cause}"


class _as_spawning:  # noqa: N801  # a context
    """Within this context, `multiprocessing` pickles for a process that is being started."""

    def __init__(self, spawning: _Spawning) -> None:
        self._spawning = spawning

    def __enter__(self) -> None:
        self._before: Any = context.get_spawning_popen()
        stand_in: Any = self._spawning
        context.set_spawning_popen(stand_in)

    def __exit__(self, *error: object) -> None:
        context.set_spawning_popen(self._before)


def _has_main_file() -> bool:
    """Whether a worker can import the module `__main__` of this process."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:
        return True
    return os.path.exists(getattr(main, "__file__", None) or "")


def _told() -> bytes:
    """What `multiprocessing` tells a process that it starts."""
    end_import("spawn")
    with _as_spawning(_Spawning()):
        told = spawn.get_preparation_data("worker")
        if not _has_main_file():
            told.pop("init_main_from_path", None)  # for example `<stdin>`
        return bytes(ForkingPickler.dumps(told))


def warm_of_functions(modules: Collection[str]) -> Warm:
    """What the workers of start method forkserver are forked from. `modules`: those of the functions.

    It imports what `multiprocessing.set_forkserver_preload` was given, and what a worker probably imports: the
    installed packages that this program's script and the modules of its functions have imported, and with torch what
    most scripts with torch import."""
    named = getattr(getattr(forkserver, "_forkserver", None), "_preload_modules", None) or ()
    return Warm(
        _command_line(_tracker()),
        modules=(*(name for name in named if name != "__main__"), *_packages_of({"__main__", *modules})),
        paths=tuple(sys.path),
    )


def _packages_of(modules: Collection[str]) -> tuple[str, ...]:
    """The installed packages that these modules have imported, also by other modules that are not installed."""
    packages, seen, rest = set(), set[str](), [*modules]
    while rest:
        name = rest.pop()
        module = sys.modules.get(name)
        if name in seen or module is None:
            continue
        seen.add(name)
        spec = getattr(module, "__spec__", None)
        if name != "__main__" and (spec is None or _is_installed(spec)):
            packages.add(name.partition(".")[0])
        else:
            rest += _held(name, module)
    return with_usual([name for name in [*sys.modules] if name in packages])


def _is_installed(spec: ModuleSpec) -> bool:
    """Whether this is a module of Python, or of a package that is installed as a copy."""
    if spec.origin in ("built-in", "frozen"):
        return True
    places = [spec.origin] if spec.origin else [*(spec.submodule_search_locations or ())]
    return bool(places) and all(
        {"site-packages", "dist-packages"} & {*place.split(os.sep)}
        or any(os.path.realpath(place).startswith(folder + os.sep) for folder in _standard())
        for place in places
    )


@cache
def _standard() -> frozenset[str]:
    """The folders of Python's own modules."""
    return frozenset(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))


def _held(name: str, module: ModuleType) -> set[str]:
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


def _command_line(tracker: int) -> tuple[str, ...]:
    """The command line of a new interpreter that does what it is told by its descriptor `_TOLD`."""
    argv = spawn.get_command_line(tracker_fd=_TRACKER if tracker >= 0 else None, pipe_handle=_TOLD)
    return tuple(map(os.fsdecode, argv))


def _write(file: int, told: bytes, worker: FunctionWorker) -> None:
    with _as_spawning(_Spawning()):
        data = bytes(ForkingPickler.dumps(worker))
    with open(file, "wb", closefd=False) as opened:
        opened.write(told + data)
    os.lseek(file, 0, os.SEEK_SET)  # the worker has the same position


def _tracker() -> int:
    """The descriptor of this process's resource tracker. -1: it has none, so nothing of its own needs one."""
    tracker: Any = getattr(resource_tracker, "_resource_tracker", None)
    fd = resource_tracker.getfd() if getattr(tracker, "_fd", None) is not None else None
    return -1 if fd is None else fd
