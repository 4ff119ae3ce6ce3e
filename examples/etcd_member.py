"""One member of an etcd cluster that lives as long as one job: the store of a job that must outlive each of its hosts.

    python etcd_member.py --hosts=node0,node1,node2 --port=2379

Start this on three hosts at about the same time. docs/slurm.md has the batch script. The cluster goes on while two of
the three members are there. The agents of the job find it with

    reknit run --rdzv-backend=etcd --rdzv-endpoint=node0:2379,node1:2379,node2:2379 …

1. One line says when the cluster serves. Then this member has written something, so a majority of the members is there.
2. Each start has a fresh folder for its data, on a local disk: below $TMPDIR, or in /tmp. This program removes the
   folder when it is told to end, or if etcd has ended before it kept anything. The folder stays if this program or its
   host dies.
3. A member that has died comes back with its folder: start it with --data-dir=FOLDER and else the same options. A
   folder that --data-dir names is never removed. Without its folder a member cannot come back, and the other two go on
   without it. Never start a member with an empty folder where two members were lost: together with the third, it might
   elect a leader that has forgotten the job.
4. SIGUSR1 and SIGINT end the member at once. After SIGTERM the member serves for --linger seconds more, or until the
   second SIGTERM: Slurm sends SIGTERM to agents and members alike, and agents need their store to the end.
5. etcd never outlives this program: the kernel kills etcd when this program dies, however that happens. It counts the
   thread that has started etcd. So this program has one thread. Linux only.

There is no TLS and no user here: whoever reaches the ports can read and delete what the job has written. The variable
REKNIT_RDZV_SECRET of the agents keeps others from speaking for a node. It does not keep them from deleting.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import http.client
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from math import inf
from time import monotonic

OPTIONS = (
    # A revision that nobody reads any more is forgotten. Without this the beats of the agents would fill the disk.
    "--auto-compaction-mode=periodic",
    "--auto-compaction-retention=5m",
    "--snapshot-count=2000",
    "--max-wals=1",
    "--max-snapshots=1",
    # A leader that is lost is replaced within a second. By default it takes two.
    "--heartbeat-interval=50",
    "--election-timeout=500",
    "--pre-vote=true",
    "--logger=zap",
    "--log-level=error",
)
AT_ONCE = {signal.SIGINT, signal.SIGUSR1}
SIGNALS = {*AT_ONCE, signal.SIGTERM, signal.SIGCHLD}
TRY_S, PAUSE_S, END_S = 1.0, 0.2, 10.0
"""Seconds: how long an attempt to write may take, the pause between two attempts, and how long etcd may take to end."""
QUIET_S = 5.0
"""A member that waits for others says so after so many seconds."""
LISTENS = "0A"
"""The state of a listening socket in /proc/net/tcp."""
PR_SET_PDEATHSIG = 1


def main() -> int:
    options = parsed()
    hosts = options.hosts.split(",")
    names = [options.me] if options.me else [os.environ.get("SLURMD_NODENAME", ""), socket.gethostname()]
    me = next((host for host in hosts if host in names or host.partition(".")[0] in names), None)
    if me is None:
        return refused(
            f"this host is {' or '.join(filter(None, names))}, which is not among {options.hosts}; give --me"
        )
    etcd = shutil.which("etcd")
    if etcd is None:
        return refused("there is no program etcd in PATH")
    version = version_of(etcd)
    if loses_writes(version):
        return refused(f"etcd {version} may lose what it has acknowledged: install 3.4.22, 3.5.6 or a later version")
    try:
        words = of_member(hosts, me, options.port)
    except OSError as e:
        return refused(f"this host's name {me} in --hosts has no address here: {e.strerror}; give addresses")
    try:
        folder = options.data_dir or tempfile.mkdtemp(prefix=f"etcd-{options.token}-")
        os.makedirs(folder, 0o700, exist_ok=True)
    except OSError as e:
        return refused(f"the folder for the data cannot be made: {e.filename}: {e.strerror}; give another --data-dir")
    take_signals()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
    process = subprocess.Popen(
        [etcd, *words, "--initial-cluster-token", options.token, "--data-dir", folder, *OPTIONS],
        env=environment,
        preexec_fn=guard(os.getpid()),  # noqa: PLW1509  # this program has one thread
        start_new_session=True,  # a signal to the group of this program leaves etcd alone
    )
    try:
        places = ",".join(f"{host}:{options.port}" for host in hosts)
        line = f"etcd {version} serves at {places}; this member has its data in {folder}"
        was_told = served(process, [me, *(host for host in hosts if host != me)], options.port, options.linger, line)
    finally:
        ended(process)
    return left(folder, options.data_dir is None, None if was_told else process.returncode)


def left(folder: str, is_fresh: bool, died: int | None) -> int:
    """Remove the folder of a member that has ended, or say what it is good for. Returns the status of this program.
    `is_fresh`: this start has made the folder. `died`: the status of an etcd that has ended by itself."""
    # etcd keeps in its log what it has told other members. A member that has told nothing is not missed.
    has_data = os.path.isdir(os.path.join(folder, "member", "wal"))
    if is_fresh and (died is None or not has_data):
        shutil.rmtree(folder, ignore_errors=True)
    if died is not None:
        advice = f"; to go on with its data, give --data-dir={folder}" if has_data else "; it has kept no data"
        say(f"etcd has ended with status {died}{advice}")
        return 1
    if not is_fresh:
        say(f"etcd has ended; its data stay in {folder}, as --data-dir has named that folder")
    return 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One member of an etcd cluster that lives as long as one job.")
    slurm = [os.environ.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT")]
    parser.add_argument("--hosts", required=True, help="the hosts of all members, separated by commas")
    parser.add_argument("--me", help="which of them this is (default: by its name)")
    parser.add_argument("--port", type=int, default=2379, help="for agents; members use the next one (default: 2379)")
    parser.add_argument(
        "--token", default=".".join(slurm), help="differs between clusters (default: Slurm's job and step)"
    )
    parser.add_argument("--data-dir", help="the folder of a member that comes back (default: a new one)")
    parser.add_argument("--linger", type=float, default=25.0, help="seconds to serve after SIGTERM (default: 25)")
    return parser.parse_args()


# ---- etcd ----


def version_of(etcd: str) -> str:
    told = subprocess.run([etcd, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"etcd Version: (\S+)", told)
    return found[1] if found else "of an unknown version"


def loses_writes(version: str) -> bool:
    """Before 3.4.22, and from 3.5.0 to 3.5.5, a crash could lose writes that etcd had acknowledged."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return () < numbers < (3, 4, 22) or (3, 5) <= numbers < (3, 5, 6)


