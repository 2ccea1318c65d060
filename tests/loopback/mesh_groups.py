"""Compares layouts with torch's DeviceMesh for every shape of up to 64 ranks, on the fake back end.

A program of its own: it makes thousands of process groups.  Prints one JSON object: what was
compared, and the first differences.
"""

from __future__ import annotations

import itertools
import json
import sys

import torch.distributed as dist
from shapes import factorings
from torch.distributed import device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from commkit import layout

NAMES = ("pp", "dp", "cp", "tp")


def recorded(call):
    """The groups that `call` makes through device_mesh, by description."""
    found = {}
    real = device_mesh.new_group

    def new_group(ranks=None, *args, group_desc=None, **rest):
        found.setdefault(group_desc, []).append(tuple(ranks))
        return real(ranks, *args, group_desc=group_desc, **rest)

    device_mesh.new_group = new_group
    try:
        return call(), found
    finally:
        device_mesh.new_group = real


def compare(shape, rank, different):
    world = 1
    for size in shape:
        world *= size
    names = NAMES[-len(shape) :]
    pairs = [f"{a}-{b}" for a, b in itertools.pairwise(names)]
    ours = layout.from_mesh(shape, names, world, families=[*names, *pairs])
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        mesh, found = recorded(
            lambda: device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=names)
        )
        for name in names:
            # A dimension that is the whole world has the default group, and no other.
            theirs = found.get(f"mesh_{name}", [tuple(range(world))])
            if sorted(ours[name]) != sorted(theirs):
                different.append((shape, name, "groups"))
            mine = tuple(dist.get_process_group_ranks(mesh.get_group(name)))
            if ours[name].of(rank) != (mine,):
                different.append((shape, name, rank, mine))
        for pair in pairs if world > 1 else ():
            flat = mesh[tuple(pair.split("-"))]._flatten()
            mine = tuple(dist.get_process_group_ranks(flat.get_group()))
            if ours[pair].of(rank) != (mine,):
                different.append((shape, pair, rank, mine))
        return len(names) + len(pairs)
    finally:
        dist.destroy_process_group()


def main():
    different, compared, shapes = [], 0, 0
    for world in range(1, 65):
        for count in (1, 2, 3, 4):
            for number, shape in enumerate(factorings(world, count)):
                shapes += 1
                compared += compare(shape, (7 * number + shapes) % world, different)
    print(json.dumps({"shapes": shapes, "compared": compared, "different": different[:20]}))


if __name__ == "__main__":
    sys.exit(main())
