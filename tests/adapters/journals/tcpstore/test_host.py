"""Which agent hosts the store is found out by trying. The server's process lives as long as its agent wants."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from reknit.adapters.journals.tcpstore import host as host_module
from reknit.adapters.journals.tcpstore.client import StoreClient
from reknit.adapters.journals.tcpstore.host import host_store
from reknit.adapters.runtime.ports import Refused
from reknit.core.job.reasons import Refusal
from tests.support.alone import ENV, ROOT, command, run_alone
from tests.support.stores import HOST, free_port, hosted, needs_torch
from tests.support.waiting import PATIENCE_S, is_alive, until


def test_the_first_at_an_endpoint_of_this_host_serves_and_the_next_does_not() -> None:
    """Two stores would be two jobs."""
    with hosted() as (_, port):
        assert host_store(HOST, port) is None
        assert host_store("localhost", port) is None, "nor by another name of this host"
        client = StoreClient("localhost", port, PATIENCE_S)
        client.close()


def test_a_port_that_somebody_listens_on_is_left_alone() -> None:
    """A store that torchrun, or the operator, has started already serves as well."""
    with socket.create_server((HOST, 0)) as other:
        assert host_store(HOST, other.getsockname()[1]) is None


def test_a_port_that_is_taken_and_serves_nobody_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent at the same point, or a connection's own port: two that each took the other for the host would both
    wait for it until they give up."""
    with socket.socket() as other:
        other.bind((HOST, 0))
        monkeypatch.setattr(host_module.time, "sleep", lambda _: other.close())
        host = host_store(HOST, other.getsockname()[1])
    assert host is not None
    host.close()


@pytest.mark.parametrize("name", ["x" * 64 + ".invalid", "192.0.2.1"])
def test_an_endpoint_that_is_not_here_is_not_hosted(name: str) -> None:
    """A name that cannot be resolved yet, or another host's address, with nobody there."""
    assert host_store(name, free_port()) is None


def test_another_hosts_store_is_seen_before_a_listener_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case on every node but one: it must be quick, and leave no trace."""
    monkeypatch.setattr(host_module, "_is_ours", lambda *_: False)
    monkeypatch.setattr(host_module, "_listening", lambda *_: pytest.fail("made a listener"))
    with socket.create_server((HOST, 0)) as other:
        assert host_store(HOST, other.getsockname()[1]) is None


def test_an_address_of_no_interface_that_leads_here_is_hosted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NAT, and the virtual address of a service: the bind fails, and the nonce arrives."""
    monkeypatch.setattr(host_module, "_is_ours", lambda *_: False)
    with hosted() as (host, port):
        StoreClient(HOST, port, PATIENCE_S).close()
        assert host.failure() is None


def test_a_connection_that_comes_out_elsewhere_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own listener is not the endpoint's if somebody else answers there."""
    monkeypatch.setattr(host_module, "PROOF_S", 0.05)
    with socket.create_server((HOST, 0)) as elsewhere, host_module._listening(free_port()) as ours:
        assert not host_module._arrives(ours, HOST, elsewhere.getsockname()[1])


def test_early_clients_do_not_disturb_the_proof() -> None:
    """Some say something, some nothing, some are gone again; they try again later."""
    port = free_port()
    with host_module._listening(port) as listener, ExitStack() as stack:
        talking, silent, gone = (stack.enter_context(socket.create_connection((HOST, port))) for _ in range(3))
        talking.sendall(b"hello")
        gone.close()
        assert host_module._arrives(listener, HOST, port)
        for early in (talking, silent):
            early.settimeout(PATIENCE_S)
            try:
                assert early.recv(1) == b""
            except ConnectionResetError:
                pass  # says the same


