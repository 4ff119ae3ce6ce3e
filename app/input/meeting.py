"""How several nodes meet: judges `--rdzv-…` and the options that belong to it. Imported only for several nodes.

All agents of a job must have the same `Terms`. So terms are made only of options that users give alike on all nodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from reknit.app.cli.arguments import Parsed
from reknit.app.cli.options import LEAST_HEARTBEAT_S, LONGEST_S, UsageError
from reknit.app.settings import LONGEST_NAME, Meeting
from reknit.core.job.entries import Admission, RestartPolicy, Terms

from . import readers

_PORTS = {"c10d": 29400, "etcd": 2379}
SILENCE = 0.7
"""The silence limit as a fraction of the heartbeat."""
_TERMS = ("join_timeout", "last_call_timeout", "heartbeat", "keep_alive_interval", "keep_alive_max_attempt", "settle")
_CERTIFICATES = ("ca_cert", "ssl_cert", "ssl_cert_key")
_LOGIN = ("user", "password_file", "password")
_PASSWORD = "REKNIT_RDZV_PASSWORD"
_USED = {
    "static": (*_TERMS, "is_host"),
    "c10d": (*_TERMS, "is_host", "store_type"),
    "file": (*_TERMS, "group"),
    "etcd": (*_TERMS, "protocol", *_CERTIFICATES, *_LOGIN),
}
"""By backend: the keys of --rdzv-conf that have an effect."""
_OTHER_NAMES = {
    "heartbeat_timeout": "heartbeat",
    "cacert": "ca_cert",
    "cert": "ssl_cert",
    "key": "ssl_cert_key",
}
"""Keys that torchelastic has under two names: the other name, and the one that is used here."""
_NAMES = ("rdzv-id", "rdzv-secret", "master-addr", "node-rank", "node-id", "local-addr", "fence-after")


@frozen
class MeetingOptions:
    """What the options say about a job with several nodes."""

    meeting: Meeting
    terms: Terms
    run_id: str
    rank_hint: int | None
    notices: tuple[str, ...]


def judged(
    parsed: Parsed, environ: Mapping[str, str], nodes: tuple[int, int], restarts: RestartPolicy
) -> MeetingOptions:
    """Judge the options of a job with several nodes. `nodes`: the smallest and the largest number. Raises
    `UsageError`."""
    for name in _NAMES:
        if name in parsed.given and not parsed.texts[name]:
            raise UsageError(f"{parsed.given[name]} is empty; perhaps a variable of the shell is not set")
        if len(parsed.texts[name].encode(errors="surrogatepass")) > LONGEST_NAME:
            raise UsageError(f"{parsed.given[name]}: at most {LONGEST_NAME} bytes are allowed")
    if parsed["store-timeout"] == 0:
        raise UsageError(f"{parsed.spelled('store-timeout')}: with several nodes, more than 0 s are expected")
    asked = check_backend(parsed)
    conf = _Conf(parsed)
    store_type = conf.read("store_type", readers.one_of("tcp", "file"), "tcp") if asked == "c10d" else ""
    backend = "file" if store_type == "file" else "c10d" if asked == "static" else asked
    is_static = asked == "static"
    terms = _terms(parsed, conf, nodes, restarts, is_static=is_static)
    meeting = _meeting(parsed, conf, environ, asked, backend)
    return MeetingOptions(
        meeting,
        terms,
        run_id=_job(parsed, backend),
        rank_hint=_rank_hint(parsed, terms, is_static=is_static),
        notices=_notices(parsed, conf, nodes, asked),
    )


def kept(parsed: Parsed, environ: Mapping[str, str], verb: str, backends: Sequence[str]) -> Meeting:
    """Where journals are. `backends`: those that the verb can use, at least two. Raises `UsageError`."""
    backend = parsed["rdzv-backend"]
    if not backend:
        raise UsageError(f"{verb} needs --rdzv-backend={' or --rdzv-backend='.join(backends)}")
    if backend not in backends:
        raise UsageError(f"{parsed.spelled('rdzv-backend')}: {', '.join(backends[:-1])} or {backends[-1]} expected")
    return _meeting(parsed, _Conf(parsed), environ, backend, backend)


def _meeting(parsed: Parsed, conf: _Conf, environ: Mapping[str, str], asked: str, backend: str) -> Meeting:
    """`asked`: the backend that the user has named. `backend`: the one that is meant."""
    return Meeting(
        backend,
        endpoints=_endpoints(parsed, asked) if backend != "file" else (),
        folder=_folder(parsed) if backend == "file" else "",
        group=conf.read("group", readers.group, None) if backend == "file" else None,
        secret=parsed["rdzv-secret"] or environ.get("REKNIT_RDZV_SECRET", ""),
        is_host=conf.read("is_host", readers.truth, None) if asked in ("c10d", "static") else None,
        **(_security(conf) | _login(conf, environ) if asked == "etcd" else {}),
    )


class _Conf:
    """The values in `--rdzv-conf`, and the spelling of each for messages."""

    def __init__(self, parsed: Parsed) -> None:
        self.flag = parsed.given.get("rdzv-conf", "--rdzv-conf")
        self.values: dict[str, str] = {}
        for item in filter(None, (item.strip() for item in parsed["rdzv-conf"].split(","))):
            key, _, value = (word.strip() for word in item.partition("="))
            if not (key and value):
                # The item may be the part of a password after a comma.
                shown = "after a password: " if "password" in self.values else f"{item}: "
                raise UsageError(f"{self.flag}: {shown}KEY=VALUE expected")
            self.values[_OTHER_NAMES.get(key, key)] = value

    def spelled(self, key: str) -> str:
        return f"{self.flag}: {key}={self.values[key]}"

    def read(self, key: str, reader: Callable[[str], Any], default: Any) -> Any:
        if key not in self.values:
            return default
        try:
            return reader(self.values[key])
        except ValueError as error:
            raise UsageError(f"{self.spelled(key)}: {error}") from None

    def seconds(self, key: str, default: float) -> float:
        return float(self.read(key, readers.seconds, default))


# ---- where ----


def check_backend(parsed: Parsed) -> str:
    """The backend that was asked for. Raises `UsageError` if there is no such backend."""
    backend: str = parsed["rdzv-backend"]
    if backend == "etcd-v2":
        raise UsageError(f"{parsed.spelled('rdzv-backend')}: etcd has no such API since its version 3.6; use etcd")
    if backend not in _USED:
        raise UsageError(f"{parsed.spelled('rdzv-backend')}: static, c10d, file or etcd expected")
    return backend


def _job(parsed: Parsed, backend: str) -> str:
    if not parsed["rdzv-id"] and backend != "c10d":
        raise UsageError(f"--rdzv-backend={backend} needs --rdzv-id: without it, every job would use the same journal")
    return str(parsed["rdzv-id"] or "none")


def _folder(parsed: Parsed) -> str:
    folder = parsed["rdzv-endpoint"]
    if not folder:
        raise UsageError("--rdzv-backend=file needs --rdzv-endpoint=FOLDER, on a file system that all nodes share")
    if "/" not in folder and folder.partition(":")[2].isdigit():
        name = parsed.spelled("rdzv-endpoint")
        raise UsageError(f"{name}: with --rdzv-backend=file, a folder is expected; write ./{folder} for this one")
    try:
        return os.path.abspath(str(folder))
    except FileNotFoundError:
        spelled = parsed.spelled("rdzv-endpoint")
        raise UsageError(
            f"{spelled}: write the full path of the folder, because the working folder was removed"
        ) from None


def _endpoints(parsed: Parsed, backend: str) -> tuple[tuple[str, int], ...]:
    text, spelled = parsed["rdzv-endpoint"].strip(), parsed.spelled("rdzv-endpoint")
    if backend == "etcd" and text:
        return tuple(_endpoint(part, _PORTS["etcd"], spelled) for part in text.split(","))
    if "," in text:
        hint = "a job that must outlive any host needs --rdzv-backend=etcd"
        raise UsageError(f"{spelled}: {backend} has one endpoint; {hint}")
    if backend == "static":
        port = _not_zero(parsed["master-port"], parsed.spelled("master-port"))
        return (_endpoint(text, port, spelled) if text else (parsed["master-addr"].strip("[]"), port),)
    if not text:
        several = ",HOST:PORT…" if backend == "etcd" else ""
        raise UsageError(f"{parsed.spelled('rdzv-backend')} needs --rdzv-endpoint=HOST:PORT{several}")
    return (_endpoint(text, _PORTS[backend], spelled),)


def _endpoint(text: str, port: int, spelled: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port`, `[v6]` or `[v6]:port`. `port`: used if the text has none."""
    text = text.strip()
    if "://" in text:
        tls = "; for TLS, --rdzv-conf=protocol=https" if port == _PORTS["etcd"] else ""
        raise UsageError(f"{spelled}: HOST:PORT expected, without {text.partition('://')[0]}://{tls}")
    host, end, rest = text[1:].partition("]") if text.startswith("[") else (text.partition(":")[0], "", "")
    if not end:
        rest = text[len(host) :]
    if not host or any(c in host for c in ", /[") or (rest and rest[0] != ":"):
        raise UsageError(f"{spelled}: HOST:PORT expected")
    if ":" in rest[1:]:
        raise UsageError(f"{spelled}: HOST:PORT expected, an IPv6 address in brackets")
    return host, _port(rest[1:], spelled) if rest else port


