"""Hosts and ports, IPv6 above all; and the ports that ranks agree on unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commkit.endpoint import (
    DEFAULT_EPHEMERAL,
    Endpoint,
    derived_ports,
    ephemeral_range,
    parse_address,
    parse_endpoint,
    parse_host,
    parse_port,
)
from commkit.errors import LaunchError, UsageError
from commkit.launch import resolve

CASES = {
    case["id"]: case
    for case in json.loads(
        (Path(__file__).resolve().parent.parent / "cases" / "endpoint.json").read_text()
    )
}


def _address_rows():
    case = CASES["NET-01"]
    for text, expected in zip(case["input"]["data"], case["expected"]["value"], strict=True):
        yield text.removeprefix("tcp://"), expected


@pytest.mark.parametrize(("text", "expected"), list(_address_rows()))
def test_reported_addresses(text, expected):
    if expected == "reject-ambiguous":
        with pytest.raises(UsageError, match="needs brackets"):
            parse_address(text)
        return
    found = parse_address(text)
    host, *rest = expected.split()
    labels = dict(zip(rest[::2], rest[1::2], strict=True))
    assert found == Endpoint(host, int(labels.get("port", 0)), labels.get("scope", ""))


@pytest.mark.parametrize("row", range(3))
def test_reported_endpoints_with_a_path(row):
    case = CASES["NET-02"]
    expected = case["expected"]["value"][row]
    found = parse_endpoint(case["input"]["data"][row])
    assert found == Endpoint(expected["host"], expected["port"], path=expected["prefix"])


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        (Endpoint("fd00:12:ab::2", 29521, path="job/7/3"), "[fd00:12:ab::2]:29521/job/7/3"),
        (Endpoint("fe80::1", 1, "eth0"), "[fe80::1%eth0]:1"),
        (Endpoint("10.0.0.5", 29500), "10.0.0.5:29500"),
        (Endpoint("node7"), "node7"),
    ],
)
def test_only_ipv6_is_printed_in_brackets_and_reads_back(endpoint, text):
    assert str(endpoint) == text
    assert (parse_endpoint if endpoint.port else parse_address)(text) == endpoint


@pytest.mark.parametrize("text", ["[2001:db8::7]", "2001:db8::7", " 2001:db8::7 "])
def test_master_addr_takes_ipv6_with_and_without_brackets(text):
    spec = resolve({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": text, "MASTER_PORT": "29500"})
    assert (spec.root.host, spec.root.ports) == ("2001:db8::7", (29500,))


@pytest.mark.parametrize("text", ["tcp://[2001:db8::7]:29500", "tcp://[2001:db8::7]:29500/"])
def test_a_url_takes_bracketed_ipv6(text):
    spec = resolve({}, init_method=text, rank=0, world_size=2)
    assert (spec.root.host, spec.root.ports) == ("2001:db8::7", (29500,))


def test_a_url_refuses_ipv6_without_brackets():
    with pytest.raises(UsageError, match=r"2001:db8::7:29500.*needs brackets: \[IPv6\]:port"):
        resolve({}, init_method="tcp://2001:db8::7:29500", rank=0, world_size=2)


def test_a_scope_in_a_url_may_be_percent_encoded():
    assert parse_address("[fe80::1%25eth0]:29500") == Endpoint("fe80::1", 29500, "eth0")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[::1",
        "[::1]x",
        "[10.0.0.5]:1",
        "a b",
        "h:",
        "h:0",
        "h:65536",
        "h:x",
        "-h",
        "10.0.0.256",
    ],
)
def test_what_is_no_address_is_refused_by_value(text):
    with pytest.raises(UsageError) as caught:
        parse_address(text, "PEER")
    assert f"PEER={text!r}" in str(caught.value)


@pytest.mark.parametrize("text", ["h1", "h1/job", "[::1]", "h1:1:2", "fd00::2/x"])
def test_an_endpoint_needs_its_port(text):
    if text == "fd00::2/x":
        # The rule "the last colon" reads this as host fd00: and port 2: refused, not guessed.
        with pytest.raises(UsageError, match="the port is missing"):
            parse_endpoint(text)
        return
    with pytest.raises(UsageError):
        parse_endpoint(text)


def test_a_host_with_a_port_says_where_the_port_goes():
    with pytest.raises(LaunchError, match=r"MASTER_ADDR='n1:29500'.*write 'n1' and give the port"):
        parse_host("n1:29500", "MASTER_ADDR", LaunchError)


@pytest.mark.parametrize("text", ["0", "65536", "", "-1", "80x", "99999999999"])
def test_a_port_is_between_1_and_65535(text):
    with pytest.raises(UsageError, match="expected a port, 1-65535"):
        parse_port(text)


def test_the_ephemeral_range_is_the_kernels():
    low, high = ephemeral_range()
    assert Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split() == [
        str(low),
        str(high),
    ]


@pytest.mark.parametrize("content", [None, "", "1 2 3", "x y"])
def test_an_unreadable_range_counts_as_the_kernels_default(tmp_path, content):
    file = tmp_path / "range"
    if content is not None:
        file.write_text(content)
    assert ephemeral_range(str(file)) == DEFAULT_EPHEMERAL


def test_derived_ports_stay_out_of_both_ephemeral_ranges():
    for job in range(200):
        ports = derived_ports(f"{job}.0.1000", 8, (15000, 25000))
        assert len(set(ports)) == 8
        for port in ports:
            assert 10000 <= port < 15000 or 25000 < port < 32768 or 60999 < port < 65536


def test_hosts_with_different_ranges_keep_the_common_ports_in_order():
    wide = derived_ports("7.0.1000", 40, DEFAULT_EPHEMERAL)
    narrow = derived_ports("7.0.1000", 8, (15000, 25000))
    assert [port for port in wide if not 15000 <= port <= 25000][:8] == list(narrow)


def test_no_port_is_derived_where_everything_is_ephemeral():
    assert derived_ports("7.0.1000", 8, (1024, 65535)) == ()
