"""One rank without torch: joins through the environment, does what its argument says, reports.

Standard output is one JSON object a line: {"event": "formed"}, {"notice": ...}, and last either
{"value": ...} or {"error": class, "text": ...}.  JOIN_SECONDS is the deadline of the join.
"""

import json
import os
import socket
import sys
import time

from commkit import _C, launch, overlay
from commkit.errors import CommkitError


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def agent():
    """This host's agent, as it describes itself."""
    (mine,) = _C.agents()
    with open(mine["log"]) as log:
        # The root's host listens anew when rank 0 is not the first of its ranks to come.
        listening = [line for line in log if " listening on port " in line]
    # An agent that will have no children does not listen.
    addresses = listening[-1].split(" addresses ")[1].split() if listening else []
    return {
        **mine,
        "addresses": addresses,
        "open_ports": sorted(open_ports()),
    }


LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def open_ports():
    """TCP ports of this host on which somebody listens to other hosts."""
    for name in ("tcp", "tcp6"):
        if os.path.exists(f"/proc/net/{name}"):
            with open(f"/proc/net/{name}") as table:
                for line in list(table)[1:]:
                    address, _, port = line.split()[1].partition(":")
                    if line.split()[3] == "0A" and address not in LOOPBACK:
                        yield int(port, 16)


def meet(world):
    """Gathers at every rank, reads keys of ranks on every host, looks at the host's agent."""
    me = world.identity
    names = world.all_gather(f"{me.rank}@{socket.gethostname()}".encode())
    # A key is owned by an agent that its name's hash picks: many keys reach every owner.
    for n in range(8):
        world.keys.set(b"%d/%d" % (me.rank, n), os.urandom(4) + b"%d" % me.rank, 20.0)
    for rank in range(me.world_size):
        values = world.keys.get([b"%d/%d" % (rank, n) for n in range(8)], 20.0)
        assert {value[4:] for value in values} == {b"%d" % rank}
    total = world.keys.add(b"total", me.rank, 20.0)
    seen = agent() if me.local_rank == 0 else {}
    world.barrier(timeout=20.0)
    return {
        "names": [name.decode() for name in names],
        "hosts": me.hosts,
        "local": [me.local_rank, me.local_world_size],
        "epoch": me.epoch,
        "most": max(total, world.keys.add(b"total", 0, 20.0)),
        "agent": seen,
    }


def watch(world):
    """Waits until a loss is reported; then an operation must fail too, for the same reason."""
    deadline = time.monotonic() + 30
    while not world.failures() and time.monotonic() < deadline:
        time.sleep(0.02)
    failures = world.failures()
    error, text = "", ""
    try:
        world.barrier(timeout=20.0)
    except CommkitError as found:
        error, text = type(found).__name__, str(found)
    return {"failures": failures, "error": error, "text": text}


def once(world):
    """One reduction over the tree, for links on which `meet` would take long."""
    world.barrier(timeout=30.0)
    return {"hosts": world.identity.hosts}


def main():
    try:
        world = overlay.join(
            launch.resolve(),
            float(os.environ["JOIN_SECONDS"]),
            notice=lambda kind, text: say(notice=f"{kind}: {text}"),
        )
        say(event="formed")
        value = {"meet": meet, "watch": watch, "once": once}[sys.argv[1]](world)
        world.leave(10.0)
    except CommkitError as error:
        return say(error=type(error).__name__, text=str(error))
    say(value=value)


main()