def of_member(hosts: list[str], me: str, port: int) -> list[str]:
    """The words that say who the members are, and which of them this is."""
    peers = [url(host, port + 1) for host in hosts]
    here = address_of(me)
    words = ["--name", f"m{hosts.index(me)}", "--initial-cluster-state", "new"]
    words += ["--initial-cluster", ",".join(f"m{i}={peer}" for i, peer in enumerate(peers))]
    words += ["--listen-client-urls", url(here, port), "--advertise-client-urls", url(me, port)]
    words += ["--listen-peer-urls", url(here, port + 1), "--initial-advertise-peer-urls", url(me, port + 1)]
    return words


def address_of(host: str) -> str:
    """The address of this host at which etcd is to listen. etcd takes no name."""
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    # Some systems give a host's own name a loopback address, at which no other host finds it. So listen at all.
    return "0.0.0.0" if ipaddress.ip_address(address).is_loopback and address != host else address


def url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def take_signals() -> None:
    """From here on a signal waits until it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)  # the parent may have ignored SIGCHLD: the end of etcd would be unknown


def guard(parent: int) -> Callable[[], None]:
    """What the new process does before it becomes etcd."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def guarded() -> None:
        if prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
            os._exit(1)  # the parent has died before the kernel knew
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    return guarded


# ---- its life ----


def served(process: subprocess.Popen[bytes], hosts: list[str], port: int, linger_s: float, line: str) -> bool:
    """Say the line when the cluster serves, and wait. True: this program was told to end. False: etcd has ended.
    `hosts`: of the members, this one first."""
    serves, ends_at, says_at = False, inf, monotonic() + QUIET_S
    while process.poll() is None:
        if not serves and (serves := listens(process.pid, port) and writes(address_of(hosts[0]), port)):
            say(line)
        if not serves and monotonic() > says_at:
            says_at = inf
            say(waiting(hosts, port))
        left_s = min(ends_at - monotonic(), 3600.0 if serves else PAUSE_S)
        told = signal.sigtimedwait(SIGNALS, max(0.0, left_s))
        number = told.si_signo if told else None
        if monotonic() >= ends_at or number in AT_ONCE or (number == signal.SIGTERM and ends_at < inf):
            return True
        if number == signal.SIGTERM:
            ends_at = monotonic() + linger_s
    return ends_at < inf


def waiting(hosts: list[str], port: int) -> str:
    """What a member waits for that does not serve yet."""
    line = f"this member waits for a majority: {len(hosts) // 2 + 1} of {len(hosts)} members must be there"
    missing = ", ".join(f"{host}:{port + 1}" for host in hosts[1:] if not accepts(host, port + 1))
    if not missing:
        return line + "; all ports are open, so look whether --hosts, --port and --token are the same on all hosts"
    return line + f"; nobody answers at {missing}"


def accepts(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), TRY_S):
            return True
    except OSError:
        return False


def listens(pid: int, port: int) -> bool:
    """The process listens at the port. Otherwise the etcd of somebody else may answer there."""
    sockets = set[str]()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            rows = [row.split() for row in file.readlines()[1:]]
            sockets |= {f"socket:[{r[9]}]" for r in rows if r[3] == LISTENS and r[1].endswith(f":{port:04X}")}
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(entry.path) in sockets:
                    return True
    return False


def writes(address: str, port: int) -> bool:
    """A write was acknowledged. So a majority of the members is there."""
    key = base64.b64encode(b"/etcd_member").decode()
    connection = http.client.HTTPConnection(address, port, timeout=TRY_S)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v3/kv/put", json.dumps({"key": key}))
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False


def ended(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def refused(why: str) -> int:
    say(why)
    return 2


def say(line: str) -> None:
    print(f"etcd_member: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
