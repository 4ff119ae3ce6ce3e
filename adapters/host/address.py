"""The address under which the other nodes reach this node.

It is the source address of the route to the place where all nodes meet, and the kernel knows that route. Connecting a
UDP socket looks the route up and sends no packet. The host's own name is not used: `getfqdn` is right only if all hosts
resolve the name alike.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import cache

_ELSEWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses that belong to nobody (RFC 5737, RFC 3849). Only the default route leads there."""
_ANY_PORT = 9
_LOOKUP_S = 1.0


def own_address(endpoints: Sequence[tuple[str, int]]) -> str:
    """This host's address on the route to the first endpoint that has a route, or else on the default route.

    127.0.0.1 if there is no network. Resolving a name may take until the resolver gives up.
    """
    for host, port in endpoints:
        # Debian's /etc/hosts gives a host's own name a loopback address. No other host can reach this one there.
        must_leave = not is_loopback(host)
        for source, _ in _routes(host, port):
            if not (must_leave and is_loopback(source)):
                return source
    return next((source for host in _ELSEWHERE for source, _ in _routes(host, _ANY_PORT)), "127.0.0.1")


@cache
def full_host_name() -> str:
    """The name of this host with its domain, for people and for records. A lookup that takes longer than a second is
    not waited for. Then, and if nothing is found, it is the name without the domain. Looked up once in a process."""
    short = socket.gethostname()
    found: list[str] = []
    lookup = threading.Thread(target=lambda: found.append(socket.getfqdn(short)), name="host name", daemon=True)
    try:
        lookup.start()
    except RuntimeError:  # this is what Python raises if the system allows no further thread
        return short
    lookup.join(_LOOKUP_S)
    return found[0] if found else short


def addresses_of(host: str, port: int | None = None) -> list[str]:
    """The numeric addresses to which this name leads here, in order. Raises `OSError`, and `UnicodeError` for what is
    no name. Resolving it may take until the resolver gives up."""
    return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})


def is_here(host: str, port: int) -> bool:
    """Whether this name or address leads to this host. Resolving a name may take until the resolver gives up."""
    return is_loopback(host) or any(source == address for source, address in _routes(host, port))


def _routes(host: str, port: int) -> Iterator[tuple[str, str]]:
    """For each address of `host` the source address of the route to it, and the address itself."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return  # a name that cannot be resolved
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                source = str(probe.getsockname()[0])
        except OSError:
            continue  # no route, or no such family here
        if "%" not in source:  # a link-local address means something else on every host
            yield source, str(address[0])


def is_loopback(host: str) -> bool:
    """Whether this name or address leads to the host itself. Nothing is looked up."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
