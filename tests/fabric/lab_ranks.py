"""Ranks of one job after another on the hosts of a lab, forked so that torch is imported once.

The argument is JSON: {"size": bytes, "rounds": N, "orders": [[[namespace, ["RANK=0", ...]], ...]]}.
Before each job "ready" goes to standard output and a line is read, after it comes "done".
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch
import torch.distributed as dist

import commkit
from commkit.topology import netns


def rank(namespace, variables, size, rounds):
    netns.enter(namespace)
    os.environ.update(variable.split("=", 1) for variable in variables)
    commkit.init_process_group("gloo")
    value = torch.full((size // 4,), float(dist.get_rank()))
    world = dist.get_world_size()
    dist.all_reduce(value)
    assert value[0] == value[-1] == world * (world - 1) / 2
    for _ in range(rounds - 1):
        dist.all_reduce(value.fill_(1.0))
        assert value[0] == value[-1] == world
    commkit.destroy_process_group()


def main():
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    for order in job["orders"]:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        children = []
        for namespace, variables in order:
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    rank(namespace, variables, job["size"], job["rounds"])
                    status = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(status)
            children.append(pid)
        statuses = [os.waitpid(pid, 0)[1] for pid in children]
        if any(statuses):
            sys.exit(f"statuses {statuses}")
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
