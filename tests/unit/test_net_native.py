"""Addresses, identity, peers and digests of the native module."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import pwd
import runpy
import socket
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

# The first test also compiles the module.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def native(repository):
    return runpy.run_path(str(repository / "tests/cpp/native_build.py"))["build"]()


# --- Interfaces -------------------------------------------------------------------------------

NAMES = ["lo", "eth0", "eth1", "eth10", "bond0", "bond0.2093", "docker0", "ib0"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        # NCCL's documentation of NCCL_SOCKET_IFNAME.
        ("eth", ["eth0", "eth1", "eth10"]),
        ("=eth1", ["eth1"]),
        ("=eth0,eth1", ["eth0", "eth1"]),
        ("^docker", ["lo", "eth0", "eth1", "eth10", "bond0", "bond0.2093", "ib0"]),
        ("^=docker0,lo", ["eth0", "eth1", "eth10", "bond0", "bond0.2093", "ib0"]),
        ("eth1", ["eth1", "eth10"]),
        ("bond0", ["bond0", "bond0.2093"]),
        ("^bond0.2093", ["lo", "eth0", "eth1", "eth10", "bond0", "docker0", "ib0"]),
        ("", NAMES),
        ("ib,eth0", ["eth0", "ib0"]),
        ("=eth", []),
        ("ib0,", ["ib0"]),
        ("^ib0,", NAMES[:-1]),
    ],
)
def test_interface_patterns_are_those_of_nccl(native, pattern, expected):
    assert native.match_interfaces(pattern, NAMES) == expected


LO = [("lo", "127.0.0.1/8"), ("lo", "::1/128")]
CHOICES = {
    "bridges and container links come after the real one": (
        [
            ("lo", "127.0.0.1/8"),
            ("docker0", "172.17.0.1/16"),
            ("veth3f2a", "169.254.9.1/16"),
            ("cni0", "10.244.1.1/24"),
            ("ens5", "10.4.0.11/20"),
        ],
        "",
        ["10.4.0.11", "10.244.1.1", "172.17.0.1"],
    ),
    "a routed host's only address is on lo": (
        [*LO, ("lo", "10.9.8.7/32"), ("lan0", "fe80::1/64"), ("lan1", "fe80::2/64")],
        "",
        ["10.9.8.7"],
    ),
    "a virtual address on lo comes after the host's own": (
        [*LO, ("lo", "10.0.0.99/32"), ("eth0", "10.0.0.5/24")],
        "",
        ["10.0.0.5", "10.0.0.99"],
    ),
    "127.0.1.1 is loopback whatever /etc/hosts says": (
        [("lo", "127.0.1.1/8"), ("eth0", "10.4.0.11/24")],
        "",
        ["10.4.0.11"],
    ),
    "only IPv6": ([*LO, ("eth0", "fe80::1/64"), ("eth0", "2001:db8::7/64")], "", ["2001:db8::7"]),
    "unique local IPv6": ([("eth0", "fd00::7/64")], "", ["fd00::7"]),
    "IPv4 before IPv6": (
        [("eth0", "2001:db8::7/64"), ("eth1", "10.1.0.1/24"), ("eth0", "10.0.0.1/24")],
        "",
        ["10.0.0.1", "10.1.0.1", "2001:db8::7"],
    ),
    "link-local is the last resort": (
        [*LO, ("eth0", "169.254.3.4/16"), ("eth0", "fe80::1/64")],
        "",
        ["169.254.3.4", "fe80::1%eth0"],
    ),
    "loopback when there is nothing else": (LO, "", ["127.0.0.1", "::1"]),
    "nothing at all": ([], "", []),
    "unspecified and multicast are nobody's": (
        [("eth0", "0.0.0.0/0"), ("eth0", "ff02::1/8")],
        "",
        [],
    ),
    "hosts agree whatever the kernel's order": (
        [("eth10", "10.0.10.1/24"), ("eth2", "10.0.2.1/24"), ("eth1", "10.0.1.1/24")],
        "",
        ["10.0.1.1", "10.0.2.1", "10.0.10.1"],
    ),
    "an interface's first address stays first": (
        [("eth0", "10.0.0.9/24"), ("eth0", "10.0.0.1/24")],
        "",
        ["10.0.0.9", "10.0.0.1"],
    ),
    "a cloud's /32 on a real interface is ordinary": (
        [("lo", "10.0.0.1/32"), ("ens4", "10.128.0.2/32")],
        "",
        ["10.128.0.2", "10.0.0.1"],
    ),
    "a /31 between two switches comes after the host's own": (
        [("swp1", "10.255.0.1/31"), ("lo", "10.9.8.7/32")],
        "",
        ["10.9.8.7", "10.255.0.1"],
    ),
    "tailscale comes last": (
        [("tailscale0", "100.64.0.5/32"), ("wg0", "10.7.0.1/24"), ("eth0", "10.0.0.1/24")],
        "",
        ["10.0.0.1", "100.64.0.5", "10.7.0.1"],
    ),
    "a pattern chooses": (
        [("eth0", "10.0.0.1/24"), ("ib0", "10.8.0.1/24"), ("docker0", "172.17.0.1/16")],
        "=ib0,docker0",
        ["10.8.0.1", "172.17.0.1"],
    ),
    "a pattern excludes": (
        [*LO, ("eth0", "10.0.0.1/24"), ("eth1", "10.1.0.1/24")],
        "^eth0",
        ["10.1.0.1"],
    ),
    "a pattern for lo takes lo": ([*LO, ("eth0", "10.0.0.1/24")], "=lo", ["127.0.0.1", "::1"]),
    "a pattern that matches nothing": ([("eth0", "10.0.0.1/24")], "ib", []),
}


@pytest.mark.parametrize("name", CHOICES)
def test_addresses_are_chosen_by_their_scope(native, name):
    addresses, pattern, expected = CHOICES[name]
    assert native.choose_addresses(addresses, pattern) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "eth0",
        "host.example/24",
        "10.0.0.1/33",
        "::1/129",
        "10.0.0.1/",
        "10.0.0.1/-1",
        "10.0.1/8",
    ],
)
def test_what_is_no_address_is_named(native, text):
    with pytest.raises(ValueError, match="of interface eth0: expected a numeric address") as caught:
        native.choose_addresses([("eth0", text)], "")
    assert f"address {text} " in str(caught.value)


def test_the_interfaces_of_this_host(native):
    found = native.interfaces()
    (loopback,) = [one for one in found if one["address"] == "127.0.0.1"]
    assert loopback == {
        "name": "lo",
        "address": "127.0.0.1",
        "prefix": "8",
        "flags": "up,running,loopback",
        "scope": "loopback",
    }
    for one in found:
        ipaddress.ip_interface(f"{one['address']}/{one['prefix']}")
    chosen = native.choose_addresses(
        [(one["name"], f"{one['address']}/{one['prefix']}") for one in found], ""
    )
    assert set(chosen) <= {one["address"] for one in found}
    assert chosen


def test_the_best_addresses_of_a_host_with_thousands_are_few(native):
    services = [("kube-ipvs0", f"10.96.{n // 250}.{n % 250 + 1}/32") for n in range(5000)]
    chosen = native.choose_addresses([*services, ("eth0", "10.0.0.7/24")], "")
    assert chosen[0] == "10.0.0.7" and len(chosen) == 32


# --- Numeric addresses ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ip", "printed", "scope"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.1:7", "private"),
        ("8.8.8.8", "8.8.8.8", "8.8.8.8:7", "global"),
        ("::1", "::1", "[::1]:7", "loopback"),
        ("[2001:db8::7]", "2001:db8::7", "[2001:db8::7]:7", "global"),
        ("2001:DB8:0:0::7", "2001:db8::7", "[2001:db8::7]:7", "global"),
        ("fe80::1%lo", "fe80::1%lo", "[fe80::1%lo]:7", "link"),
        ("[fe80::1%1]", "fe80::1%lo", "[fe80::1%lo]:7", "link"),
        ("fe80::1%99999", "fe80::1%99999", "[fe80::1%99999]:7", "link"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1", "[::ffff:127.0.0.1]:7", "loopback"),
        ("127.255.1.1", "127.255.1.1", "127.255.1.1:7", "loopback"),
        ("100.64.0.1", "100.64.0.1", "100.64.0.1:7", "private"),
        ("172.32.0.1", "172.32.0.1", "172.32.0.1:7", "global"),
        ("0.0.0.0", "0.0.0.0", "0.0.0.0:7", "none"),
        ("ff02::1", "ff02::1", "[ff02::1]:7", "none"),
    ],
)
def test_numeric_addresses_are_read_and_written(native, text, ip, printed, scope):
    assert native.parse_address(text, 7) == (ip, printed, scope)


@pytest.mark.parametrize(
    "text",
    [
        *("", "localhost", "10.0.0", "10.0.0.1:80", "[10.0.0.1]", "10.0.0.256", "1"),
        *("[::1", "::1]", "[]", "::1\0", "[::1]:80", " 10.0.0.1", "10.0.0.1%lo"),
        *("fe80::1%no-such-if", "fe80::1%"),
    ],
)
def test_what_is_not_numeric_is_refused(native, text):
    assert native.parse_address(text, 7) is None


@settings(deadline=None)
@given(address=st.ip_addresses())
def test_any_address_is_read_as_pythons_ipaddress_reads_it(native, address):
    ip, text, scope = native.parse_address(str(address), 65535)
    assert ipaddress.ip_address(ip) == address
    assert text == (f"[{ip}]:65535" if address.version == 6 else f"{ip}:65535")
    if address.version == 4 or address.ipv4_mapped is None:
        assert (scope == "loopback") == address.is_loopback
        assert (scope == "link") == address.is_link_local


# --- Identity and peers -----------------------------------------------------------------------


def test_identity_is_what_the_kernel_says(native):
    with open("/proc/sys/kernel/random/boot_id") as boot:
        boot_id = boot.read().strip()
    assert native.host_identity() == {
        "boot_id": boot_id,
        "netns": str(os.stat("/proc/self/ns/net").st_ino),
        "mntns": str(os.stat("/proc/self/ns/mnt").st_ino),
        "hostname": socket.gethostname(),
    }


def test_the_credentials_of_a_unix_peer(native):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(b"\0commkit-test-" + os.urandom(8))
        listener.listen()
        script = (
            "import socket, sys; s = socket.socket(socket.AF_UNIX); "
            "s.connect(bytes.fromhex(sys.argv[1])); sys.stdin.read()"
        )
        name = listener.getsockname().hex()
        with subprocess.Popen([sys.executable, "-c", script, name], stdin=subprocess.PIPE) as child:
            accepted, _ = listener.accept()
            with accepted:
                assert native.peer_credentials(accepted.fileno()) == (child.pid, os.getuid())


def test_a_failing_call_is_named(native):
    with pytest.raises(
        RuntimeError, match=r"getsockopt\(SO_PEERCRED\) of descriptor -1: .*errno 9"
    ):
        native.peer_credentials(-1)
    with (
        socket.socket() as unconnected,
        pytest.raises(RuntimeError, match="getpeername of descriptor .*errno 107"),
    ):
        native.tcp_owner_uid(unconnected.fileno(), "")


CONNECT = """
import os, socket, sys
uid, family, host, port = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
if uid != os.getuid():
    os.setuid(uid)
