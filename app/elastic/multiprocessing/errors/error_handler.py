"""Writing error files. The counterpart of `torch.distributed.elastic.multiprocessing.errors.error_handler`."""

from __future__ import annotations

import json
import os
import time
import warnings
from logging import getLogger
from typing import Any

__all__ = ["ErrorHandler"]

_logger = getLogger(__name__)


class ErrorHandler:
    """Writes an exception, as JSON, to the file that the variable TORCHELASTIC_ERROR_FILE names.

    A subclass may override `initialize` and `record_exception`.
    """

    def _get_error_file_path(self) -> str | None:
        """None or empty: nothing is written."""
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def initialize(self) -> None:
        """Called before the function whose errors are recorded. Turns on Python's fault handler."""
        import faulthandler

        try:
            faulthandler.enable(all_threads=True)
        except Exception as error:  # stderr may be closed, or have no descriptor
            warnings.warn(f"Unable to enable fault handler. {type(error).__name__}: {error}", stacklevel=2)

    def record_exception(self, e: BaseException) -> None:
        """Write what happened. A file that cannot be written is a warning: the exception itself matters more."""
        path = self._get_error_file_path()
        if not path:
            return
        from traceback import format_exception

        extra = {"py_callstack": "".join(format_exception(e)), "timestamp": str(int(time.time()))}
        message = {"message": f"{type(e).__name__}: {_text(e)}", "extraInfo": extra}
        self._write_error_file(path, json.dumps({"message": message}))

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        try:
            with open(file_path, "w") as file:
                file.write(error_msg)
        except Exception as error:
            warnings.warn(f"Unable to write error to file. {type(error).__name__}: {error}", stacklevel=2)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Put the exit code into a worker's error. A worker that was killed by a signal could not do so itself."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _logger.warning("the error file %s has no place for the exit code %s", rootcause_error_file, error_code)

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a worker's error file to this process's own, and put the exit code into it. `error_code`: 0 puts
        nothing. Raises `OSError` and `ValueError` if the worker's file cannot be read."""
        with open(rootcause_error_file) as file:
            error = json.load(file)
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, error, error_code)
        path = self._get_error_file_path()
        if not path:
            _logger.error(
                "the error file %s is copied nowhere: this process has no TORCHELASTIC_ERROR_FILE", rootcause_error_file
            )
            return
        self._rm(path)
        self._write_error_file(path, json.dumps(error))

    def _rm(self, my_error_file: str) -> None:
        """Remove this process's error file. A worker that had the same variable may have written there, so its content
        is logged first."""
        try:
            with open(my_error_file, errors="replace") as file:
                before = file.read()
            os.remove(my_error_file)
        except FileNotFoundError:
            return
        except OSError as error:
            _logger.warning("the error file %s is in the way: %s", my_error_file, error)
            return
        _logger.warning("the error file %s exists already and is replaced. It held:\n%s", my_error_file, before)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as why:  # the class of the user's exception has a bug. The traceback is still worth recording
        return f"<no text: {type(why).__name__}>"
