"""How several nodes meet: `--rdzv-…` and what belongs to it, judged. Read only if there may be several.

Agents of a job must agree on its `Terms`, so these are made of nothing but what users give alike on all nodes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from reknit.core.entries import Admission, RestartPolicy, Terms
from reknit.core.values import frozen

from .config import as_seconds, number_of, seconds_of
from .options import Parsed, UsageError

_PORTS = {"c10d": 29400, "etcd": 2379}
_TERMS = ("join_timeout", "last_call_timeout", "heartbeat", "keep_alive_interval", "keep_alive_max_attempt", "settle")
_CERTIFICATES = ("ca_cert", "ssl_cert", "ssl_cert_key")
_USED = {
    "static": (*_TERMS, "is_host"),
    "c10d": (*_TERMS, "is_host", "store_type"),
    "file": _TERMS,
    "etcd": (*_TERMS, "protocol", *_CERTIFICATES),
}
"""Keys of --rdzv-conf that do something."""
_OTHER_NAMES = {
    "heartbeat_timeout": "heartbeat",
    "cacert": "ca_cert",
    "cert": "ssl_cert",
    "key": "ssl_cert_key",
}
"""torchelastic has both."""
_NAMES = ("rdzv-id", "rdzv-secret", "master-addr", "node-rank", "node-id", "local-addr", "fence-after")
_TRUE, _FALSE = ("1", "true", "t", "yes", "y"), ("0", "false", "f", "no", "n")
_LEAST_HEARTBEAT_S = 0.5
_LONGEST_NAME = 1000
"""torch's server hangs up on a key of 8 KiB, whoever asks for it."""


