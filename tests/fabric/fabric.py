"""Hosts and networks out of network namespaces: real interfaces, routes, names and silence.

A Fabric is a namespace that holds one bridge a network; a Host is a namespace with its own host
name, /etc/hosts and /etc/resolv.conf, whose interfaces are plugged into bridges.  All namespaces
are named commkit-<pid>-..., and none survives its Fabric.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

#: ip netns exec mounts what lies here over /etc of the process that it starts.
ETC = Path("/etc/netns")
#: How long agents may outlive a test's ranks.
GRACE_SECONDS = 5.0
#: A nameserver that no route leads to: a query fails at once and asks nobody.
NO_NAMESERVER = "192.0.2.1"


def _batch(namespace, *lines):
    """Runs `ip` commands inside a namespace, all in one process."""
    done = subprocess.run(
        ["ip", "-n", namespace, "-batch", "-"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"ip -n {namespace}: {done.stderr.strip()}\n" + "\n".join(lines)


def _sysctl(namespace, **values):
    # /proc/sys/net shows the network namespace of whoever opens it.
    writes = [
        f"echo {value} > /proc/sys/net/{name.replace('__', '/')}" for name, value in values.items()
    ]
    subprocess.run(
        ["ip", "netns", "exec", namespace, "sh", "-ec", "\n".join(writes)],
        check=True,
        capture_output=True,
    )


class Host:
    """One namespace with a host name; `plug` gives it interfaces."""

    def __init__(self, fabric, name):
        self.fabric, self.name = fabric, name
        self.namespace = fabric.add_namespace(name)
        self.ports = []
        etc = ETC / self.namespace
        etc.mkdir(parents=True)
        self.hosts = etc / "hosts"
        self.resolv = etc / "resolv.conf"
        self.set_hosts()
        self.set_resolver()
        _sysctl(
            self.namespace,
            # Addresses are usable at once, not after a second of looking for duplicates.
            ipv6__conf__all__accept_dad=0,
            ipv6__conf__default__accept_dad=0,
            ipv6__conf__default__addr_gen_mode=0,
            ipv6__conf__lo__disable_ipv6=0,
        )
        self.ip("link set lo up")

    def set_hosts(self, *lines):
        """/etc/hosts of this host.  Written in place: running processes have it mounted."""
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines]) + "\n")

    def set_resolver(self, *lines):
        """/etc/resolv.conf of this host."""
        nameserver = f"nameserver {self.fabric.nameserver or NO_NAMESERVER}"
        self.resolv.write_text("\n".join([nameserver, *lines]) + "\n")

    def ip(self, *lines):
        _batch(self.namespace, *lines)

    def tc(self, line):
        subprocess.run(["tc", "-n", self.namespace, *line.split()], check=True)

    def sysctl(self, **values):
        _sysctl(self.namespace, **values)

    def plug(self, *addresses, network="net", ifname="eth0"):
        """A cable from a new interface to a network's bridge; addresses are ADDRESS/PREFIX."""
        port = self.fabric.add_port(self, ifname, network)
        self.ports.append(port)
        self.ip(
            *(
                f"addr add {address} dev {ifname}" + (" nodad" if ":" in address else "")
                for address in addresses
            ),
            f"link set {ifname} up",
        )
        return self

    def cut(self):
        """Unplugs every cable at the far end: the host sees a carrier, and silence."""
        for port in self.ports:
            _batch(self.fabric.namespace, f"link set {port} nomaster")

    def ignore(self, address, ifname="eth0"):
        """What this host sends to `address` is lost on the way, without an error."""
        self.ip(f"neigh replace {address} lladdr 02:00:00:00:00:99 dev {ifname} nud permanent")

    def command(self, *command):
        """`command` as a process of this host; its pid is that of the command itself."""
        rename = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.name)
        return ["ip", "netns", "exec", self.namespace, *rename, *map(str, command)]