def _port(text: str, spelled: str) -> int:
    try:
        return _not_zero(readers.port(text), spelled)
    except ValueError as error:
        raise UsageError(f"{spelled}: {error}") from None


def _not_zero(port: int, spelled: str) -> int:
    if port == 0:
        raise UsageError(f"{spelled}: port 0 means another port on every node; give a fixed one")
    return port


def _security(conf: _Conf) -> dict[str, Any]:
    files = {key: conf.values[key] for key in _CERTIFICATES if key in conf.values}
    for key, path in files.items():
        if not os.access(path, os.R_OK):
            raise UsageError(f"{conf.spelled(key)}: no such file, or it cannot be read")
    if ("ssl_cert" in files) != ("ssl_cert_key" in files):
        raise UsageError(f"{conf.flag}: give both ssl_cert and ssl_cert_key, or neither")
    return {"protocol": conf.read("protocol", readers.one_of("http", "https"), "http"), **files}


def _login(conf: _Conf, environ: Mapping[str, str]) -> dict[str, str]:
    """User and password for etcd. What --rdzv-conf says of the password takes precedence over the variable."""
    user, password, file = (conf.values.get(key, "") for key in ("user", "password", "password_file"))
    if (password or file) and not user:
        raise UsageError(f"{conf.flag}: {'password' if password else 'password_file'} needs user=NAME")
    if password and file:
        raise UsageError(f"{conf.flag}: give password or password_file, not both")
    if file and not os.access(file, os.R_OK):
        raise UsageError(f"{conf.spelled('password_file')}: no such file, or it cannot be read")
    if user and not file:
        password = password or environ.get(_PASSWORD, "")
        if not password:
            raise UsageError(
                f"{conf.spelled('user')}: its password is missing; set {_PASSWORD}, or give password_file=FILE"
            )
    return {"user": user, "password": password, "password_file": os.path.abspath(file) if file else ""}