@frozen
class Rendezvous:
    backend: str
    """c10d, file or etcd. static is c10d with a fixed number of nodes."""
    job: str
    terms: Terms
    store_timeout_s: float
    endpoints: tuple[tuple[str, int], ...] = ()
    """c10d: one; file: none."""
    folder: str = ""
    secret: str = ""
    node_id: str = ""
    """Empty: the host's name."""
    address: str = ""
    """Empty: to be found out."""
    rank_hint: int | None = None
    is_host: bool | None = None
    """Whether this agent must, or must not, host the store. None: it tries."""
    protocol: str = "http"
    ca_cert: str | None = None
    ssl_cert: str | None = None
    ssl_cert_key: str | None = None
    notices: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where the nodes meet, as one text."""
        hosts = (f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.endpoints)
        return f"{self.backend}://{self.folder or ','.join(hosts)}"


def rendezvous(
    parsed: Parsed, environ: Mapping[str, str], nodes: tuple[int, int], restarts: RestartPolicy
) -> Rendezvous:
    """`nodes`: the least and the most. Raises `UsageError`."""
    for name in _NAMES:
        if name in parsed.given and not parsed[name]:
            raise UsageError(f"{parsed.given[name]} is empty: an unset variable?")
        if len(parsed[name].encode(errors="surrogatepass")) > _LONGEST_NAME:
            raise UsageError(f"{parsed.given[name]}: at most {_LONGEST_NAME} bytes")
    asked = _backend(parsed)
    conf = _Conf(parsed)
    store_type = conf.one_of("store_type", ("", "tcp", "file")) if asked == "c10d" else ""
    backend = "file" if store_type == "file" else "c10d" if asked == "static" else asked
    terms = _terms(parsed, conf, nodes, restarts, is_static=asked == "static")
    return Rendezvous(
        backend=backend,
        job=_job(parsed, backend),
        terms=terms,
        store_timeout_s=seconds_of(parsed, "store-timeout"),
        endpoints=_endpoints(parsed, asked) if backend != "file" else (),
        folder=_folder(parsed) if backend == "file" else "",
        secret=parsed["rdzv-secret"] or environ.get("REKNIT_RDZV_SECRET", ""),
        node_id=parsed["node-id"],
        address=parsed["local-addr"].strip("[]"),
        rank_hint=_rank_hint(parsed, terms, is_static=asked == "static"),
        is_host=conf.truth("is_host") if asked in ("c10d", "static") else None,
        **(_security(conf) if asked == "etcd" else {}),
        notices=_notices(parsed, conf, nodes, asked),
    )


class _Conf:
    """`--rdzv-conf`, and how to name what is wrong in it."""

    def __init__(self, parsed: Parsed) -> None:
        self.flag = parsed.given.get("rdzv-conf", "--rdzv-conf")
        self.values: dict[str, str] = {}
        for item in filter(None, (item.strip() for item in parsed["rdzv-conf"].split(","))):
            key, _, value = (word.strip() for word in item.partition("="))
            if not (key and value):
                raise UsageError(f"{self.flag}: {item}: KEY=VALUE expected")
            self.values[_OTHER_NAMES.get(key, key)] = value

    def spelled(self, key: str) -> str:
        return f"{self.flag}: {key}={self.values[key]}"

    def seconds(self, key: str, default: float) -> float:
        return as_seconds(self.values[key], self.spelled(key)) if key in self.values else default

    def one_of(self, key: str, choices: tuple[str, ...]) -> str:
        """The first is the default."""
        value = self.values.get(key, choices[0])
        if value not in choices:
            raise UsageError(f"{self.spelled(key)}: {' or '.join(filter(None, choices))}")
        return value

    def truth(self, key: str) -> bool | None:
        value = self.values.get(key)
        if value is None:
            return None
        if value.lower() not in _TRUE + _FALSE:
            raise UsageError(f"{self.spelled(key)}: true or false")
        return value.lower() in _TRUE


# ---- where ----


def _backend(parsed: Parsed) -> str:
    backend = parsed["rdzv-backend"]
    if backend == "etcd-v2":
        raise UsageError(f"{parsed.spelled('rdzv-backend')}: etcd has no such API since its version 3.6; use etcd")
    if backend not in _USED:
        raise UsageError(f"{parsed.spelled('rdzv-backend')}: static, c10d, file or etcd")
    return backend


def _job(parsed: Parsed, backend: str) -> str:
    if not parsed["rdzv-id"] and backend != "c10d":
        raise UsageError(
            f"--rdzv-backend={backend} needs --rdzv-id: the journal of a job without a name would be reused"
        )
    return parsed["rdzv-id"] or "none"


def _folder(parsed: Parsed) -> str:
    folder = parsed["rdzv-endpoint"]
    if not folder:
        raise UsageError("--rdzv-backend=file needs --rdzv-endpoint=FOLDER, on a file system that all nodes share")
    return os.path.abspath(folder)


def _endpoints(parsed: Parsed, backend: str) -> tuple[tuple[str, int], ...]:
    text, spelled = parsed["rdzv-endpoint"].strip(), parsed.spelled("rdzv-endpoint")
    if backend == "etcd" and text:
        return tuple(_endpoint(part, _PORTS["etcd"], spelled) for part in text.split(","))
    if backend == "static":
        port = _port(parsed["master-port"], parsed.spelled("master-port"))
        return (_endpoint(text, port, spelled) if text else (parsed["master-addr"].strip("[]"), port),)
    if not text:
        several = ",HOST:PORT…" if backend == "etcd" else ""
        raise UsageError(f"{parsed.spelled('rdzv-backend')} needs --rdzv-endpoint=HOST:PORT{several}")
    return (_endpoint(text, _PORTS[backend], spelled),)


def _endpoint(text: str, port: int, spelled: str) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]` or `[v6]:port`."""
    text = text.strip()
    host, end, rest = text[1:].partition("]") if text.startswith("[") else (text.partition(":")[0], "", "")
    if not end:
        rest = text[len(host) :]
    if not host or any(c in host for c in ", /[") or (rest and rest[0] != ":"):
        raise UsageError(f"{spelled}: HOST:PORT expected")
    if ":" in rest[1:]:
        raise UsageError(f"{spelled}: HOST:PORT expected, an IPv6 address in brackets")
    return host, _port(rest[1:], spelled) if rest else port


def _port(text: str, spelled: str) -> int:
    if not (text.isdecimal() and len(text) <= 5 and int(text) <= 65535):
        raise UsageError(f"{spelled}: a port is a number up to 65535")
    if int(text) == 0:
        raise UsageError(f"{spelled}: port 0 is another one on every node")
    return int(text)


def _security(conf: _Conf) -> dict[str, str]:
    files = {key: conf.values[key] for key in _CERTIFICATES if key in conf.values}
    for key, path in files.items():
        if not os.access(path, os.R_OK):
            raise UsageError(f"{conf.spelled(key)}: no such file, or it cannot be read")
    if ("ssl_cert" in files) != ("ssl_cert_key" in files):
        raise UsageError(f"{conf.flag}: ssl_cert and ssl_cert_key go together")
    return {"protocol": conf.one_of("protocol", ("http", "https")), **files}


# ---- on which terms ----


