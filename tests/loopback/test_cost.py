"""The estimate of commkit.cost is what real agents count when ranks exchange ids."""

from __future__ import annotations

import threading
import time

import pytest

from commkit import _C, cost, layout, plan

pytestmark = pytest.mark.timeout(120)

HOSTS, PER_HOST = 12, 2
WORLD = HOSTS * PER_HOST
# With so few hosts per agent there are several levels and direct connections.
QUIET = {"COMMKIT_TREE_DEGREE": "3", "COMMKIT_HEARTBEAT": "60"}
LAYOUT = "tp=2,cp=2,pp=3"


def _key(group):
    name = f"commkit:{min(group.ranks):02d}/{group.name}"
    return (name + "/cuda//000")[: len(name) + cost.KEY_SUFFIX].encode()


def exchanging(me, families):
    """Every group's lowest rank sets an id once the test says that all others wait for it."""
    world = me.join()
    made = layout.parse(LAYOUT, WORLD, families=families)
    groups = plan.make(made, me.rank, plan.Generations()).groups
    # The agents that have to, fetch the list of hosts: then every key goes its final way.
    for _ in range(2):
        for group in groups:
            if me.rank == min(group.ranks):
                world.keys.set(_key(group) + b"-first", b"", 20)
        for group in groups:
            world.keys.get([_key(group) + b"-first"], 20)
    me.meet(world.identity.host_index)
    threads = []
    for group in groups:
        if me.rank != min(group.ranks):
            threads.append(threading.Thread(target=world.keys.get, args=([_key(group)], 30)))
            threads[-1].start()
    me.meet()
    for group in groups:
        if me.rank == min(group.ranks):
            world.keys.set(_key(group), bytes(cost.ID_BYTES), 20)
    for thread in threads:
        thread.join()
    me.meet()
    assert world.leave(20)


def _agents(job):
    """Place in the tree -> (messages, bytes) so far, of this job's agents."""
    found = [agent for agent in _C.agents() if agent.get("log", "").startswith(str(job.directory))]
    assert len(found) == HOSTS
    return {int(a["index"]): (int(a["messages"]), int(a["bytes"])) for a in found}


def _settled(job):
    """The counters once nothing has moved for a while: all waits have reached their keys."""
    before = _agents(job)
    for _ in range(200):
        time.sleep(0.25)
        now = _agents(job)
        if now == before:
            return now
        before = now
    raise AssertionError("the agents' counters do not settle")


@pytest.mark.parametrize("families", ["tp,cp,dp,pp", "megatron"])
def test_agents_count_what_the_estimate_says(jobs, families):
    job = jobs([PER_HOST] * HOSTS, env=QUIET)
    for rank in range(WORLD):
        # The root plans the tree by the number of hosts that follows from these.
        local = {"LOCAL_RANK": str(rank % PER_HOST), "LOCAL_WORLD_SIZE": str(PER_HOST)}
        job.start(rank, exchanging, families, env=local)
    everybody = range(WORLD)
    places = job.expect(*everybody)
    arrival = places[::PER_HOST]
    before = _settled(job)
    job.tell(*everybody)
    job.expect(*everybody)
    _settled(job)
    job.tell(*everybody)
    job.expect(*everybody)
    after = _settled(job)
    job.tell(*everybody)
    assert all(outcome.error == "" for outcome in job.outcomes().values())
    agents = cost.Agents(HOSTS, degree=3, arrival=arrival)
    made = layout.parse(LAYOUT, WORLD, families=families)
    for name, family in made.families.items():
        length = len(f"commkit:00/{plan.group_name(name, (0,), 0)}") + cost.KEY_SUFFIX
        for ranks in family:
            hosts = sorted({rank // PER_HOST for rank in ranks})
            members = [(h, sum(rank // PER_HOST == h for rank in ranks)) for h in hosts]
            agents.exchange(members, length)
    counted = {
        place: (after[place][0] - before[place][0], after[place][1] - before[place][1])
        for place in range(HOSTS)
    }
    expected = {place: (agents.messages[place], agents.bytes[place]) for place in range(HOSTS)}
    assert counted == expected
