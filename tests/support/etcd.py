"""Real etcd servers on loopback, one or a cluster: started, stopped, killed and started again."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self, TypeVar
from unittest.mock import patch

import pytest

from reknit.adapters.journals.etcd.gateway import Cluster, Gateway, KeyValue, KeyWatch, below
from reknit.adapters.journals.etcd.journal import EtcdJournal
from reknit.adapters.runtime.ports import Unavailable
from tests.support.waiting import PATIENCE_S, until

T = TypeVar("T")


class _Served:
    """An etcd that serves within a `with`."""

    def start(self) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Etcd(_Served):
    """One etcd server. `with Etcd(tmp_path) as server: … server.endpoints`"""

    def __init__(
        self, path: Path, name: str = "etcd", *, tls: tuple[str, str] | None = None, options: Sequence[str] = ()
    ) -> None:
        """`path`: the folder of all its files. `tls`: the certificate and key that server and clients use (see
        `make_certificate`). A client without them is refused. None: no TLS. `options`: more words of the command."""
        self.data = path / name
        self._log = path / f"{name}.log"
        self.name = name
        self._tls = tls
        self._options = options
        # These sockets are bound and do not listen. etcd can bind their ports as well, and no other process can.
        self._reserved = [_reserved(), _reserved()]
        self.port, self.peer_port = (s.getsockname()[1] for s in self._reserved)
        self.endpoints = [("127.0.0.1", self.port)]
        self._process: subprocess.Popen[bytes] | None = None
        self._has_users = False

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    def start(self, cluster: Sequence[Etcd] = ()) -> None:
        """Start the server. Returns at once: see `wait`."""
        program = shutil.which("etcd")
        if program is None:
            pytest.skip("etcd is not installed")
        url = f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"
        members = ",".join(f"{m.name}={m.peer_url}" for m in cluster or [self])
        arguments = ["--name", self.name, "--data-dir", str(self.data)]
        arguments += ["--listen-client-urls", url, "--advertise-client-urls", url]
        arguments += ["--listen-peer-urls", self.peer_url, "--initial-advertise-peer-urls", self.peer_url]
        arguments += ["--initial-cluster", members, "--logger", "zap", "--log-level", "warn", *self._options]
        if self._tls:
            certificate, key = self._tls
            arguments += ["--cert-file", certificate, "--key-file", key]
            arguments += ["--client-cert-auth", "--trusted-ca-file", certificate]
        # With setpriv (util-linux), the server dies with the run of the tests, even if that is killed.
        guard = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen([*guard, program, *arguments], stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Wait until the server answers, which includes that its cluster has a leader."""
        until(self._serves, f"etcd, see {self._log}")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Stop the process. Until `cont` the server answers nothing, and keeps its connections."""
        self._signal(signal.SIGSTOP)
        until(self._is_stopped, "etcd to stop")

    def cont(self) -> None:
        self._signal(signal.SIGCONT)

    def post(self, path: str, data: object) -> Any:
        """Ask the gateway. `path`: for example "/v3/kv/range". Raises OSError if the server does not answer."""
        token = ""
        if self._has_users:  # each time anew, because tokens may expire
            root = json.dumps({"name": "root", "password": "root"})
            token = self._ask("POST", "/v3/auth/authenticate", root)["token"]
        return self._ask("POST", path, json.dumps(data), token)

    def revision(self) -> int:
        return int(self.post("/v3/kv/range", {"key": "AA=="})["header"]["revision"])

    def add_user(self, name: str, password: str, *prefixes: str) -> None:
        """A user that may read and write all keys with these prefixes."""
        self.post("/v3/auth/user/add", {"name": name, "password": password})
        self.post("/v3/auth/role/add", {"name": name})
        self.post("/v3/auth/user/grant", {"user": name, "role": name})
        for prefix in prefixes:
            self.grant(name, prefix)

    def grant(self, role: str, prefix: str, kind: str = "READWRITE") -> None:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        keys = {"key": b64encode(prefix.encode()).decode(), "range_end": b64encode(end.encode()).decode()}
        self.post("/v3/auth/role/grant", {"name": role, "perm": {"permType": kind, **keys}})

    def ask_for_users(self) -> None:
        """Turn authentication on. From now on `post` asks as root."""
        self.add_user("root", "root")
        self.post("/v3/auth/enable", {})
        self._has_users = True

    def compact(self) -> None:
        """Have the server forget all history (compaction)."""
        self.post("/v3/kv/compaction", {"revision": self.revision(), "physical": True})

    def defragment(self) -> None:
        """Have the server give back the space of what it has forgotten. Meanwhile it answers nothing."""
        self.post("/v3/maintenance/defragment", {})

    def close(self) -> None:
        self.kill()
        for reserved in self._reserved:
            reserved.close()

    def _signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _is_stopped(self) -> bool:
        assert self._process is not None
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def _serves(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()
        try:
            return bool(self._ask("GET", "/health", "")["health"] == "true")
        except (OSError, http.client.HTTPException, KeyError):
            return False

    def _ask(self, method: str, path: str, body: str, token: str = "") -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        if self._tls:
            context = ssl.create_default_context(cafile=self._tls[0])
            context.load_cert_chain(*self._tls)
            connection = http.client.HTTPSConnection("127.0.0.1", self.port, timeout=10, context=context)
        try:
            connection.request(method, path, body, {"Authorization": token} if token else {})
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()


class EtcdCluster(_Served):
    """A cluster of `size` servers, named by their index."""

    def __init__(self, path: Path, size: int = 3) -> None:
        self.members = [Etcd(path, f"etcd{i}") for i in range(size)]
        self.endpoints = [endpoint for member in self.members for endpoint in member.endpoints]

    def start(self) -> None:
        for member in self.members:
            member.start(self.members)

    def wait(self) -> None:
        for member in self.members:
            member.wait()

    def leader(self) -> int:
        """Wait for a leader that answers. Returns its index."""

        def leading() -> list[int]:
            return [i for i, member in enumerate(self.members) if _leads(member)]

        return until(leading, "a leader")[0]

    def kill(self, i: int) -> None:
        self.members[i].kill()

    def revive(self, i: int) -> None:
        """Start this server again, with its data. Returns when it serves."""
        self.members[i].start(self.members)
        self.members[i].wait()

    def stop(self, i: int) -> None:
        self.members[i].stop()

    def cont(self, i: int) -> None:
        self.members[i].cont()

    def close(self) -> None:
        for member in self.members:
            member.close()


def make_certificate(path: Path, subject: str = "/CN=etcd") -> tuple[str, str]:
    """Make two files: a certificate that signs itself, and its key. Authority, server and client all use them."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    certificate, key = str(path / "certificate.pem"), str(path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", subject, "-days", "2", "-keyout", key, "-out", certificate]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "extendedKeyUsage=serverAuth,clientAuth"]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def _leads(member: Etcd) -> bool:
    try:
        status = member.post("/v3/maintenance/status", {})
    except (OSError, http.client.HTTPException):
        return False
    return bool(status.get("leader", "0") == status["header"]["member_id"])