# ---- on which terms ----


def _terms(parsed: Parsed, conf: _Conf, nodes: tuple[int, int], restarts: RestartPolicy, *, is_static: bool) -> Terms:
    fence_s = parsed["fence-after"]
    beat_s, silence_s = _rhythm(_heartbeat_s(conf), fence_s)
    return Terms(
        min_nodes=nodes[1] if is_static else nodes[0],
        max_nodes=nodes[1],
        restarts=restarts,
        admission=Admission(parsed["admission"]),
        join_timeout_s=conf.seconds("join_timeout", 600.0),
        last_call_s=conf.seconds("last_call_timeout", 30.0),
        settle_s=conf.seconds("settle", 1.0),
        beat_s=beat_s,
        silence_s=silence_s,
        fence_s=fence_s,
    )


def _heartbeat_s(conf: _Conf) -> float:
    """The time within which a silent node is noticed. The product of torchelastic's two keys means the same, and takes
    precedence over `heartbeat`."""
    if "keep_alive_interval" not in conf.values and "keep_alive_max_attempt" not in conf.values:
        key, heartbeat_s = "heartbeat", conf.seconds("heartbeat", 5.0)
    else:
        attempts = conf.values.get("keep_alive_max_attempt", "3")
        if not (attempts.isdecimal() and len(attempts) <= 9):
            raise UsageError(f"{conf.spelled('keep_alive_max_attempt')}: a whole number expected")
        key = "keep_alive_interval × keep_alive_max_attempt"
        heartbeat_s = conf.seconds("keep_alive_interval", 5.0) * int(attempts)
    if heartbeat_s < LEAST_HEARTBEAT_S:
        raise UsageError(f"{conf.flag}: {key} is {heartbeat_s:g}: must be at least {LEAST_HEARTBEAT_S} seconds")
    if heartbeat_s > LONGEST_S:
        raise UsageError(f"{conf.flag}: {key} is {heartbeat_s:g}: must be at most {LONGEST_S:.0f} seconds")
    return heartbeat_s


