"""Inside a host: ways between devices and NICs, NCCL's XML, nvidia-smi, and this very machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commkit.errors import TopologyError
from commkit.topology import read, read_text
from commkit.topology.build import with_insides
from commkit.topology.fabric import Device, Host, Nic
from commkit.topology.inside import nearest_nics, pci_ways, ways
from commkit.topology.readers import node

RECORDED = Path(__file__).resolve().parent.parent / "recorded" / "topology"


def test_the_way_between_two_pci_devices_follows_the_bridges():
    parents = {
        "cpu0": None, "cpu1": None, "cpu2": None,
        "sw": "cpu0", "port1": "sw", "port2": "sw", "gpu": "port1", "nic": "port1",
        "far": "port2", "root": "cpu0", "other": "root", "bare": "cpu0",
        "same-node": "cpu1", "other-node": "cpu2",
    }  # fmt: skip
    numa = {"cpu0": "0", "cpu1": "0", "cpu2": "1"}
    names = ["gpu", "nic", "far", "other", "bare", "same-node", "other-node"]
    found = {b: kind for (a, b), kind in pci_ways(parents, numa, names).items() if a == "gpu"}
    assert found == {
        "nic": "PIX",
        "far": "PXB",
        "other": "PHB",
        "bare": "PHB",
        "same-node": "NODE",
        "other-node": "SYS",
    }


def test_host_bridges_of_unknown_numa_nodes_are_far():
    assert pci_ways({"c": None, "d": None, "a": "c", "b": "d"}, {}, ["a", "b"]) == {
        ("a", "b"): "SYS"
    }


def test_the_nearest_nic_wins_and_ties_are_spread():
    devices = tuple(Device(f"GPU{i}") for i in range(4))
    nics = tuple(Nic(f"mlx5_{i}") for i in range(3))
    kinds = {0: "NODE", 1: "NODE", 2: "SYS"}
    paths = [(d.name, f"mlx5_{i}", kind) for d in devices for i, kind in kinds.items()]
    host = Host("h", nics, devices, paths=(*paths[1:], ("GPU0", "mlx5_0", "PIX")))
    assert nearest_nics(host) == {
        "GPU0": "mlx5_0", "GPU1": "mlx5_1", "GPU2": "mlx5_0", "GPU3": "mlx5_1"
    }  # fmt: skip
    assert set(nearest_nics(host, active={"mlx5_2"}).values()) == {"mlx5_2"}
    assert nearest_nics(host, active=()) == {}
    assert nearest_nics(Host("h", nics)) == {}


def test_an_nccl_dump_gives_devices_speeds_and_ways():
    (host,) = read(str(RECORDED / "hgx.nccl.xml")).hosts
    assert (host.name, host.id) == ("hgx", "0x9f86d081884c7d65")
    assert [device.name for device in host.devices] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert host.devices[2].busid == "0000:32:00.0"
    assert host.devices[2].cpus == "32-55"
    assert {nic.name: nic.gbps for nic in host.nics}["mlx5_3"] == 400
    between = ways(host)
    assert between["GPU0", "GPU3"] == "NV18"
    assert between["GPU0", "mlx5_0"] == "PIX"
    assert between["GPU0", "mlx5_1"] == "PHB"
    assert between["GPU0", "eth0"] == "PHB"
    assert between["mlx5_3", "GPU0"] == "SYS"
    assert nearest_nics(host) == {f"GPU{i}": f"mlx5_{i}" for i in range(4)}


def test_a_fused_dump_of_several_hosts_is_several_hosts_of_one_domain():
    text = (RECORDED / "hgx.nccl.xml").read_text()
    inner = text.partition(">\n")[2].replace("</system>\n", "")
    fused = f"<system>{inner}{inner.replace('0x9f86', '0x1111')}</system>"
    fabric = read_text(fused, "nvl.xml")
    assert [host.name for host in fabric.hosts] == ["nvl-0", "nvl-1"]
    assert fabric.domains() == (0, 0)
    assert [len(host.devices) for host in fabric.hosts] == [4, 4]


def test_invented_bus_ids_may_repeat_and_real_ones_may_not():
    def text(bus):
        gpus = "".join(
            f'<pci busid="{bus}" class="0x060400">'
            f'<pci busid="0000:0{i}:00.0" class="0x030200"/></pci>'
            for i in range(2)
        )
        return f'<system>\n<cpu numaid="0" arch="arm64">{gpus}</cpu></system>'

    (host,) = read_text(text("ffff:ff:01.0")).hosts
    assert ways(host)["GPU0", "GPU1"] == "PHB"
    with pytest.raises(
        TopologyError, match=r":2:\d+: busid 0000:ff:01.0 occurs twice, first on line 2"
    ):
        read_text(text("0000:ff:01.0"))


def test_a_matrix_of_eight_gpus_is_read_whole():
    (host,) = read(str(RECORDED / "hgx.topo-m.txt")).hosts
    assert len(host.paths) == 18 * 17 // 2
    assert nearest_nics(host) == {f"GPU{i}": f"mlx5_{i}" for i in range(8)}
    assert {device.numa for device in host.devices[4:]} == {1}
    assert host.devices[0].cpus == "0-55,112-167"


@pytest.fixture
def machine(tmp_path):
    """A file system with the sysfs of a host: two sockets, each a switch with a GPU and a NIC."""
    sys = tmp_path / "sys"

    def put(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def device(chain, kind, vendor, numa):
        path = sys / "devices" / "/".join(chain)
        put(path / "class", kind)
        put(path / "vendor", vendor)
        put(path / "numa_node", str(numa))
        put(path / "local_cpulist", "0-31" if numa == 0 else "32-63")
        link = sys / "bus/pci/devices" / chain[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(path, link.parent))
        return path

    def rdma(name, path, states, rate="400 Gb/sec (4X NDR)"):
        entry = sys / "class/infiniband" / name
        entry.mkdir(parents=True)
        (entry / "device").symlink_to(os.path.relpath(path, entry))
        for port, state in enumerate(states, 1):
            put(entry / f"ports/{port}/state", state)
            put(entry / f"ports/{port}/rate", rate)

    def net(name, path, speed, state="up"):
        entry = sys / "class/net" / name
        put(entry / "speed", speed)
        put(entry / "operstate", state)
        if path is not None:
            (entry / "device").symlink_to(os.path.relpath(path, entry))

    nics = []
    for socket in range(2):
        top = [f"pci000{socket}:00", f"000{socket}:00:01.0"]
        device(top, "0x060400", "0x8086", socket)
        up = [*top, f"000{socket}:01:00.0"]
        device(up, "0x060400", "0x1000", socket)
        device([*up, f"000{socket}:02:00.0"], "0x030200", "0x10de", socket)
        nics.append(device([*up, f"000{socket}:03:00.0"], "0x020700", "0x15b3", socket))
    rdma("mlx5_0", nics[0], ["4: ACTIVE"])
    rdma("mlx5_1", nics[1], ["4: ACTIVE", "1: DOWN"])
    net("ib0", nics[0], "400000")
    slow = device(["pci0000:00", "0000:00:02.0"], "0x020000", "0x8086", 0)
    net("eno1", slow, "10000")
    spare = device(["pci0000:00", "0000:00:03.0"], "0x020000", "0x8086", 0)
    net("eno2", spare, "-1", "down")
    net("lo", None, "")
    put(
        tmp_path / "proc/driver/nvidia/gpus/0000:02:00.0/information",
        "Model: \t NVIDIA H100\nIRQ: 1",
    )
    return tmp_path


def test_sysfs_gives_devices_nics_and_ways(machine):
    fabric = node.read(str(machine), "gpu-01")
    (host,) = fabric.hosts
    assert host.devices == (
        Device("GPU0", "0000:02:00.0", 0, "0-31", "NVIDIA H100"),
        Device("GPU1", "0001:02:00.0", 1, "32-63"),
    )
    assert host.nics == (
        Nic("mlx5_0", gbps=400, busid="0000:03:00.0", numa=0),
        Nic("mlx5_1", port=1, gbps=400, busid="0001:03:00.0", numa=1),
        Nic("eno1", gbps=10, busid="0000:00:02.0", numa=0),
    )
    assert fabric.notes == (
        "mlx5_1 port 2 is 1: DOWN and was left out",
        "eno2 is down and was left out",
    )
    between = ways(host)
    assert between["GPU0", "mlx5_0"] == "PIX"
    assert between["GPU0", "eno1"] == "PHB"
    assert between["GPU0", "GPU1"] == "SYS"
    assert nearest_nics(host) == {"GPU0": "mlx5_0", "GPU1": "mlx5_1"}
    assert "0001:01:00.0" in node.addresses(str(machine))


def test_what_hosts_know_is_added_to_what_the_network_knows(machine):
    (inside,) = node.read(str(machine), "gpu-01").hosts
    outside = read(str(RECORDED / "ibnetdiscover.out"))
    both = with_insides(outside, [inside, Host("new", (Nic("eth0", 3),))])
    host = both.hosts[both.host_index["gpu-01"]]
    assert host.devices == inside.devices
    assert host.paths == inside.paths
    assert [(nic.name, nic.rail, nic.gbps, nic.busid) for nic in host.nics] == [
        ("mlx5_0", 0, 10.0, "0000:03:00.0"),
        ("mlx5_1", 1, 10.0, "0001:03:00.0"),  # its port 1; the network did not count ports
        ("eno1", None, 10.0, "0000:00:02.0"),
    ]
    assert both.levels() == with_insides(outside, [Host("new")]).levels()
    assert [both.hosts[i].name for i in both.unplaced] == ["new"]


def test_without_a_sysfs_devices_are_unknown_rather_than_absent(tmp_path):
    (host,) = node.read(str(tmp_path), "x").hosts
    assert host == Host("x", (), None)


def test_this_machine_can_be_read():
    (host,) = node.read().hosts
    assert host.name == os.uname().nodename
    assert {nic.name for nic in host.nics} <= set(os.listdir("/sys/class/net")) | set(
        os.listdir("/sys/class/infiniband") if Path("/sys/class/infiniband").is_dir() else ()
    )
