"""The address that a node gives to the others: the kernel chooses it from the way to them."""

from __future__ import annotations

import ipaddress
import os
import shutil
import socket
import subprocess
import sys

import pytest

from reknit.adapters.host.address import is_here, own_address
from tests.support.waiting import PATIENCE_S

NOWHERE = "no-such-host.invalid"
"""RFC 6761: no resolver knows it."""


def in_network(setup: str, *endpoints: str) -> str:
    """What `own_address` says in a network of its own, made by the shell commands `setup`."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("needs root, ip and unshare")
    if subprocess.run(["unshare", "-nm", "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")
    code = f"from reknit.adapters.host.address import own_address as f; print(f([(h, 29400) for h in {endpoints!r}]))"
    script = f'{NO_NAME_SERVER}\n{setup}\nexec "$0" -c "$1"'
    command = ["unshare", "-nm", "sh", "-euc", script, sys.executable, code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    if "Unknown device type" in done.stderr or "not supported" in done.stderr:
        pytest.skip(f"this kernel makes no such network: {done.stderr}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Packets to this host's name server get no answer in the network of a test, and the resolver would wait for seconds.
# Without a name server it asks 127.0.0.1, which refuses at once. If the mount is forbidden, the test takes longer.
NO_NAME_SERVER = "mount --bind /dev/null /etc/resolv.conf 2>/dev/null || :"

TWO_NETWORKS = """
ip link set lo up
ip link add name net1 type veth peer name net2
ip address add 10.1.0.5/24 dev net1
ip address add 10.2.0.5/24 dev net2
ip link set net1 up
ip link set net2 up
"""


def test_a_store_on_this_host_only() -> None:
    """`localhost` is what tests say: all nodes are here."""
    assert own_address([("127.0.0.1", 29400)]) == "127.0.0.1"
    assert own_address([("localhost", 29400)]) in ("127.0.0.1", "::1")


@pytest.mark.skipif(not socket.has_ipv6 or not os.path.exists("/proc/net/if_inet6"), reason="no IPv6")
def test_ipv6() -> None:
    """The family of the endpoint decides."""
    assert in_network("ip link set lo up", "::1") == "::1"


def test_the_network_that_leads_to_the_store() -> None:
    """Of several networks the one that the others are in; torchelastic's getfqdn gives whatever the name says."""
    assert in_network(TWO_NETWORKS, "10.1.0.9") == "10.1.0.5"
    assert in_network(TWO_NETWORKS, "10.2.0.9") == "10.2.0.5"
    assert in_network(TWO_NETWORKS, "10.2.0.5") == "10.2.0.5", "the store's host, too, says where others reach it"


def test_endpoints_that_lead_nowhere_are_passed_over() -> None:
    """A cluster's first member may be a name that is gone."""
    assert in_network(TWO_NETWORKS, NOWHERE, "10.9.9.9", "10.2.0.9") == "10.2.0.5"


def test_the_names_and_addresses_of_this_host_are_known() -> None:
    """Two agents on one host must not get one node id because they write the endpoint differently."""
    assert is_here("localhost", 29400)
    assert is_here(own_address([]), 29400)
    assert not is_here("203.0.113.1", 29400)
    assert not is_here(NOWHERE, 29400)


def test_the_default_route_when_there_is_no_endpoint() -> None:
    """A folder has no address."""
    setup = TWO_NETWORKS + "ip route add default via 10.2.0.1"
    assert in_network(setup) == "10.2.0.5"
    assert in_network(setup, NOWHERE) == "10.2.0.5"


def test_a_name_that_is_loopback_here_and_nowhere_else() -> None:
    """Debian gives a host's own name 127.0.1.1: advertised, it would send every other node to itself."""
    setup = TWO_NETWORKS + "ip route add default via 10.2.0.1"
    name = socket.gethostname()
    try:
        found = socket.gethostbyname(name)
    except OSError:
        pytest.skip("this host cannot resolve its own name")
    if not ipaddress.ip_address(found).is_loopback:
        pytest.skip("this host's own name is no loopback address")
    assert in_network(setup, name) == "10.2.0.5"


def test_without_a_network() -> None:
    """All agents are on this host, then."""
    assert in_network("ip link set lo up") == "127.0.0.1"
    assert in_network("true", NOWHERE, "10.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize("host", ["", "a" * 300, "..", "\udcff", "1.2.3.4.5"])
def test_names_that_are_none(host: str) -> None:
    """The user is told by the journal what is wrong with the endpoint; here it must not be a traceback."""
    assert ipaddress.ip_address(own_address([(host, 29400)]))
