"""`reknit doctor` on several nodes: a worker of each node that tries to reach the workers of all others.

The workers are started by real agents, which have met as the agents of a job do. The worker with rank 0 listens at
MASTER_PORT, as torch's store would. All others say there who they are. They get the addresses under which rank 0 has
seen everybody. Then each connects to each. Every worker prints its findings, one JSON object a line.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from .address import addresses_of

_PATIENCE_S = 20.0
"""Time for the others to come and to answer. Seconds."""
_CONNECT_S = 5.0
_SKEW_S = 2.0
"""Clocks that differ by less are not worth a word. Seconds."""


def main(environ: Mapping[str, str] = os.environ) -> None:
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    master = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    with socket.create_server(("", 0), backlog=size) as own:
        me = {"rank": rank, "name": socket.gethostname(), "port": own.getsockname()[1]}
        lines = _lead(me, size, master) if rank == 0 else _follow(me, master)
        peers = next(lines)
        for peer in peers:
            if peer["rank"] != rank:
                _reach(peer)
        for _ in lines:
            pass  # all have tried: now the listeners may go


def _tell(what: str, level: str, text: str, advice: str = "") -> None:
    print(json.dumps({"what": what, "level": level, "text": text, "advice": advice}), flush=True)


def _lead(me: dict[str, Any], size: int, master: tuple[str, int]) -> Iterator[Any]:
    """Gives the peers, and then waits until all have tried to reach each other."""
    peers, files = [{**me, "address": master[0]}], []
    with socket.create_server(("", master[1]), backlog=size) as server:
        server.settimeout(_PATIENCE_S)
        try:
            while len(peers) < size:
                client, address = server.accept()
                client.settimeout(_PATIENCE_S)
                file = client.makefile("rw")
                files.append(file)
                said, now = json.loads(file.readline()), time.time()
                ahead_s = said.pop("time") - now
                if abs(ahead_s) > _SKEW_S:
                    which = "ahead" if ahead_s > 0 else "behind"
                    text = f"the clock of node {said['name']} is {abs(ahead_s):.1f} s {which}"
                    _tell("clocks", "warning", text, "let NTP set the clocks; only times in messages depend on them")
                peers.append({**said, "address": str(address[0])})
        except TimeoutError:
            _tell("meeting", "failure", f"only {len(peers)} of {size} workers have reached {master[0]}:{master[1]}")
        for file in files:
            _send(file, peers)
        yield peers
        _wait(files)
        for file in files:
            _send(file, [])
    _tell("meeting", "ok", f"{len(peers)} nodes have met at {master[0]}, and worked at one store")


def _follow(me: dict[str, Any], master: tuple[str, int]) -> Iterator[Any]:
    client = _connected(master)
    client.settimeout(3 * _PATIENCE_S)
    file = client.makefile("rw")
    _send(file, {**me, "time": time.time()})
    yield json.loads(file.readline() or "[]")
    _send(file, "done")
    file.readline()


def _connected(master: tuple[str, int]) -> socket.socket:
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return socket.create_connection(master, _CONNECT_S)
        except OSError as error:
            if time.monotonic() >= give_up:
                text = f"rank 0 cannot be reached at {master[0]}:{master[1]}: {error.strerror or error}"
                advice = "open all ports between the nodes; --local-addr names another address of a node"
                _tell("MASTER_ADDR", "failure", text, advice)
                sys.exit(1)
            time.sleep(0.1)


def _send(file: IO[str], what: object) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


def _wait(files: Sequence[IO[str]]) -> None:
    for file in files:
        try:
            file.readline()
        except OSError:
            pass  # it has said why itself


def _reach(peer: Mapping[str, Any]) -> None:
    name, address = peer["name"], peer["address"]
    try:
        socket.create_connection((address, peer["port"]), _CONNECT_S).close()
    except OSError as error:
        text = f"node {name} cannot be reached at {address}:{peer['port']}: {error.strerror or error}"
        _tell(f"to {name}", "failure", text, "open all ports between the nodes")
        return
    _tell(f"to {name}", "ok", f"reached at {address}")
    try:
        found = addresses_of(name)
    except OSError:
        found = []
    if address not in found and name != socket.gethostname():
        seen = f"leads to {', '.join(found)}" if found else "cannot be resolved"
        text = f"the name {name} {seen} here, and not to {address}"
        _tell(f"to {name}", "warning", text, "set GLOO_SOCKET_IFNAME, or mend DNS: gloo may use names")


if __name__ == "__main__":
    main()