def test_a_host_that_stood_still_while_it_found_out_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another agent of this host has seen the port in use meanwhile, and takes this one for the host. If this one gives
    up as well, all nodes wait for a store that nobody hosts."""
    real, answers = host_module._arrives, iter([False, False])
    monkeypatch.setattr(host_module, "CONTEST_S", 0.0)
    monkeypatch.setattr(host_module, "_arrives", lambda *given: next(answers, None) is None and real(*given))
    host = host_store(HOST, free_port())
    assert host is not None
    host.close()


def test_is_host_decides_without_a_proof() -> None:
    """`--rdzv-conf is_host=…`, as with torchrun: who says it knows the network better."""
    needs_torch()
    port = free_port()
    assert host_store(HOST, port, must=False) is None
    host = host_store("x" * 64 + ".invalid", port, must=True)
    assert host is not None
    StoreClient(HOST, port, PATIENCE_S).close()
    with pytest.raises(Refused, match=rf"^cannot host the store at 127\.0\.0\.1:{port}: address already in use$") as e:
        host_store(HOST, port, must=True)
    assert e.value.refusal is Refusal.SETUP
    host.close()


def test_a_server_that_ended_says_how() -> None:
    """ "Connection refused" does not tell the operator that the kernel was short of memory."""
    with hosted() as (host, _):
        assert host.failure() is None
        os.kill(host.pid, signal.SIGKILL)
        why = until(host.failure)
    assert why == f"the store's server (process {host.pid}) ended with SIGKILL"


def test_closing_ends_it_and_frees_the_port() -> None:
    """The next job may use the same endpoint."""
    with hosted() as (host, port):
        StoreClient(HOST, port, PATIENCE_S).close()
        host.close()
        assert not is_alive(host.pid)
        with pytest.raises(ChildProcessError):
            os.waitpid(host.pid, 0)
        again = host_store(HOST, port)
        assert again is not None
        again.close()
        host.close()


def test_it_outlives_all_that_is_swept() -> None:
    """Whatever else is a child of the agent was left behind by workers, and is killed; not the store of all agents."""
    needs_torch()
    script = """
        from reknit.adapters.host.children import become_subreaper, children, sweep
        from reknit.adapters.journals.tcpstore.client import StoreClient
        from tests.support.stores import hosted
        from tests.support.processes import *
        assert become_subreaper()
        clock = SystemClock()
        with hosted() as (host, port):
            client = StoreClient("127.0.0.1", port, 60.0)
            assert client.add("n", 1) == 1
            client.close()
            sleeper = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
            assert sweep(60.0, [host.pid]) == ()
            assert children() == [host.pid], children()
        assert children() == []
        clock.close()
        print("clean")
    """
    assert run_alone(script) == "clean\n"


def test_a_dead_store_is_reported_by_its_host_and_not_reaped_by_others() -> None:
    """Who looks for strays must not take its exit status away."""
    needs_torch()
    script = """
        from reknit.adapters.host.children import become_subreaper, sweep
        from tests.support.stores import hosted
        from tests.support.processes import *
        assert become_subreaper()
        clock = SystemClock()
        with hosted() as (host, _):
            os.kill(host.pid, signal.SIGTERM)  # of no effect, even in its first moment
            os.kill(host.pid, signal.SIGBUS)
            until(lambda: not is_alive(host.pid))
            sweep(60.0, [host.pid])
            print(host.failure().split()[-1])
        clock.close()
    """
    assert run_alone(script) == "SIGBUS\n"


def test_a_fork_of_the_agent_does_not_keep_the_store_alive(tmp_path: Path) -> None:
    """A data loader of a killed program may live for long. The next agent must find the endpoint free."""
    needs_torch()
    script = """
        import sys
        from tests.support.stores import hosted
        from tests.support.processes import *
        with hosted() as (host, port):
            if os.fork() == 0:
                signal.pause()
            print(host.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    with subprocess.Popen(command(script), env=ENV, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True) as agent:
        assert agent.stdout is not None
        server = int(agent.stdout.readline())
        try:
            until(lambda: not is_alive(server), "the end of the store's server")
        finally:
            os.killpg(agent.pid, signal.SIGKILL)


def test_a_server_that_cannot_serve_says_why_before_its_connections_break(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the operator first reads of a broken connection, and of an outage that is to be waited for."""
    (tmp_path / "torch.py").write_text("raise ImportError('not here')")
    monkeypatch.setattr(host_module.os, "waitpid", lambda *_: (0, 0))  # as if the server could not be reaped yet
    host = host_store(HOST, free_port(), env={**ENV, "PYTHONPATH": str(tmp_path)})
    assert host is not None
    assert until(host.failure) == "torch is needed to host the store (--rdzv-backend=c10d): not here"
    monkeypatch.undo()
    host.close()
    assert not is_alive(host.pid)