s = socket.socket(family)
s.connect((host, port))
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["diag", "proc", "either"])
@pytest.mark.parametrize(
    ("listen", "connect"),
    [
        ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "127.0.0.1")),
        ((socket.AF_INET6, "::1"), (socket.AF_INET6, "::1")),
        # torch's client uses an IPv6 socket for IPv4 addresses too.
        ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::ffff:127.0.0.1")),
        ((socket.AF_INET6, "::"), (socket.AF_INET, "127.0.0.1")),
    ],
    ids=["v4", "v6", "v6-socket", "dual-listener"],
)
def test_the_owner_of_the_other_end_of_a_tcp_connection(native, listen, connect, how):
    # As another user where that is possible: then it cannot be this end's owner by mistake.
    uid = pwd.getpwnam("nobody").pw_uid if os.getuid() == 0 else os.getuid()
    family, address = listen
    with socket.socket(family) as listener:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        arguments = [str(uid), str(int(connect[0])), connect[1], str(port)]
        command = [sys.executable, "-c", CONNECT, *arguments]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as child:
            accepted, _ = listener.accept()
            with accepted:
                assert native.tcp_owner_uid(accepted.fileno(), how) == uid
            child.stdin.close()


@pytest.mark.parametrize("how", ["diag", "proc"])
def test_a_connection_that_does_not_exist_has_no_owner(native, how):
    """Not even that of a listener on the same port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = listener.accept()
            with accepted:
                mine = client.getsockname()[1]
                ask = native.tcp_owner_uid_of
                assert ask("127.0.0.1", port, "127.0.0.1", mine, how) == os.getuid()
                for local, remote in ((port, port), (mine, mine), (1, mine), (1, port)):
                    assert ask("127.0.0.1", local, "127.0.0.1", remote, how) is None
                assert ask("127.0.0.2", port, "127.0.0.1", mine, how) is None


# --- Digests ----------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=300))
def test_sha256(native, data):
    assert native.sha256(data) == hashlib.sha256(data).digest()


@settings(max_examples=300, deadline=None)
@given(key=st.binary(max_size=200), data=st.binary(max_size=300))
def test_hmac_sha256(native, key, data):
    assert native.hmac_sha256(key, data) == hmac.digest(key, data, "sha256")


def test_a_long_message(native):
    data = struct.pack("<Q", 0x0123456789ABCDEF) * (1 << 20)
    assert native.sha256(data) == hashlib.sha256(data).digest()
    assert native.hmac_sha256(data, data) == hmac.digest(data, data, "sha256")


@given(a=st.binary(max_size=40), b=st.binary(max_size=40))
def test_comparison_is_equality(native, a, b):
    assert native.equal_in_constant_time(a, b) == (a == b)
    assert native.equal_in_constant_time(a, bytes(a))


def test_random_bytes_differ(native):
    assert len(native.random_bytes(1000)) == 1000
    assert native.random_bytes(0) == b""
    assert len({native.random_bytes(16) for _ in range(1000)}) == 1000
