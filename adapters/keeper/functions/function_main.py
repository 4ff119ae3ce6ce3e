"""What runs in the process of a worker that is a function.

1. The worker's process is one of `multiprocessing`, as far as the function can see: `current_process`,
   `parent_process`, the key, the exit functions and the start method are those that torch's workers have.
2. An uncaught exception writes torchelastic's error file (docs/torchelastic.md#error-file) and ends the process with
   status 1. Only text of the exception is written, so it need not be picklable.
3. The return value is written into a file that the agent holds open. Its first bytes are written last, so that an
   incomplete value is never taken for one.
4. `SystemExit` with status 0 returns None. Any other `SystemExit` ends the process with its status.
5. A function that has returned waits for the others of its node before its process ends (`together.py`).
"""

from __future__ import annotations

import inspect
import json
import mmap
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import process
from typing import Any, BinaryIO

from .together import Together

RETURNED = b"returned"
"""The first bytes of the file of a function that has returned. The pickled value follows."""
_LONGEST = 100_000
"""Upper bound on the text of an exception and on its traceback, in characters. Readers take no error file of more than
4 MiB, and a character may take twelve bytes there."""


class Passed:
    """A descriptor among a function's arguments, as `multiprocessing.reduction.DupFd` gives it."""

    def __init__(self, number: int) -> None:
        self._number = number

    def detach(self) -> int:
        """The number of the descriptor in the worker, which owns it from now on."""
        return self._number


class PreparedProcess(process.BaseProcess):
    """A process that `multiprocessing` has set up, and that another process than the agent has started."""

    def _bootstrap(self, parent_sentinel: int | None = None) -> int:
        """`multiprocessing` calls this in the worker. `parent_sentinel` must be readable when the agent has ended."""
        if parent_sentinel is not None:
            os.close(parent_sentinel)  # it is the file from which this process was told what to do
        inherited, me = super(), self  # type: tuple[Any, Any]  # the stubs have no such names
        status: int = inherited._bootstrap(_pidfd(me._parent_pid))
        return status


class FunctionWorker(PreparedProcess):
    """The process of one function, made by the agent. The keeper starts it."""

    def __init__(
        self,
        rank: int,
        start_method: str,
        file: int,
        together: Together,
        load: Callable[[], tuple[Callable[..., object], Any]],
    ) -> None:
        """`rank`: part of the name of the process, which `multiprocessing` writes above a traceback. `file`: the
        descriptor, in the worker, into which the value goes. `together`: what all workers share. `load`: gives the
        function and its arguments, in the worker."""
        # A host that is a daemonic process may have no children of its own. This one is a child of the keeper.
        super().__init__(name=f"rank {rank}", daemon=False)
        self._start_method = start_method
        self._file = file
        self._together = together
        self._load = load
        self._own_pid = 0

    def run(self) -> None:
        """Call the function, and write down what became of it. Raises what the function raises."""
        self._own_pid = os.getpid()
        _show_crashes()
        path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        _remove(path)
        try:
            value = self._call()
            # Not in a child that the function has forked, and that has left the function as well.
            if os.getpid() == self._own_pid:
                self._return(value)
                del value  # it may hold the memory of a device, which others may need
                self._together.wait()
        except SystemExit:
            raise
        except BaseException as error:
            self._record(path, error)
            raise

    def _call(self) -> object:
        function, args = self._load()
        try:
            value = function(*args)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
            return None
        if inspect.isgenerator(value) or inspect.isasyncgen(value) or inspect.iscoroutine(value):
            if inspect.iscoroutine(value):
                value.close()
            raise TypeError(f"{_name(function)} has returned a {type(value).__name__}: nothing of it has run")
        return value

    def _return(self, value: object) -> None:
        os.ftruncate(self._file, 0)
        with open(self._file, "wb", closefd=False) as file:
            file.seek(len(RETURNED))
            try:
                _pickler(file).dump(value)
            except Exception as error:
                kind = type(value).__qualname__
                raise TypeError(f"the return value, of type {kind}, cannot be pickled: {one_line(error)}") from error
        os.pwrite(self._file, RETURNED, 0)

    def _record(self, path: str, error: BaseException) -> None:
        if not path or os.getpid() != self._own_pid or os.path.exists(path):
            return  # a decorator of the function has written the file already
        if _handed_up(path, error):
            return
        said = _text(error)
        if not isinstance(error, Exception):
            said = f"the function has ended without returning: {said}"
        write_error(path, said, _traceback(error))


