"""The model of Linux's multipath hash is what this kernel's routing answers."""

from __future__ import annotations

import os
import random
import subprocess

import pytest

from commkit.topology.ecmp import TCP, UDP, FiveTuple, Linux

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

PROTOCOLS = {TCP: "tcp", UDP: "udp"}


@pytest.fixture
def router():
    """A namespace that forwards from `in` over equal-cost next hops; gives its name."""
    name = f"commkit-ecmp-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)
    yield name
    subprocess.run(["ip", "netns", "delete", name], check=True)


def configure(name, seed, weights, policy):
    lines = ["link set lo up", "link add in type veth peer name out", "link set in up"]
    lines.append("link set out up")
    lines.append("addr add 10.1.0.1/16 dev in")
    hops = ""
    for index, weight in enumerate(weights):
        lines.append(f"link add up{index} type veth peer name down{index}")
        lines += [f"link set up{index} up", f"link set down{index} up"]
        lines.append(f"addr add 172.16.{index}.1/30 dev up{index}")
        hops += f" nexthop via 172.16.{index}.2 dev up{index} weight {weight}"
    lines.append("route add 10.2.0.0/16" + hops)
    batch(name, lines)
    for key, value in (
        ("ip_forward", 1),
        ("conf/all/rp_filter", 0),
        ("conf/in/rp_filter", 0),
        ("fib_multipath_hash_policy", policy),
        ("fib_multipath_hash_fields", 55),
        ("fib_multipath_hash_seed", seed),
    ):
        path = f"/proc/sys/net/ipv4/{key}"
        done = subprocess.run(
            ["ip", "netns", "exec", name, "sh", "-c", f"echo {value} > {path}"],
            capture_output=True,
            text=True,
        )
        if done.returncode and key == "fib_multipath_hash_seed":
            pytest.skip("this kernel has no fib_multipath_hash_seed (6.11 has)")
        assert done.returncode == 0, done.stderr


def batch(name, lines):
    done = subprocess.run(
        ["ip", "-n", name, "-o", "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("policy", [1, 3])
@pytest.mark.parametrize("weights", [(1,) * 4, (1, 2, 5)])
def test_the_model_is_what_the_kernel_answers(router, policy, weights):
    draw = random.Random(policy)
    seed = draw.randrange(1, 1 << 32)
    configure(router, seed, weights, policy)
    model = Linux(seed, weights, policy)
    flows = [
        FiveTuple(
            f"10.1.{draw.randrange(256)}.{draw.randrange(2, 255)}",
            f"10.2.{draw.randrange(256)}.{draw.randrange(2, 255)}",
            draw.choice((TCP, UDP)),
            draw.randrange(1, 1 << 16),
            draw.randrange(1, 1 << 16),
        )
        for _ in range(256)
    ]
    asked = [
        f"route get {f.destination} from {f.source} iif in ipproto {PROTOCOLS[f.protocol]} "
        f"sport {f.source_port} dport {f.destination_port}"
        for f in flows
    ]
    lines = [line for line in batch(router, asked).splitlines() if " dev up" in line]
    told = [int(line.split(" dev up")[1].split()[0]) for line in lines]
    assert told == [model.path(f) for f in flows]
    assert len(set(told)) == len(weights)
