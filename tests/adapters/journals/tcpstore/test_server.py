"""The program that serves torch's store: started as in production, and asked by torch's own client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from reknit.adapters.journals.tcpstore import server
from reknit.adapters.journals.tcpstore.client import StoreClient
from tests.support.alone import ENV, ROOT, command, run_alone
from tests.support.stores import HOST, free_port, hosted
from tests.support.waiting import PATIENCE_S, is_alive, until


@pytest.mark.beside_torch
def test_torchs_own_client_speaks_to_it_and_sees_what_we_wrote() -> None:
    """It is the real store: what works with torch's must work with ours, and the reverse."""
    with hosted() as (_, port):
        client = StoreClient(HOST, port, PATIENCE_S)
        client.set("from-us", b"hello")
        script = """
            import sys
            from datetime import timedelta
            from torch.distributed import TCPStore
            store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=60))
            store.set("from-torch", "good day")
            print(store.get("from-us").decode(), store.add("sum", 2), store.check(["missing"]))
        """
        assert run_alone(script, str(port)) == "hello 2 False\n"
        assert client.get("from-torch") == b"good day"
        assert client.add("sum", 3) == 5
        client.close()


def test_it_ends_with_the_agent_however_that_ends() -> None:
    """A store left behind would hold the port, and answer the next job with the old one's journal."""
    port = free_port()
    script = """
        import sys
        from reknit.adapters.journals.tcpstore.host import host_store
        host = host_store("127.0.0.1", int(sys.argv[1]))
        print(host.pid, flush=True)
        sys.stdin.read()
    """
    agent = subprocess.Popen(
        command(script, str(port)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV, cwd=ROOT
    )
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    assert is_alive(pid)
    agent.kill()
    agent.communicate()
    until(lambda: not is_alive(pid), "the server to end")


def test_signals_that_are_meant_for_the_job_do_not_end_it() -> None:
    """Schedulers signal every process; the agents need the store for an end in good order."""
    with hosted() as (host, port):
        client = StoreClient(HOST, port, PATIENCE_S)  # it serves, so it is past its first lines
        assert os.getpgid(host.pid) == host.pid, "and a Ctrl-C does not even reach it"
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(host.pid, signum)
        assert client.add("n", 1) == 1
        assert host.failure() is None
        client.close()


def test_who_comes_before_it_serves_waits_for_it() -> None:
    """All nodes of a job are started at once, and the store takes a while to load."""
    with hosted() as (_, port):
        clients = [StoreClient(HOST, port, PATIENCE_S) for _ in range(20)]
        assert [client.add("n", 1) for client in clients] == list(range(1, 21))
        for client in clients:
            client.close()


@pytest.mark.slow
def test_without_the_quick_way_it_takes_the_public_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of torch may want more than its extension module."""
    (tmp_path / "sitecustomize.py").write_text("import importlib.machinery as m\nm.EXTENSION_SUFFIXES = []\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with hosted() as (host, port):
        client = StoreClient(HOST, port, PATIENCE_S)
        assert client.add("n", 1) == 1
        with open(f"/proc/{host.pid}/cmdline") as file:
            assert file.read().split("\0")[-2] == server._PUBLIC
        client.close()


def test_without_torch_it_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosting is the one thing that an agent needs torch for, and the operator does not know that."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(bare))
    with hosted() as (host, _):
        why = until(host.failure)
    assert why == "torch is needed to host the store (--rdzv-backend=c10d): No module named 'torch'"


def test_a_name_server_is_not_asked_about_those_who_connect() -> None:
    """torch looks every one up, in the thread that serves all; a name server that is silent would stop the store."""
    out = run_alone(
        """
        import socket
        from reknit.adapters.journals.tcpstore import server
        server._ask_no_name_server()
        try:
            socket.gethostbyaddr("192.0.2.1")
        except socket.herror as error:
            print(error.errno)
        """
    )
    assert out == "0\n", "a name server says 1 (no such host) or, by its silence, 2"
