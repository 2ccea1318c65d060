"""Which of a host's addresses agents give to others: by scope and reachability, not by name."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.fabric


def four(placement):
    """Two ranks a host."""
    return dict.fromkeys(placement, 2)


def addresses(agents):
    """Of the hosts that listen: all of a chain but its end."""
    given = {name: agent["addresses"] for name, agent in agents.items() if agent["addresses"]}
    assert len(given) == len(agents) - 1
    return given


@pytest.mark.parametrize("master", ["2001:db8:77::1", "[2001:db8:77::1]"])
def test_ipv6_only_hosts(fabric, ranks, master):
    gpu = [fabric.host(f"gpu-{i}", f"2001:db8:77::{i}/64") for i in (1, 2, 3)]
    agents = ranks(four(gpu), master=master, COMMKIT_TREE_DEGREE="1").meet()
    assert (
        addresses(agents).items() <= {f"gpu-{i}": [f"2001:db8:77::{i}"] for i in (1, 2, 3)}.items()
    )


def test_hosts_whose_kernel_has_ipv6_switched_off(fabric, ranks):
    gpu = fabric.hosts(3)
    for host in gpu:
        host.sysctl(ipv6__conf__all__disable_ipv6=1, ipv6__conf__default__disable_ipv6=1)
    agents = ranks(four(gpu), master="10.77.0.1", COMMKIT_TREE_DEGREE="1").meet()
    assert addresses(agents).items() <= {f"gpu-{i}": [f"10.77.0.{i}"] for i in (1, 2, 3)}.items()


def test_one_host_with_ipv6_switched_off_among_hosts_that_prefer_nothing(fabric, ranks):
    gpu = fabric.hosts(3)
    for i, host in enumerate(gpu, 1):
        host.ip(f"addr add 2001:db8:77::{i}/64 dev eth0 nodad")
    gpu[0].sysctl(ipv6__conf__all__disable_ipv6=1)
    agents = ranks(four(gpu), master="10.77.0.1", COMMKIT_TREE_DEGREE="1").meet()
    assert addresses(agents)["gpu-1"] == ["10.77.0.1"]


def test_hosts_that_have_only_link_local_addresses(fabric, ranks):
    gpu = [fabric.host(f"gpu-{i}").plug(f"fe80::77:{i}/64") for i in (1, 2, 3)]
    for host in gpu:
        host.sysctl(ipv6__conf__eth0__addr_gen_mode=1)
    agents = ranks(four(gpu), master="fe80::77:1%eth0", COMMKIT_TREE_DEGREE="1").meet()
    for name, given in addresses(agents).items():
        assert f"fe80::77:{name[-1]}%eth0" in given


def routed(fabric, number):
    """A host whose only global address is a /32 on lo, announced over two unnumbered links."""
    host = fabric.host(f"gpu-{number}")
    mine = f"10.9.8.{number}"
    for ifname in ("lan0", "lan1"):
        host.plug("fe80::2/64", network="", ifname=ifname)
    host.ip(
        f"addr add {mine}/32 dev lo",
        f"route add default src {mine}"
        + "".join(f" nexthop via inet6 fe80::1 dev lan{n}" for n in (0, 1)),
    )
    fabric.route(f"{mine}/32", host)
    return host


def test_routed_hosts_with_their_only_address_on_lo(fabric, ranks):
    gpu = [routed(fabric, i) for i in (1, 2, 3)]
    agents = ranks(four(gpu), master="10.9.8.1", COMMKIT_TREE_DEGREE="1").meet()
    assert addresses(agents).items() <= {f"gpu-{i}": [f"10.9.8.{i}"] for i in (1, 2, 3)}.items()


def test_container_bridges_do_not_come_before_the_network(fabric, ranks):
    gpu = fabric.hosts(3)
    for host in gpu:
        # Equal on every host, as container engines make them: who used one would meet himself.
        host.ip(
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
            "link add cni0 type bridge",
            "addr add 10.244.1.1/24 dev cni0",
            "link set cni0 up",
            "link add veth3f2a type veth peer name veth3f2b",
            "link set veth3f2b master cni0 up",
            "addr add 169.254.9.1/16 dev veth3f2a",
            "link set veth3f2a up",
        )
    job = ranks(four(gpu), master="10.77.0.1", COMMKIT_TREE_DEGREE="1")
    agents = job.meet()
    for name, given in addresses(agents).items():
        assert given[0] == "10.77.0." + name[-1]
        assert not any(a.startswith("169.254.") for a in given)
    assert {agent["strangers"] for agent in agents.values()} == {"0"}


def two_networks(fabric, count=3):
    """Hosts on a management network and a fast one."""
    return [
        fabric.host(f"gpu-{i}", f"10.77.0.{i}/24").plug(
            f"10.88.0.{i}/24", network="fast", ifname="fast0"
        )
        for i in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("pattern", "network"),
    [
        ("fast", "10.88"),
        ("=fast0", "10.88"),
        ("^eth,lo", "10.88"),
        ("^=fast0", "10.77"),
        ("=eth0,fast1", "10.77"),
    ],
)
def test_ifname_chooses_the_network(fabric, ranks, pattern, network):
    gpu = two_networks(fabric)
    # Only the chosen network carries anything: whoever dials the other is not answered.
    other = "fast0" if network == "10.77" else "eth0"
    for host in gpu:
        for peer in (1, 2, 3):
            host.ignore(f"{'10.88' if other == 'fast0' else '10.77'}.0.{peer}", other)
    agents = ranks(
        four(gpu), master=f"{network}.0.1", COMMKIT_IFNAME=pattern, COMMKIT_TREE_DEGREE="1"
    ).meet()
    assert (
        addresses(agents).items() <= {f"gpu-{i}": [f"{network}.0.{i}"] for i in (1, 2, 3)}.items()
    )


def test_ifname_that_matches_nothing_is_named_with_its_value(fabric, ranks):
    gpu = fabric.hosts(2)
    job = ranks(dict.fromkeys(gpu, 1), master="10.77.0.1", seconds=5, COMMKIT_IFNAME="=eth")
    first, second = job.start().outcomes()
    for name, outcome in (("gpu-1", first), ("gpu-2", second)):
        assert outcome.error == "JoinError"
        assert "COMMKIT_IFNAME==eth matches no interface" in outcome.text and name in outcome.text


def test_a_second_network_that_does_not_reach_the_others_is_given_up(fabric, ranks):
    """The address that sorts first leads nowhere: peers try the next one."""
    gpu = fabric.hosts(3)
    for i, host in enumerate(gpu, 1):
        # A cable into a network of its own; eno1 comes before eth0.
        host.plug(f"192.168.{i}.7/24", network=f"alone{i}", ifname="eno1")
    agents = ranks(four(gpu), master="10.77.0.1", COMMKIT_TREE_DEGREE="1").meet()
    for name, given in addresses(agents).items():
        assert set(given) == {f"192.168.{name[-1]}.7", f"10.77.0.{name[-1]}"}


def test_two_nics_with_the_same_route_answer_from_the_address_that_was_asked(fabric, ranks):
    """Both NICs of a host are in one subnet, and the kernel's order differs between hosts."""
    gpu = []
    for i in (1, 2, 3):
        host = fabric.host(f"gpu-{i}")
        nics = [("eno1", f"10.77.0.{i}/24"), ("enp3s0f0", f"10.77.0.{i + 100}/24")]
        for ifname, address in nics if i % 2 else reversed(nics):
            host.plug(address, ifname=ifname)
        gpu.append(host)
    agents = ranks(
        four(gpu), master="10.77.0.1", COMMKIT_IFNAME="=eno1", COMMKIT_TREE_DEGREE="1"
    ).meet()
    assert addresses(agents).items() <= {f"gpu-{i}": [f"10.77.0.{i}"] for i in (1, 2, 3)}.items()
