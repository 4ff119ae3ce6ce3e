"""Which command lines a zygote can hold: those of a Python that looks at PYTHONPATH and imports `site`."""

from __future__ import annotations

import os
import re
import sys
import zipimport
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PYTHON = re.compile(r"python[0-9.]*t?")
_ISOLATED = "EIS"
"""Options with which Python does not import what makes it a zygote."""
_WITH_VALUE = "WX"
_SAFE = re.compile(r"-(?![WX])[a-zA-Z]*P[a-zA-Z]*")
"""Options with which Python does not look beside the script."""
_LONG_WITH_VALUE = "--check-hash-based-pycs"


class NotWarm(ValueError):
    """These workers cannot be warm. The text says why: part of a line for the operator."""


class CommandLine(NamedTuple):
    """The command line of a Python, in its parts."""

    options: tuple[str, ...]
    """Python's own options, without those that name the program."""
    module: str
    """The module of `-m`. Empty: the program is another one."""
    script: str
    """The path of the script. Empty: the program is a module, the text of `-c`, or the standard input."""


def parts_of(argv: Sequence[str]) -> CommandLine:
    """Raises `NotWarm`."""
    if not argv or not (argv[0] == sys.executable or _PYTHON.fullmatch(os.path.basename(argv[0]))):
        raise NotWarm(f"{argv[0] if argv else 'the command'} is no Python")
    if any("local_rank" in word and "$" in word for word in argv[1:]):
        raise NotWarm("the arguments of the script differ from one worker to the next (${local_rank})")
    options: list[str] = []
    words = iter(argv[1:])
    for word in words:
        if word == "-":
            return CommandLine(tuple(options), "", "")
        if not word.startswith("-"):
            return CommandLine(tuple(options), "", word)
        if word.startswith("--"):
            if word != _LONG_WITH_VALUE:
                raise NotWarm(f"Python's option {word} runs no program")
            options += [word, next(words, "")]
            continue
        for at, letter in enumerate(word[1:], 1):
            if letter in _ISOLATED:
                raise NotWarm(f"Python's option -{letter} keeps it from becoming a zygote")
            if letter in "cm":
                options += [word[:at]] * (at > 1)
                return CommandLine(tuple(options), (word[at + 1 :] or next(words, "")) * (letter == "m"), "")
            if letter in _WITH_VALUE:
                options += [word] if word[at + 1 :] else [word, next(words, "")]
                break
        else:
            options.append(word)
    raise NotWarm("the command line of the workers names no program")


def _is_archive(path: str) -> bool:
    """Whether this file is an archive from which Python imports modules, for example a zip file."""
    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def folders_of(parts: CommandLine, cwd: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The folders and zip files in which Python looks for modules before it looks among those that are installed.
    `environ`: the environment of this Python."""
    if environ.get("PYTHONSAFEPATH") or any(_SAFE.fullmatch(option) for option in parts.options):
        return ()
    if not parts.script:
        return (cwd,)
    path = os.path.join(cwd, parts.script)
    if os.path.isdir(path) or _is_archive(path):
        return (path,)
    return tuple(dict.fromkeys((os.path.dirname(path), os.path.dirname(os.path.realpath(path)))))