class Fabric:
    """Networks and hosts; a context manager.  Hosts made later ask `nameserver`, if one is set.

    `label` tells the fabrics of one process apart, where a second one exists at the same time.
    """

    def __init__(self, label=""):
        self.prefix = f"commkit-{os.getpid()}-{label}"
        self.nameserver = ""
        self.grace_seconds = GRACE_SECONDS
        self.namespaces = []
        self.networks = set()
        self.processes = []
        _sweep()
        self.namespace = self.add_namespace("fabric")
        _batch(self.namespace, "link set lo up")

    def ip(self, *lines):
        _batch(self.namespace, *lines)

    def add_namespace(self, name):
        namespace = self.prefix + name
        subprocess.run(["ip", "netns", "add", namespace], check=True)
        self.namespaces.append(namespace)
        return namespace

    def network(self, name="net", *addresses):
        """A bridge that forwards at once; `addresses` are its own, for services on it."""
        if name not in self.networks:
            self.networks.add(name)
            _batch(
                self.namespace,
                f"link add {name} type bridge forward_delay 0 mcast_snooping 0",
                f"link set {name} up",
            )
        for address in addresses:
            _batch(self.namespace, f"addr add {address} dev {name}")

    def add_port(self, host, ifname, network):
        """A veth pair between a host and this namespace, in `network`'s bridge unless it is ''."""
        port = f"p{self.namespaces.index(host.namespace)}-{ifname}"
        lines = [
            f"link add {port} type veth peer name {ifname} netns {host.namespace}",
            f"link set {port} up",
        ]
        if network:
            self.network(network)
            lines.insert(1, f"link set {port} master {network}")
        _batch(self.namespace, *lines)
        return port

    def route(self, prefix, host):
        """Makes this namespace a router that reaches `prefix` through the host's cables."""
        _sysctl(self.namespace, ipv4__ip_forward=1, ipv6__conf__default__accept_dad=0)
        hops = ""
        for port in host.ports:
            # The same address on every link, as unnumbered BGP sessions have it.
            _batch(self.namespace, f"addr add fe80::1/64 dev {port} nodad")
            hops += f" nexthop via inet6 fe80::2 dev {port}"
        _batch(self.namespace, f"route add {prefix}{hops}")

    def host(self, name, *addresses, network="net", ifname="eth0"):
        host = Host(self, name)
        return host.plug(*addresses, network=network, ifname=ifname) if addresses else host

    def hosts(self, count, address="10.77.0.{}/24"):
        """Hosts gpu-1, gpu-2, ... that know one another by name, as in a cluster with a DNS."""
        made = [self.host(f"gpu-{i}", address.format(i)) for i in range(1, count + 1)]
        names = [f"{address.format(i).partition('/')[0]} gpu-{i}" for i in range(1, count + 1)]
        for host in made:
            host.set_hosts(*names)
        return made

    def popen(self, command, **options):
        process = subprocess.Popen(command, **options)
        self.processes.append(process)
        return process

    def pids(self, host=None, name=""):
        """Processes inside the namespaces (or of one host): ranks, launchers, agents."""
        found = []
        for namespace in [host.namespace] if host else self.namespaces:
            text = subprocess.check_output(["ip", "netns", "pids", namespace], text=True)
            found += [int(pid) for pid in text.split()]
        return [pid for pid in found if not name or _name(pid) == name]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe:
                    pipe.close()
        try:
            deadline = time.monotonic() + self.grace_seconds
            while (left := self.pids()) and time.monotonic() < deadline:
                time.sleep(0.02)
            names = [f"{pid} ({_name(pid)})" for pid in left]
            for pid in left:
                _kill(pid)
        finally:
            for namespace in self.namespaces:
                _remove(namespace)
        assert not names, f"still on the hosts {self.grace_seconds:g} s after the test: {names}"


def _name(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _remove(namespace):
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
    shutil.rmtree(ETC / namespace, ignore_errors=True)


def _sweep():
    """Namespaces of a run that was killed before it could clean up."""
    for entry in [*Path("/run/netns").glob("commkit-*"), *ETC.glob("commkit-*")]:
        owner = re.fullmatch(r"commkit-(\d+)-.+", entry.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _remove(entry.name)
