"""The handler that a backend name of reknit stands for. It needs no torch.

1. reknit's own agents ask it only where the nodes meet and on which terms. It is then a typed reading of
   `RendezvousParameters`, by the same code as `reknit run --rdzv-…`.
2. For plain torchrun the methods of torch's `RendezvousHandler` work: this node then joins the job when it is first
   asked for a round. See `membership.py`.
3. Whatever cannot be raises `ValueError` when the handler is made.
4. An empty endpoint means that the job has one node. So does the port 0, which means any free port: no other node could
   know it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from reknit.app.cli.arguments import Parsed
from reknit.app.cli.options import OPTIONS, UsageError
from reknit.core.job.entries import RestartPolicy, Terms

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous.api import RendezvousInfo

    from reknit.app.input.meeting import MeetingOptions
    from reknit.app.settings import Meeting

    from .membership import Membership
    from .parameters import RendezvousParameters

_OPTION_KEYS = ("node_id", "store_timeout", "admission", "fence_after")
"""Settings of the backend that `reknit run` has as options of their own, and not in --rdzv-conf."""
_OPTIONS = {option.name: option for option in OPTIONS}


class ReknitRendezvousHandler:
    """Where the nodes of a job meet, as parameters of a rendezvous say it. Has the methods of torch's
    `RendezvousHandler`."""

    def __init__(self, params: RendezvousParameters, environ: Mapping[str, str] | None = None) -> None:
        """`environ`: the variables, of which REKNIT_RDZV_SECRET and REKNIT_RDZV_PASSWORD are
        read. None: `os.environ`.

        Raises `ValueError` if the parameters cannot be."""
        self.params = params
        self._parsed = _parsed(params)
        self._met = _met(params, self._parsed, os.environ if environ is None else environ)
        self._member: Membership | None = None
        """This node in the job, once torchrun has asked for a round."""
        self._is_shut_down = False

    # ---- what an agent of reknit asks ----

    def meeting(self) -> Meeting | None:
        """The store at which the nodes meet. None: the job has one node."""
        return None if self._met is None else self._met.meeting

    def terms(self, max_restarts: int = 0) -> Terms:
        """What all agents of the job agree on. `max_restarts`: failures that the whole job survives."""
        restarts = RestartPolicy(max_restarts=max_restarts)
        return Terms(restarts=restarts) if self._met is None else evolve(self._met.terms, restarts=restarts)

    @property
    def rank_hint(self) -> int | None:
        """The wished group rank of this node in the first round. None: no wish."""
        return None if self._met is None else self._met.rank_hint

    @property
    def node_id(self) -> str:
        """The name of this node. Empty: the name of the host."""
        return str(self._parsed["node-id"])

    @property
    def address(self) -> str:
        """The address of this node for the others. Empty: it is found out."""
        return str(self._parsed["local-addr"]).strip("[]")

    @property
    def store_timeout_s(self) -> float:
        """When the store cannot be reached for so long, the agent ends. Seconds."""
        return float(self._parsed["store-timeout"])

    @property
    def notices(self) -> tuple[str, ...]:
        """Lines that the user should see once."""
        return () if self._met is None else self._met.notices

    # ---- torch's RendezvousHandler ----

    def get_backend(self) -> str:
        """The name under which this handler was asked for."""
        return self.params.backend

    def get_run_id(self) -> str:
        """The name of the job."""
        return self.params.run_id

    @property
    def use_agent_store(self) -> bool:
        """The workers of a round use the store of the agents. Only agents of torchrun have one."""
        return self._member is not None

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round. Raises torch's errors."""
        if self._is_shut_down:
            from torch.distributed.elastic.rendezvous.api import RendezvousClosedError

            raise RendezvousClosedError("this handler was shut down")
        if self._member is None:
            from .membership import Membership

            self._member = Membership(self, self.notices)
        return self._member.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Above 0: the workers are to be stopped, and `next_rendezvous` is to be called."""
        return 0 if self._member is None else self._member.num_nodes_waiting()

    def is_closed(self) -> bool:
        """The job has ended, as far as this node knows."""
        return self._is_shut_down if self._member is None else self._member.is_closed()

    def set_closed(self) -> None:
        """End the job for all nodes. Does nothing before this node has joined."""
        if self._member is not None:
            self._member.set_closed()

    def shutdown(self) -> bool:
        """Leave the job, which ends for all nodes unless the workers of this node have succeeded. May be repeated.
        False: the other nodes could not be told within a minute."""
        self._is_shut_down = True
        member, self._member = self._member, None
        return True if member is None else member.shutdown()


# ---- from parameters to the options of `reknit run` ----


def _parsed(params: RendezvousParameters) -> Parsed:
    """The parameters as if they had been given on the command line. Messages name the parameters."""
    backend, endpoint = _backend(params)
    texts = {"rdzv-backend": backend, "rdzv-endpoint": endpoint, "rdzv-id": params.run_id}
    given = {"rdzv-backend": "backend", "rdzv-endpoint": "endpoint", "rdzv-id": "run_id", "rdzv-conf": "config"}
    if params.local_addr:
        texts["local-addr"], given["local-addr"] = params.local_addr, "local_addr"
    config = {key: value for key, value in params.config.items() if value is not None}
    if "rank" in config:
        texts["node-rank"], given["node-rank"] = str(config.pop("rank")), "rank"
    for key in _OPTION_KEYS:
        if key in config:
            name = key.replace("_", "-")
            texts[name], given[name] = str(config.pop(key)), key
    # torch's launcher always gives a timeout. torch's static and etcd backends take it, its c10d backend does not.
    timeout = config.pop("timeout", None)
    if timeout is not None and backend in ("static", "etcd"):
        config.setdefault("join_timeout", timeout)
    texts["rdzv-conf"] = ",".join(f"{key}={_value(key, value)}" for key, value in config.items())
    texts = {option.name: option.default for option in OPTIONS} | texts
    return Parsed(_values(texts, given), "", (), given, texts)


def _backend(params: RendezvousParameters) -> tuple[str, str]:
    """The journal and its place. The backend `reknit` takes both from an endpoint such as `etcd://host:2379`."""
    endpoint = params.endpoint.strip()
    if params.backend != "reknit":
        return params.backend, endpoint
    kind, separator, place = endpoint.partition("://")
    if separator:
        return kind, place
    return ("file" if endpoint.startswith("/") else "c10d"), endpoint


def _value(key: str, value: object) -> str:
    if "," in str(value):
        shown = key if key == "password" else f"{key}={value}"
        raise ValueError(f"config: {shown}: without a comma")
    return str(value)


def _values(texts: Mapping[str, str], given: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in texts.items():
        try:
            values[name] = _OPTIONS[name].read(text)
        except ValueError as error:
            raise ValueError(f"{given.get(name, name)}={text}: {error}") from None
    return values


def _met(params: RendezvousParameters, parsed: Parsed, environ: Mapping[str, str]) -> MeetingOptions | None:
    """Where several nodes meet. None: the job has one node."""
    endpoint = parsed["rdzv-endpoint"]
    is_alone = not endpoint or endpoint.rpartition(":")[2] == "0"
    if is_alone and params.min_nodes > 1:
        what = f"endpoint={params.endpoint}: port 0 is another one on every node" if endpoint else "endpoint is empty"
        raise ValueError(f"{what}, so {params.min_nodes} nodes cannot meet")
    if not is_alone and params.max_nodes > 1 and not params.run_id:
        raise ValueError("run_id is empty: the nodes of a job find each other by its name")
    from reknit.app.input.meeting import check_backend, judged

    try:
        check_backend(parsed)
        if is_alone or params.max_nodes == 1:
            return None
        return judged(parsed, environ, (params.min_nodes, params.max_nodes), RestartPolicy())
    except UsageError as error:
        raise ValueError(str(error)) from None
