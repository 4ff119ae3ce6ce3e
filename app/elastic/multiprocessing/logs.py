"""Where the output of workers and their error files go. `api` exports these names, as torch's module does.

The layout of `DefaultLogsSpecs` is torch's:

    <log_dir>/<run id>_<random>/attempt_<restarts>/<local rank>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run id>_<random>/attempt_<restarts>/{filtered_stdout.log,filtered_stderr.log}
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntFlag

from reknit.adapters.keeper.common.run_folder import CannotMake, LogFolder
from reknit.app.input.readers import masks

from .logger import logger

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The variable that names a worker's error file."""


class Std(IntFlag):
    """Streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read `3` (all workers) or `0:3,1:0` (by local rank). A local rank may have several digits. Raises
        `ValueError`."""
        try:
            found = masks(vm)
        except ValueError as error:
            raise ValueError(f"{vm} does not match: {error}") from None
        if isinstance(found, int):
            return cls(found)
        return {rank: cls(mask) for rank, mask in found.items()}


def to_map(val_or_map: Std | Mapping[int, Std], local_world_size: int) -> dict[int, Std]:
    """The streams of each local rank. `val_or_map`: of all, or by local rank. A rank that is missing has `Std.NONE`."""
    if isinstance(val_or_map, Std):
        return dict.fromkeys(range(local_world_size), val_or_map)
    return {rank: val_or_map.get(rank, Std.NONE) for rank in range(local_world_size)}


@dataclass
class LogsDest:
    """Paths of files, by local rank."""

    stdouts: dict[int, str] = field(default_factory=dict)
    """Empty text: the console."""
    stderrs: dict[int, str] = field(default_factory=dict)
    """Empty text: the console."""
    tee_stdouts: dict[int, str] = field(default_factory=dict)
    """What is also shown on the console. A rank that is missing is not."""
    tee_stderrs: dict[int, str] = field(default_factory=dict)
    error_files: dict[int, str] = field(default_factory=dict)
    filtered_stdout: str = ""
    """The file for lines that match a filter. Empty: there is none."""
    filtered_stderr: str = ""


class LogsSpecs(ABC):
    """Says where the output of each worker goes."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        """`log_dir`: the folder for all files.
        `redirects`: streams that go to files only.
        `tee`: streams that go to files and, with a prefix before each line, to the console.
        `local_ranks_filter`: only these local ranks are shown on the console. None or empty: all.
        """
        self._root_log_dir = log_dir
        self._redirects = redirects
        self._tee = tee
        self._local_ranks_filter = local_ranks_filter

    @abstractmethod
    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders for one start of the workers, and name the files. Called for each start.

        `envs`: the variables of each worker, by local rank. Each gets TORCHELASTIC_ERROR_FILE.
        """

    @property
    @abstractmethod
    def root_log_dir(self) -> str:
        """The folder for all files."""