def _rhythm(heartbeat_s: float, fence_s: float | None) -> tuple[float, float]:
    """The beat and the silence limit, in seconds, for a heartbeat and a fence. Fractions below are of the heartbeat.

    A dead node is noticed within the heartbeat. (1) The others see its last beat up to one beat (0.15) late. (2) From
    then on, its silence reaches the limit (0.7) at their fifth read (0.75). (3) The rest (0.1) is for slow answers.

    A fence must have killed the workers before another node declares this node lost. The time of the fence begins when
    the last acknowledged beat was sent. The time of the others begins with a read that saw that beat. So the silence
    limit is three beats longer than the fence. Four beats fit into a fence, so that one slow answer does not kill the
    workers.
    """
    beat_s, silence_s = 0.15 * heartbeat_s, SILENCE * heartbeat_s
    if fence_s is not None:
        beat_s = min(beat_s, fence_s / 4)
        silence_s = max(silence_s, fence_s + 3 * beat_s)
    return round(beat_s, 6), round(silence_s, 6)


def _rank_hint(parsed: Parsed, terms: Terms, *, is_static: bool) -> int | None:
    rank: int | None = parsed["node-rank"]
    if rank is None:
        return 0 if is_static else None  # 0 is torchrun's default. Scripts for the first node rely on it
    if is_static and rank >= terms.max_nodes:
        raise UsageError(
            f"{parsed.spelled('node-rank')}: with {terms.max_nodes} nodes it is at most {terms.max_nodes - 1}"
        )
    return rank


# ---- what the user should know ----


def _notices(parsed: Parsed, conf: _Conf, nodes: tuple[int, int], backend: str) -> tuple[str, ...]:
    notices = []
    if backend == "static" and parsed["node-rank"] is None:
        notices.append("--node-rank is not given: this node gets group rank 0, or the next one that is free")
    if backend == "static" and not parsed["rdzv-endpoint"] and "master-addr" not in parsed.given:
        notices.append("--master-addr is not given: nodes meet at 127.0.0.1, which other hosts cannot reach")
    if backend == "c10d" and not parsed["rdzv-id"]:
        notices.append(
            "--rdzv-id is not given: all agents without it at this endpoint form one job; give each job its own"
        )
    if backend == "static" and nodes[0] != nodes[1]:
        notices.append(f"{parsed.spelled('nnodes')}: with --rdzv-backend=static the job waits for all {nodes[1]} nodes")
    masters = [parsed.given[name] for name in ("master-addr", "master-port") if name in parsed.given]
    if masters and (backend != "static" or parsed["rdzv-endpoint"]):
        notices.append(f"{', '.join(masters)}: without effect: nodes meet at --rdzv-endpoint")
    unused = [key for key in conf.values if key not in _USED[backend]]
    if unused:
        notices.append(f"{conf.flag}: {', '.join(unused)}: without effect; {backend} takes {', '.join(_USED[backend])}")
    return tuple(notices)
