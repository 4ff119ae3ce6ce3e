"""What is known of a program's imports: a file per program in the user's cache folder.

1. A worker that has ended well has left the names of the modules that it had imported. They are imported ahead of the
   workers from the next launch on.
2. A module that did harm is kept with the reason, and is left out from then on, until the file is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence

from attrs import asdict, evolve, frozen

from .commandline import CommandLine

_LONGEST = 4 << 20
"""Upper bound on the text of a file, in characters."""
_FOLDER = os.path.join("reknit", "warm")


@frozen
class Known:
    """What is known of the imports of one program."""

    program: str
    """As a user writes it: a path, or `-m` and a module."""
    modules: tuple[str, ...] = ()
    """What its workers had imported, in that order."""
    left_out: Mapping[str, str] = {}  # frozen, and nobody writes to it
    """By module that is not imported ahead of the workers: why."""
    is_checked: bool = False
    """It was found out which of the modules must be left out."""


def file_of(parts: CommandLine, python: str, cwd: str, environ: Mapping[str, str]) -> str:
    """The file for this program under this Python. Empty: the program has no name. `python`: the path of the
    interpreter. `cwd`: the workers' working folder. `environ`: says where the user's cache folder is."""
    program = program_of(parts, cwd)
    if not program:
        return ""
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    name = hashlib.sha256(f"{program}\0{python}".encode(errors="surrogateescape")).hexdigest()[:16]
    return os.path.join(base, _FOLDER, f"{name}.json") if os.path.isabs(base) else ""


def program_of(parts: CommandLine, cwd: str) -> str:
    """The program as a text that names it on this host. Empty: it has no name."""
    if parts.module:
        return f"-m {parts.module}"
    return os.path.realpath(os.path.join(cwd, parts.script)) if parts.script else ""


def open_folder(path: str) -> str:
    """Make the folder of this file. Returns why nothing can be kept there. Empty: it can."""
    folder = os.path.dirname(path)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written"


def read(path: str) -> Known | None:
    """None: nothing is known. A file that cannot be read counts as none: it is only a cache."""
    try:
        found = json.loads(_text_of(path))
        left_out = {str(name): str(why) for name, why in found["left_out"].items()}
        return Known(str(found["program"]), tuple(map(str, found["modules"])), left_out, bool(found["is_checked"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _text_of(path: str) -> str:
    """Raises `OSError` and `ValueError`. A pipe in the place of the file does not make the reader wait."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(fd) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(path)
        return file.read(_LONGEST)


def note(path: str, program: str, *, modules: Sequence[str] = (), left_out: Mapping[str, str] | None = None) -> None:
    """Write down what was learned. What is not given stays. A full disk, for example, is no error: it is only a
    cache."""
    known = read(path) or Known(program)
    if modules and tuple(modules) != known.modules:
        known = evolve(known, modules=tuple(modules), is_checked=False)
    if left_out is not None:
        known = evolve(known, left_out=dict(left_out), is_checked=True)
    data = asdict(known)
    new = f"{path}.{os.getpid()}"
    try:
        with open(new, "w") as file:
            json.dump(data, file, indent=0)
        os.replace(new, path)
    except OSError:
        pass


def forget(path: str) -> bool:
    """False: nothing was known. Raises `OSError`."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    return True


def take(path: str) -> list[str]:
    """The names that a worker has left in this file, which is removed. Empty: it has left none."""
    try:
        names = _text_of(path).split()
        os.unlink(path)
    except (OSError, ValueError):
        return []
    return names