def _terms(parsed: Parsed, conf: _Conf, nodes: tuple[int, int], restarts: RestartPolicy, *, is_static: bool) -> Terms:
    try:
        admission = Admission(parsed["admission"])
    except ValueError:
        raise UsageError(f"{parsed.spelled('admission')}: soon, at-failure or never") from None
    fence_s = seconds_of(parsed, "fence-after") if parsed["fence-after"] else None
    if fence_s is not None and fence_s < _LEAST_HEARTBEAT_S:
        raise UsageError(f"{parsed.spelled('fence-after')}: at least {_LEAST_HEARTBEAT_S} seconds")
    beat_s, silence_s = _rhythm(_heartbeat_s(conf), fence_s)
    return Terms(
        min_nodes=nodes[1] if is_static else nodes[0],
        max_nodes=nodes[1],
        restarts=restarts,
        admission=admission,
        join_timeout_s=conf.seconds("join_timeout", 600.0),
        last_call_s=conf.seconds("last_call_timeout", 30.0),
        settle_s=conf.seconds("settle", 1.0),
        beat_s=beat_s,
        silence_s=silence_s,
        fence_s=fence_s,
    )


def _heartbeat_s(conf: _Conf) -> float:
    """A silent node is noticed within that time. torchelastic's two keys say the same as a product, and beat ours."""
    if "keep_alive_interval" not in conf.values and "keep_alive_max_attempt" not in conf.values:
        key, heartbeat_s = "heartbeat", conf.seconds("heartbeat", 5.0)
    else:
        attempts = conf.values.get("keep_alive_max_attempt", "3")
        if not (attempts.isdecimal() and len(attempts) <= 9):
            raise UsageError(f"{conf.spelled('keep_alive_max_attempt')}: a whole number expected")
        key = "keep_alive_interval × keep_alive_max_attempt"
        heartbeat_s = conf.seconds("keep_alive_interval", 5.0) * int(attempts)
    if heartbeat_s < _LEAST_HEARTBEAT_S:
        raise UsageError(f"{conf.flag}: {key} is {heartbeat_s:g}: at least {_LEAST_HEARTBEAT_S} seconds")
    return heartbeat_s


def _rhythm(heartbeat_s: float, fence_s: float | None) -> tuple[float, float]:
    """Beat and silence limit.

    A dead node is noticed within the heartbeat: its last movement is seen up to one beat (0.15) late, and from then its
    silence reaches 0.7 at the fifth read (0.75). The rest (0.1) is for answers that are slow.

    A fence must have killed the workers before anybody calls the node lost. Its time runs from the answer to the last
    beat; the others' time from a read that saw that beat. So fence + 2 beats < silence will do, unless that answer
    took longer than 2 beats. And 4 beats must fit into a fence, or one slow answer would set it off.
    """
    beat_s, silence_s = 0.15 * heartbeat_s, 0.7 * heartbeat_s
    if fence_s is not None:
        beat_s = min(beat_s, fence_s / 4)
        silence_s = max(silence_s, fence_s + 3 * beat_s)
    return round(beat_s, 6), round(silence_s, 6)


def _rank_hint(parsed: Parsed, terms: Terms, *, is_static: bool) -> int | None:
    if not parsed["node-rank"]:
        return 0 if is_static else None  # torchrun's default, that scripts for the first node rely on
    rank = number_of(parsed, "node-rank", least=0)
    if is_static and rank >= terms.max_nodes:
        raise UsageError(
            f"{parsed.spelled('node-rank')}: with {terms.max_nodes} nodes it is at most {terms.max_nodes - 1}"
        )
    return rank


# ---- what the user should know ----


def _notices(parsed: Parsed, conf: _Conf, nodes: tuple[int, int], backend: str) -> tuple[str, ...]:
    notices = []
    if backend == "static" and not parsed["node-rank"]:
        notices.append("--node-rank is not given: this is node 0, or the next that is free")
    if backend == "static" and not parsed["rdzv-endpoint"] and "master-addr" not in parsed.given:
        notices.append("--master-addr is not given: 127.0.0.1 is out of reach for other hosts")
    if backend == "c10d" and not parsed["rdzv-id"]:
        notices.append("--rdzv-id is not given: whatever meets there without one is the same job")
    if backend == "static" and nodes[0] != nodes[1]:
        notices.append(f"{parsed.spelled('nnodes')}: with --rdzv-backend=static all {nodes[1]} are waited for")
    masters = [parsed.given[name] for name in ("master-addr", "master-port") if name in parsed.given]
    if masters and (backend != "static" or parsed["rdzv-endpoint"]):
        notices.append(f"{', '.join(masters)}: without effect, nodes meet at --rdzv-endpoint")
    unused = [key for key in conf.values if key not in _USED[backend]]
    if unused:
        notices.append(f"{conf.flag}: {', '.join(unused)}: without effect; {backend} takes {', '.join(_USED[backend])}")
    return tuple(notices)