def _reserved() -> socket.socket:
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def change(server: Etcd, *operations: dict[str, Any]) -> None:
    """Change keys behind the journal's back."""
    with closing(Gateway(Cluster(server.endpoints), 30.0)) as gateway:
        gateway.transact([], operations, [])


def delete(key: str) -> dict[str, Any]:
    return {"request_delete_range": {"key": b64encode(key.encode()).decode()}}


def there(server: Etcd, prefix: str) -> list[KeyValue]:
    """The keys that begin with the prefix, in the order in which they were put first."""
    with closing(Gateway(Cluster(server.endpoints), 30.0)) as gateway:
        found = gateway.transact([], [below(prefix)], []).ranges[0].found
    return sorted(found, key=lambda key: key.created)


def patiently(call: Callable[..., T], *args: Any) -> T:
    """Repeat the call while the store cannot be reached, as the link does."""
    give_up = monotonic() + PATIENCE_S
    while True:
        try:
            return call(*args)
        except Unavailable:
            if monotonic() > give_up:
                raise


@contextmanager
def watches() -> Iterator[list[KeyWatch]]:
    """The watches that the journals of this process open within the `with`, in this order."""
    watch, opened = Gateway.watch, list[KeyWatch]()

    def noting(gateway: Gateway, prefix: str, revision: int) -> KeyWatch | None:
        found = watch(gateway, prefix, revision)
        opened.extend([found] if found is not None else [])
        return found

    with patch.object(Gateway, "watch", noting):
        yield opened


def watch_of(journal: EtcdJournal, position: int = 0) -> KeyWatch:
    """Wait until the journal has opened a watch, with nothing to read after `position`. Returns the watch."""

    with watches() as opened:
        until(lambda: (patiently(journal.read, position, 0.05), opened)[1], "a watch")
    return opened[-1]
