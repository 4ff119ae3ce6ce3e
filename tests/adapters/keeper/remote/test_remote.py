"""A keeper behind a command that stands for ssh: in another process tree, and in another network."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from reknit.adapters.keeper.client.start import Keeping, Start, paths
from reknit.adapters.keeper.process import boot
from reknit.adapters.keeper.protocol.wire import Configure, Output
from reknit.adapters.keeper.remote import pings
from reknit.adapters.keeper.remote.command import by_command
from reknit.adapters.keeper.remote.far_output import LARGEST_RECORD, WINDOW
from reknit.core.agent.worker_words import StartWorkers, WorkersExited
from tests.support.command import REKNIT
from tests.support.keepers import SLEEP, Kept, wait_gone, worker_pids
from tests.support.processes import assignment
from tests.support.waiting import until

Keep = Callable[..., Kept]
BANNER = ["sh", "-c", 'echo Welcome; echo "{}"; exec "$@"', "sh"]
ELSEWHERE = [
    sys.executable,
    "-c",
    """
import os, subprocess, sys, threading
into, out = os.pipe(), os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        subprocess.Popen(sys.argv[1:], stdin=into[0], stdout=out[1])
    os._exit(0)
os.wait(); os.close(into[0]); os.close(out[1])
def relay(source, sink):
    try:
        while data := os.read(source, 65536):
            while data: data = data[os.write(sink, data):]
    except OSError: pass
    os.close(sink)
threading.Thread(target=relay, args=(0, into[1]), daemon=True).start()
relay(out[0], 1)
os._exit(0)
""",
]
"""Like a server on another host: the keeper is no descendant of the command, and both talk through a relay."""
NETWORK = ["unshare", "-n", "--"]


def behind(prefix: list[str], *python: str) -> Start:
    program = python or ("-I", "-S", boot.__file__)
    return lambda: by_command([*prefix, sys.executable, *program, os.pathsep.join(paths()), "-", "0", "-"])


@pytest.mark.parametrize("prefix", [BANNER, ELSEWHERE, NETWORK], ids=["banner", "elsewhere", "network"])
def test_a_keeper_behind_a_command_does_all_that_a_local_one_does(
    keep: Keep, tmp_path: Path, prefix: list[str]
) -> None:
    """One agent, many hosts: start, output in order, exits, stop, and nothing left."""
    if prefix is NETWORK and subprocess.run([*NETWORK, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here: unshare is not permitted")
    script = f'for i in $(seq 500); do echo "$LOCAL_RANK-$i-"; done; readlink /proc/self/ns/net; {SLEEP}'
    kept = keep("sh", "-c", script, str(tmp_path / "pids"), how=behind(prefix), is_remote=True, pings=True)
    kept.ready()
    kept.run(2)
    pids = worker_pids(tmp_path / "pids", 2)
    shown = kept.flushed().splitlines()
    for rank in ("0", "1"):
        assert [line for line in shown if line.startswith(f"{rank}-")] == [f"{rank}-{i}-" for i in range(1, 501)]
    assert (os.readlink("/proc/self/ns/net") in shown) is (prefix is not NETWORK)
    assert kept.stop().stuck == ()
    kept.run(2, 1)
    kept.close()
    wait_gone(pids, kept.mark)


def test_the_verb_that_ssh_runs(keep: Keep) -> None:
    """`ssh host reknit keeper` needs nothing but an installed reknit on that host."""
    kept = keep("echo", "here", how=lambda: by_command([*BANNER, REKNIT, "keeper"]), is_remote=True)
    kept.ready()
    kept.run()
    kept.drive_until(lambda: any(isinstance(event, WorkersExited) for event in kept.seen))
    assert kept.flushed() == "here\n"


def test_a_cut_connection_ends_the_workers_and_a_new_one_is_made(keep: Keep, tmp_path: Path) -> None:
    """The network is gone for a moment: the far keeper finds the end of its stream, and ends what it holds."""
    kept = keep("sh", "-c", SLEEP, str(tmp_path / "pids"), how=behind(ELSEWHERE), is_remote=True)
    kept.ready()
    kept.run(2)
    pids = worker_pids(tmp_path / "pids", 2)
    os.kill(kept.pid, signal.SIGKILL)
    kept.drive(WorkersExited)
    assert kept.stop().port
    wait_gone(pids, kept.mark if kept.pid == 0 else "")


def test_a_flood_does_not_delay_a_stop(keep: Keep) -> None:
    """Commands and events go before output, or a worker that prints too much could not be ended."""
    kept = keep("yes", how=behind(BANNER), is_remote=True)
    kept.ready()
    kept.run(2)
    kept.drive_until(lambda: kept.console.stat().st_size > 100_000)
    assert kept.stop().stuck == ()


def test_a_worker_behind_a_command_may_write_more_than_the_window(keep: Keep) -> None:
    """The agent sleeps until something comes. It must allow more output when output has come, because nothing else may
    come before the worker has ended."""
    size = 4 * WINDOW * LARGEST_RECORD
    kept = keep("sh", "-c", f"yes | head -c {size}", how=behind(BANNER), is_remote=True)
    kept.ready()
    kept.run()
    kept.drive(WorkersExited)
    assert len(kept.flushed()) == size


def test_output_that_may_not_be_sent_yet_costs_nothing() -> None:
    """An agent whose console nobody reads grants no further output. The keeper must sleep meanwhile, not spin."""
    keeping = behind(BANNER)()
    keeper = psutil.Process(keeping.pid)
    keeping.stream.send(Configure(argv=("yes",), run_id="job"))
    keeping.stream.send(StartWorkers(0, assignment(1)))
    records = 0

    def has_sent_all() -> bool:
        nonlocal records
        records += sum(isinstance(message, Output) for message in keeping.stream.receive(0.0))
        return records >= WINDOW

    until(has_sent_all)
    until(lambda: all(keeper.status() == psutil.STATUS_SLEEPING for _ in range(100)), "sleep")
    keeping.stream.receive(0.0)
    assert records == WINDOW
    keeping.stream.close()
    os.close(keeping.fd)
    assert os.waitpid(keeping.pid, 0)[1] == 0


def test_silence_ends_both_sides(keep: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl exec` does not end the stream when the connection is gone; only silence tells."""
    hasty = tmp_path / "hasty.py"
    hasty.write_text(
        "import sys; sys.path += sys.argv[1].split(':')\n"
        "from reknit.adapters.keeper.process import boot\n"
        "from reknit.adapters.keeper.remote import pings\n"
        "pings.SILENCE_S = pings.PING_S = 1.0\nboot.main()\n"
    )
    started: list[Keeping] = []

    def start() -> Keeping:
        started.append(behind(BANNER, "-I", "-S", str(hasty))())
        return started[-1]

    kept = keep("sh", "-c", SLEEP, str(tmp_path / "pids"), how=start, is_remote=True, pings=True)
    kept.ready()
    kept.run(2)
    pids = worker_pids(tmp_path / "pids", 2)
    wait_gone(pids)  # nothing drives the client: it is silent
    monkeypatch.setattr(pings, "SILENCE_S", 1.0)
    kept.drive_until(lambda: kept.said)
    kept.run(2, 1)
    os.kill(kept.pid, signal.SIGSTOP)
    kept.drive_until(lambda: len(kept.said) == 2)
    assert "nothing was heard of it for 1 s" in kept.said[1]
    until(lambda: len(started) == 3)
