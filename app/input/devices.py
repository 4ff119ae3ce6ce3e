"""How many workers `--nproc-per-node=gpu` means. A child process asks torch, so that the agent need not import
torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from reknit.app.cli.options import UsageError

_ASK = """
import torch
print("gpu", torch.cuda.device_count() if torch.cuda.is_available() else 0)
print("xpu", torch.xpu.device_count() if hasattr(torch, "xpu") and torch.xpu.is_available() else 0)
accelerator = getattr(torch, "accelerator", None)
print("auto", accelerator.device_count() if accelerator and accelerator.is_available() else 0)
"""
PATIENCE_S = 120
"""Seconds that the child process may take. An import of torch can be slow on a shared file system."""


def count(kind: str, environ: Mapping[str, str]) -> int:
    """The number of devices of this kind: `cpu`, `gpu`, `xpu` or `auto`. `auto` means accelerators, or CPUs if there
    are none. Raises `UsageError`."""
    if kind == "cpu":
        return cpus()
    devices = _asked(environ.get("PYTHON_EXEC") or sys.executable)
    if devices.get(kind):
        return devices[kind]
    if kind == "auto":
        return cpus()
    if not devices:
        raise UsageError(f"--nproc-per-node={kind}: the devices cannot be counted, because torch cannot be imported")
    raise UsageError(f"--nproc-per-node={kind}: torch sees no such device here")


def cpus() -> int:
    """The number of CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _asked(python: str) -> dict[str, int]:
    import subprocess

    try:
        answer = subprocess.run(
            [python, "-c", _ASK],
            check=False,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UsageError(f"--nproc-per-node: devices cannot be counted: {e}") from None
    words = [line.split() for line in answer.stdout.splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdigit()}
