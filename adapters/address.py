"""Under which address this node is reached by the others.

The kernel knows: it is the source address of the route to where they all meet. Names are not asked (`getfqdn` needs a
resolver that agrees with everybody else's), and no packet is sent: connecting a UDP socket only looks up the route.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence

_ELSEWHERE = ("203.0.113.1", "2001:db8::1")
"""Addresses of nobody, kept for documentation (RFC 5737, RFC 3849): only the default route leads there."""
_ANY_PORT = 9


def own_address(endpoints: Sequence[tuple[str, int]]) -> str:
    """This host's address on the way to the first of `endpoints` that leads anywhere, else on the default route.

    127.0.0.1 if there is no network. May take as long as the resolver takes to give up on a name.
    """
    for host, port in endpoints:
        # Debian's /etc/hosts gives a host's own name a loopback address, where no other host reaches it.
        must_leave = not _is_loopback(host)
        for source in _sources(host, port):
            if not (must_leave and _is_loopback(source)):
                return source
    return next((source for host in _ELSEWHERE for source in _sources(host, _ANY_PORT)), "127.0.0.1")


def _sources(host: str, port: int) -> Iterator[str]:
    """The source address of the route to each address of `host`."""
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
            yield source


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
