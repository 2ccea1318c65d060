"""The address plan of labs: everything apart, everything under the prefix that routes name."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.shape import Shape

SHAPES = st.builds(
    Shape,
    st.lists(st.integers(1, 9), min_size=1, max_size=9).map(tuple),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
)


@given(SHAPES)
@settings(max_examples=60, deadline=None)
def test_names_devices_and_addresses_occur_once(shape):
    assert len(set(shape.nodes)) == len(shape.nodes)
    addresses, ports, networks = [], [], []
    for cable in shape.cables():
        ports += [(cable.lower, cable.lower_device), (cable.upper, cable.upper_device)]
        assert {cable.lower, cable.upper} <= set(shape.nodes)
        for low, high in zip(cable.lower_addresses, cable.upper_addresses, strict=True):
            ends = [ipaddress.ip_interface(text) for text in (low, high)]
            addresses += [end.ip for end in ends]
            assert ends[0].network == ends[1].network
            # Neither the network's address nor its broadcast.
            assert all(end.ip in [*end.network.hosts()][:4] for end in ends if end.version == 4)
            networks.append(ends[0].network)
    assert len(set(addresses)) == len(addresses)
    assert len(set(ports)) == len(ports)
    assert len(set(networks)) == len(networks)
    assert max(len(device) for _, device in ports) < 16


@given(SHAPES)
@settings(max_examples=60, deadline=None)
def test_a_prefix_holds_the_hosts_of_its_leaf_and_no_others(shape):
    for group, rail in shape.leaves:
        prefixes = [ipaddress.ip_network(p) for p in shape.leaf_prefixes(group, rail)]
        wider = [ipaddress.ip_network(p) for p in shape.rail_prefixes(rail)]
        for host in shape.hosts:
            for other in range(shape.rails):
                for index, some in enumerate((host.addresses4, host.addresses6)):
                    address = ipaddress.ip_address(some[other])
                    assert (address in prefixes[index]) == ((host.group, other) == (group, rail))
                    assert (address in wider[index]) == (other == rail)


@given(SHAPES)
@settings(max_examples=30, deadline=None)
def test_the_fabric_has_the_plan_s_hosts_leaves_and_cables(shape):
    fabric = shape.fabric(1, 2)
    assert [host.name for host in fabric.hosts] == [host.name for host in shape.hosts]
    assert {switch.name for switch in fabric.switches} == set(shape.nodes) - set(fabric.host_index)
    cables = {(c.lower, c.lower_device, c.upper) for c in shape.cables() if not c.is_uplink}
    assert cables == {
        (host.name, nic.name, fabric.switches[nic.switch].name)
        for host in fabric.hosts
        for nic in host.nics
    }
    uplinks = {(c.lower, c.upper) for c in shape.cables() if c.is_uplink}
    names = [switch.name for switch in fabric.switches]
    assert uplinks == {(names[link.a], names[link.b]) for link in fabric.links}


@pytest.mark.parametrize(
    ("sizes", "spines", "rails", "words"),
    [
        ((), 1, 1, "1 or more"),
        ((2, 0), 1, 1, "1 or more"),
        ((1,), 0, 1, "1 or more"),
        ((1,), 1, 0, "1 or more"),
        ((64,) * 65537, 1, 1, "does not fit"),
        ((2,) * 4096, 65, 1, "does not fit"),
        ((70000,), 2, 1, "does not fit"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, spines, rails, words):
    with pytest.raises(UsageError, match=words):
        Shape(sizes, spines, rails)


def test_more_than_64_spines_fit():
    assert len(list(Shape((1, 1), 200).cables())) == 2 + 2 * 200
