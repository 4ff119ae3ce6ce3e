"""The fork server's side of its socket, without a keeper: what it does with a request that cannot be carried out."""

from __future__ import annotations

from tests.support.alone import run_alone


def test_a_server_that_cannot_fork_says_why_and_goes_on() -> None:
    """A limit on processes fails the round, and not the server."""
    script = """
        import errno, json, os, socket, threading
        from reknit.adapters.keeper.functions import forkserver_main
        from reknit.adapters.keeper.functions.forkserver import LENGTH, SOCKET
        def refuse(): raise OSError(errno.EAGAIN, "")
        os.fork = refuse
        ours, theirs = socket.socketpair()
        os.dup2(theirs.fileno(), SOCKET)
        theirs.close()
        server = forkserver_main.ForkServerProcess(["no.such.module"], 10)
        thread = threading.Thread(target=server.run)
        thread.start()
        for _ in range(2):
            request = json.dumps({"env": {}, "numbers": [1], "has_ticket": False}).encode()
            socket.send_fds(ours, [len(request).to_bytes(LENGTH)], [2])
            ours.sendall(request)
            print(int.from_bytes(ours.recv(LENGTH), signed=True) == -errno.EAGAIN)
        ours.close()
        thread.join()
    """
    assert run_alone(script) == "True\nTrue\n"