class DefaultLogsSpecs(LogsSpecs):
    """Files below `log_dir`, in the layout that the top of this file shows.

    1. Without a `log_dir`, the folder is a temporary one. It stays if the output of some worker goes to a file.
       Otherwise it holds error files only, and is removed when neither this object nor a failure that was read from it
       is in use any more.
    2. With /dev/null as `log_dir` there are no files: all output goes to the console.
    3. If the workers are started again with the same count of restarts, the folder of the earlier start gets another
       name: `attempt_0.1`.
    """

    is_temporary = False
    """The folder is removed in the end: `log_dir` is not given, and no output goes to a file."""

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: Std | dict[int, Std] = Std.NONE,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        """Makes `log_dir`. Raises `OSError` if that fails, `NotADirectoryError` if it is a file."""
        if log_dir and log_dir != os.devnull:
            if os.path.isfile(log_dir):
                raise NotADirectoryError(f"log_dir: {log_dir} is a file")
            os.makedirs(log_dir, exist_ok=True)
        super().__init__(log_dir or None, redirects, tee, local_ranks_filter)
        self.is_temporary = not log_dir and not self._has_output
        self._run_log_dir: str | None = None
        """The folder of this run, in `root_log_dir`. None: not made yet."""

    @property
    def root_log_dir(self) -> str:
        """The folder for all files. A temporary one is made when this is asked for the first time."""
        if self._root_log_dir is None:
            self._root_log_dir = self._temporary()
        return self._root_log_dir

    def _temporary(self) -> str:
        try:
            folder = LogFolder("", "logs", keeps=self._has_output)
        except CannotMake as error:
            raise OSError(str(error)) from None
        # A forked child has a copy of this object. The folder is its parent's.
        weakref.finalize(self, _close, folder, os.getpid())
        # There is no folder if the disk is full. Workers run without error files then.
        return folder.path or os.devnull

    @property
    def _has_output(self) -> bool:
        """The output of some worker goes to a file."""
        given = (self._redirects, self._tee)
        return any(any(masks.values()) if isinstance(masks, dict) else bool(masks) for masks in given)

    def _make_log_dir(self, log_dir: str, rdzv_run_id: str) -> str:
        # A run id may hold any character. It must not lead into another folder.
        name = f"{rdzv_run_id.replace('/', '_')[:100]}_{os.urandom(4).hex()}"
        made = os.path.abspath(os.path.join(log_dir, name))
        os.makedirs(made, mode=0o700)
        logger().info("log directory set to: %s", made)
        return made

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """See `LogsSpecs.reify`. Reads the run id and the count of restarts from the variables of local rank 0. Raises
        `OSError` if a folder cannot be made."""
        first = envs.get(0, {})
        folder = self._attempt_folder(
            first.get("TORCHELASTIC_RUN_ID", "test_run_id"), first.get("TORCHELASTIC_RESTART_COUNT", "0")
        )
        dest = LogsDest()
        if folder:
            dest.filtered_stdout = os.path.join(folder, "filtered_stdout.log")
            dest.filtered_stderr = os.path.join(folder, "filtered_stderr.log")
        redirects, tees = to_map(self._redirects, len(envs)), to_map(self._tee, len(envs))
        for rank in range(len(envs)):
            if folder:
                self._place(dest, rank, os.path.join(folder, str(rank)), redirects[rank], tees[rank])
            else:
                self._place_nowhere(dest, rank)
            if not self._is_shown(rank):
                self._hide(dest, rank)
            envs[rank][ERROR_FILE] = dest.error_files[rank] if folder else ""
        return dest

    def _attempt_folder(self, run_id: str, restarts: str) -> str:
        """A new folder for one start of the workers. Empty: there are no files."""
        root = self.root_log_dir
        if root == os.devnull:
            return ""
        if self._run_log_dir is None:
            self._run_log_dir = self._make_log_dir(root, run_id)
        folder = os.path.join(self._run_log_dir, f"attempt_{restarts}")
        if os.path.exists(folder):
            earlier = 1
            while os.path.exists(f"{folder}.{earlier}"):
                earlier += 1
            os.rename(folder, f"{folder}.{earlier}")
        os.makedirs(folder)
        return folder

    def _place(self, dest: LogsDest, rank: int, folder: str, redirects: Std, tee: Std) -> None:
        os.mkdir(folder)
        dest.error_files[rank] = os.path.join(folder, "error.json")
        for stream, name, paths, teed in (
            (Std.OUT, "stdout.log", dest.stdouts, dest.tee_stdouts),
            (Std.ERR, "stderr.log", dest.stderrs, dest.tee_stderrs),
        ):
            path = os.path.join(folder, name)
            paths[rank] = path if stream & (redirects | tee) else ""
            if stream & tee:
                teed[rank] = path

    def _place_nowhere(self, dest: LogsDest, rank: int) -> None:
        dest.stdouts[rank] = dest.stderrs[rank] = ""
        dest.tee_stdouts[rank] = dest.tee_stderrs[rank] = dest.error_files[rank] = os.devnull

    def _is_shown(self, rank: int) -> bool:
        return not self._local_ranks_filter or rank in self._local_ranks_filter

    def _hide(self, dest: LogsDest, rank: int) -> None:
        """Show nothing of this worker. What goes to a file still does."""
        for paths, teed in ((dest.stdouts, dest.tee_stdouts), (dest.stderrs, dest.tee_stderrs)):
            paths[rank] = paths[rank] or os.devnull
            teed.pop(rank, None)

    def __repr__(self) -> str:
        return (
            f"DefaultLogsSpecs(root_log_dir={self._root_log_dir}, redirects={self._redirects}, "
            f"tee={self._tee}, local_ranks_filter={self._local_ranks_filter})"
        )

    def _fields(self) -> tuple[object, ...]:
        return self._root_log_dir, self._redirects, self._tee, self._local_ranks_filter

    def __eq__(self, other: object) -> bool:
        return self._fields() == other._fields() if isinstance(other, DefaultLogsSpecs) else NotImplemented

    __hash__ = object.__hash__  # by identity: the fields can change


def _close(folder: LogFolder, owner: int) -> None:
    if os.getpid() == owner:
        folder.close()
