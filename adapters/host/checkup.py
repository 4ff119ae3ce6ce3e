"""What on this host would make a job fail or run badly. Each check looks at one thing, changes nothing, and never
raises."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from enum import Enum

from attrs import frozen

from .address import addresses_of, is_here, is_loopback, own_address
from .left import left_alive
from .place import open_folder
from .record import shown

_CONNECT_S = 5.0
_TORCH_S = 120.0
"""Time for an import of torch, which can be slow on a shared file system. Seconds."""
_SHARED_MEMORY, _DISK = 1 << 30, 100 << 20
"""With less free space, a warning. Bytes. A DataLoader of torch passes its batches through shared memory."""
_FILES, _PROCESSES = 4096, 4096
_LOCK_S = 10.0


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    """A job may fail because of it, or a feature is missing."""
    FAILURE = "failure"
    """A job will fail."""


@frozen
class Finding:
    what: str
    """What was looked at, in a word or two."""
    level: Level
    text: str
    advice: str = ""
    """What to do. Empty: nothing."""
    only_for_several: bool = False
    """A job with one node does not care."""


def local() -> Iterator[Finding]:
    """What concerns this host alone."""
    yield _python()
    yield from _torch()
    yield _name()
    yield _shared_memory()
    yield _limit("open files", resource.RLIMIT_NOFILE, _FILES, "ulimit -n")
    yield _limit("processes", resource.RLIMIT_NPROC, _PROCESSES, "ulimit -u")
    yield _temporary()
    yield _locks()
    yield _clock()
    yield _stacks()
    yield _left_over()


def _ok(what: str, text: str) -> Finding:
    return Finding(what, Level.OK, text)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return _ok("python", f"{version} ({sys.executable})")


_ASK_TORCH = """
import json, torch, torch.distributed as dist
on = dist.is_available()
cuda = torch.cuda.is_available()
print(json.dumps({
    "version": torch.__version__,
    "distributed": on,
    "gloo": on and dist.is_gloo_available(),
    "nccl": on and dist.is_nccl_available(),
    "built_for": torch.version.cuda or torch.version.hip,
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else [],
}))
"""


def _torch() -> Iterator[Finding]:
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    try:
        done = subprocess.run(
            [python, "-c", _ASK_TORCH], check=False, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TORCH_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("torch", Level.FAILURE, f"{python} cannot be asked: {error}", "set PYTHON_EXEC to another Python")
        return
    try:
        told = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        advice = f"install torch for {python}, or set PYTHON_EXEC to the Python that has it"
        yield Finding("torch", Level.FAILURE, f"it cannot be imported: {last}", advice)
        return
    backends = [name for name in ("gloo", "nccl") if told[name]]
    if not told["distributed"]:
        yield Finding("torch", Level.FAILURE, f"{told['version']} has no torch.distributed", "install another build")
    else:
        yield _ok("torch", f"{told['version']}, backends {', '.join(backends) or 'none'}")
    yield _gpus(told["gpus"], told["built_for"])


def _gpus(names: Sequence[str], built_for: str | None) -> Finding:
    has_driver = os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/kfd")
    if names:
        return _ok("gpus", f"{len(names)}: {', '.join(dict.fromkeys(names))}")
    if has_driver and built_for:
        advice = "compare the driver's version (nvidia-smi) with torch's, and look at CUDA_VISIBLE_DEVICES"
        return Finding("gpus", Level.WARNING, "there is a driver, and torch sees no GPU", advice)
    if has_driver:
        text = "there is a driver, but torch was built without GPUs"
        return Finding("gpus", Level.WARNING, text, "install another build of torch")
    return _ok("gpus", "none")


def _name() -> Finding:
    name = socket.gethostname()
    try:
        found = addresses_of(name)
    except OSError as error:
        advice = "add the name to /etc/hosts or DNS, or set GLOO_SOCKET_IFNAME: gloo looks for this host's own name"
        # A job with one node uses the loopback interface, as gloo does then.
        return Finding(
            "host name", Level.WARNING, f"{name} cannot be resolved: {error.strerror}", advice, only_for_several=True
        )
    if all(is_loopback(address) for address in found):
        own = own_address([])
        if is_loopback(own):
            return _ok("host name", f"{name}; there is no network")
        text = f"{name} is {', '.join(found)}, where no other host can reach it; its address is {own}"
        advice = "let the name lead to that address (/etc/hosts, DNS), or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Finding("host name", Level.WARNING, text, advice, only_for_several=True)
    return _ok("host name", f"{name} is {', '.join(found)}")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding("shared memory", Level.WARNING, f"/dev/shm: {error.strerror}", "mount a tmpfs there")
    text = f"{_size(free)} free in /dev/shm"
    if free < _SHARED_MEMORY:
        advice = "give the container more (docker run --shm-size=8g): a DataLoader with workers needs it, and NCCL"
        return Finding("shared memory", Level.WARNING, text, advice)
    return _ok("shared memory", text)


def _limit(what: str, which: int, least: int, command: str) -> Finding:
    soft, hard = resource.getrlimit(which)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"at most {soft}"
    if soft != resource.RLIM_INFINITY and soft < least:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        return Finding(what, Level.WARNING, text, f"raise it: {command} {most}")
    return _ok(what, text)


def _temporary() -> Finding:
    folder = tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile():
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding("temporary files", Level.FAILURE, f"{folder}: {error.strerror}", "set TMPDIR to another folder")
    text = f"{_size(free)} free in {folder}"
    if free < _DISK:
        return Finding("temporary files", Level.WARNING, text, "make room, or set TMPDIR to another folder")
    return _ok("temporary files", text)


def _locks() -> Finding:
    try:
        fd, path = open_folder()
    except Exception as error:  # `Refused`, or an error of the system
        return Finding("locks", Level.FAILURE, str(error), "agents keep their locks in /tmp or /dev/shm")
    os.close(fd)
    return _ok("locks", path)


def _clock() -> Finding:
    if os.path.exists("/run/systemd/timesync/synchronized"):
        return _ok("clock", "synchronized, says systemd-timesyncd")
    for program in ("chronyd", "ntpd"):
        if any(os.path.exists(f"/run/{folder}{program}.pid") for folder in ("", "chrony/")):
            return _ok("clock", f"{program} runs")
    return _ok("clock", "it cannot be told whether something sets it; only times in messages depend on it")


def _stacks() -> Finding:
    py_spy = shutil.which("py-spy", path=os.pathsep.join([os.path.dirname(sys.executable), *os.get_exec_path()]))
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            scope = int(file.read())
    except (OSError, ValueError):
        scope = 0
    if py_spy is None:
        text = "py-spy is missing, so the stacks of a hung worker are shown only if it can still write them"
        return Finding("stacks", Level.WARNING, text, "pip install py-spy")
    if scope and os.geteuid() != 0:
        text = f"py-spy may not look into workers (kernel.yama.ptrace_scope={scope})"
        advice = "sysctl kernel.yama.ptrace_scope=0, or the capability SYS_PTRACE for the container"
        return Finding("stacks", Level.WARNING, text, advice)
    return _ok("stacks", f"{py_spy}")


def _left_over() -> Finding:
    left = left_alive()
    if not left:
        return _ok("left over", "no process of a killed agent")
    told = "; ".join(shown(process) for process in left[:4])
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    text = f"killed agents have left {len(left)} process{'es' * (len(left) != 1)}: {told}{more}"
    return Finding("left over", Level.WARNING, text, "the next `reknit run` here ends them")


def _size(count: int) -> str:
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count >> 10} KiB"


# ---- where nodes meet ------------------------------------------------------------------------------------------------


def endpoint(host: str, port: int, *, may_be_free: bool) -> Iterator[Finding]:
    """Whether this endpoint can be used from here. `may_be_free`: an agent of the job will listen there, so nothing
    need listen there now if it is this host."""
    what = f"{host}:{port}"
    try:
        found = addresses_of(host, port)
    except (OSError, UnicodeError) as error:
        text = f"{host} cannot be resolved: {getattr(error, 'strerror', None) or error}"
        yield Finding(what, Level.FAILURE, text, "give a name that all nodes can resolve, or an address")
        return
    own = own_address([(host, port)])
    yield _ok(what, f"{host} is {', '.join(found)}; others see this node as {own}")
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
        yield _ok(what, "something listens there")
        return
    except OSError as error:
        why = error.strerror or str(error) or "no answer"
    if not (may_be_free and is_here(host, port)):
        text = f"nothing answers there: {why}"
        if may_be_free:
            advice = "nothing need listen there before a job runs; if one does, open the port in the firewall"
            yield Finding(what, Level.WARNING, text, advice)
        else:
            yield Finding(what, Level.FAILURE, text, "start the store, or open the port in the firewall")
        return
    try:
        with socket.create_server(("", port)):
            yield _ok(what, "the port is free, and an agent of this host can listen there")
    except OSError as error:
        yield Finding(what, Level.FAILURE, f"no agent can listen there: {error.strerror}", "choose another port")


_LOCKS = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("free")
except BlockingIOError:
    print("held")
"""


def shared_folder(path: str) -> Finding:
    """Whether agents can meet in this folder: they write files, and lock them against each other."""
    what = path
    try:
        os.makedirs(path, exist_ok=True)
        fd, name = tempfile.mkstemp(prefix=".reknit-doctor-", dir=path)
    except OSError as error:
        return Finding(what, Level.FAILURE, f"no file can be made there: {error.strerror}", "choose another folder")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        argv, null = [sys.executable, "-c", _LOCKS, name], subprocess.DEVNULL
        done = subprocess.run(argv, check=False, stdin=null, capture_output=True, timeout=_LOCK_S)
        if done.stdout.strip() == b"held":
            return _ok(what, "files can be made and locked, on this host; all nodes must see the same folder")
        text = "a lock does not keep out another process of this host"
    except subprocess.TimeoutExpired:
        text = f"a lock was not answered within {_LOCK_S:g} s"
    except OSError as error:
        text = f"files cannot be locked: {error.strerror}"
    finally:
        os.close(fd)
        os.unlink(name)
    return Finding(what, Level.FAILURE, text, "mount it with locks (NFS: without nolock or local_lock), or use etcd")