def write_error(path: str, said: str, stack: str) -> None:
    """Write torchelastic's error file. `stack`: the traceback. Empty: there is none."""
    extra = {"py_callstack": _cut(stack), "timestamp": str(int(time.time()))}
    try:
        with open(path, "w") as file:
            json.dump({"message": {"message": _cut(said), "extraInfo": extra}}, file)
    except OSError:
        pass  # a full disk, for example: stderr says the same


def _cut(text: str) -> str:
    """The text, without its middle if it is too long for an error file."""
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} … {text[-half:]}"


class InheritedFunction:
    """A function with its arguments, in the memory that a forked worker has inherited."""

    def __init__(self, function: Callable[..., object], args: Any) -> None:
        self._called = function, args

    def __call__(self) -> tuple[Callable[..., object], Any]:
        return self._called


def _handed_up(path: str, error: BaseException) -> bool:
    """Copy the error file of the worker that is to blame, if this function was a launcher whose workers have failed
    (`ChildFailedError`, torch's or reknit's). False: it was none, or that worker has no error file."""
    first_failure: Any = getattr(error, "get_first_failure", None)
    try:
        _, failure = first_failure()
        with open(failure.error_file) as source:
            found = json.load(source)
        if failure.exitcode and isinstance(found["message"], dict):
            found["message"]["errorCode"] = failure.exitcode
        with open(path, "w") as file:
            json.dump(found, file)
    except Exception:  # whatever this error is, its own traceback is recorded then
        return False
    return True


_BELOW_THE_GUARD = (
    '. A worker imports the script, but runs nothing that stands below `if __name__ == "__main__":`. '
    "Define functions and classes above this line"
)


class Payload:
    """A pickled function with its arguments, in a file that several workers share."""

    def __init__(self, number: int) -> None:
        """`number`: the descriptor of the file in the worker."""
        self._number = number

    def __call__(self) -> tuple[Callable[..., object], Any]:
        # A mapping: all workers have the same open file, and with it one position.
        me: Any = process.current_process()
        with mmap.mmap(self._number, 0, access=mmap.ACCESS_READ) as data:
            os.close(self._number)
            me._inheriting = True  # some values, such as a manager's, are unpickled in another way elsewhere
            try:
                function, args = pickle.loads(data)
            except Exception as error:
                why = one_line(error) + (_BELOW_THE_GUARD if "<module '__mp_main__' from" in str(error) else "")
                raise TypeError(f"the function or its arguments cannot be read here: {why}") from error
            finally:
                del me._inheriting
        return function, args


def _pickler(file: BinaryIO) -> pickle.Pickler:
    """Pickles by value. A tensor of a device is copied to the CPU, because its device's memory ends with the worker.

    If the function came by cloudpickle, its value may be of a class that only cloudpickle can send back.
    """
    base: Any = getattr(sys.modules.get("cloudpickle"), "CloudPickler", pickle.Pickler)

    class Pickler(base):  # type: ignore[misc]  # which class this is depends on the function
        def reducer_override(self, value: object) -> Any:
            torch = sys.modules.get("torch")
            if torch is None or not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
                return super().reducer_override(value) if base is not pickle.Pickler else NotImplemented
            copy = value.detach().cpu()
            if isinstance(value, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
            else:
                copy.requires_grad_(value.requires_grad)
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    made: pickle.Pickler = Pickler(file, pickle.HIGHEST_PROTOCOL)
    return made


def _show_crashes() -> None:
    import faulthandler

    try:
        faulthandler.enable(all_threads=True)
    except (OSError, RuntimeError, ValueError):
        pass  # stderr is closed


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # there is none


def _pidfd(pid: int | None) -> int | None:
    try:
        return os.pidfd_open(pid) if pid and hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def one_line(error: BaseException) -> str:
    """Type and text of the exception, in one line of at most 1000 characters. The exception's own `__str__` may
    fail."""
    return f"{' '.join(_text(error).split()):.1000}"


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # its own `__str__` is wrong
        return type(error).__name__


def _traceback(error: BaseException) -> str:
    # The frames of this file come first. They tell nothing about the function.
    own = shown = error.__traceback__
    while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
        shown = shown.tb_next
    try:
        return "".join(traceback.format_exception(type(error), error, shown or own))
    except Exception:
        return ""
