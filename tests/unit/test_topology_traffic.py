"""What families of rank groups send between hosts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commkit.errors import UsageError
from commkit.topology.model import Model, work
from commkit.topology.traffic import (
    COLLECTIVES,
    Family,
    demand,
    nccl_flows,
    pattern_edges,
)


def total(wanted):
    return sum(amount for _, _, amount in wanted.edges())


def between(wanted):
    found = {}
    for a, b, amount in wanted.edges():
        found[a, b] = found.get((a, b), 0) + amount
    return found


@pytest.mark.parametrize(("collective", "algorithm"), COLLECTIVES)
@given(members=st.integers(2, 40))
def test_no_member_sends_less_than_the_collective_needs(collective, algorithm, members):
    """Any all-reduce must send (n-1)/n of the buffer at least; trees and rings send more."""
    family = Family("x", (tuple(range(members)),), collective, 1000.0, algorithm)
    sent = dict.fromkeys(range(members), 0.0)
    for a, _, amount in family.edges():
        sent[a] += amount
    least = {"all_reduce": 1000.0, "send_recv": 1000.0}.get(collective, 1000 * (members - 1))
    whole = {"all_reduce": 2 * 1000 * (members - 1), "send_recv": 2000.0 * (members - 1)}
    if algorithm == "ring":
        assert sum(sent.values()) == pytest.approx(whole.get(collective, least))
    elif algorithm == "tree":
        # Two trees of n - 1 edges, half the bytes on each, up and down.
        assert sum(sent.values()) == pytest.approx(2 * 1000 * (members - 1))
    elif algorithm == "line":
        assert sum(sent.values()) == pytest.approx(whole[collective])
    elif algorithm == "pairs":
        assert all(
            amount == pytest.approx(1000 * (members - 1) / members) for amount in sent.values()
        )


@given(members=st.integers(2, 200))
def test_both_trees_are_trees_and_no_member_is_inside_both(members):
    edges = list(pattern_edges("tree", members))
    half = len(edges) // 2
    inside = []
    for some in (edges[:half], edges[half:]):
        up = dict(some[::2])  # child to parent comes first
        assert len(up) == members - 1
        assert sorted(some[1::2]) == sorted((b, a) for a, b in up.items())
        for node in up:  # every way up ends at the root
            steps = 0
            while node in up:
                node, steps = up[node], steps + 1
                assert steps <= members
        inside.append(set(up.values()))
    roots = [
        set(range(members)) - {a for a, _ in some[::2]} for some in (edges[:half], edges[half:])
    ]
    shared = (inside[0] & inside[1]) - roots[0] - roots[1]
    # NCCL's second tree makes leaves of what is inside the first; for odd sizes one may be left.
    assert len(shared) <= (0 if members % 2 == 0 else 1)


def test_a_ring_enters_each_host_once_by_first_appearance():
    # Ranks 0-3 on host 0, 4-7 on host 1, 8-11 on host 2; the group visits 1, 0, 1, 2.
    family = Family("dp", ((5, 1, 6, 9),), "all_reduce", 8.0)
    wanted = demand([family], [4, 4, 4])
    assert wanted.families[0].groups[0].hosts == (1, 0, 2)
    assert between(wanted) == {(1, 0): 12.0, (0, 2): 12.0, (2, 1): 12.0}
    assert wanted.families[0].groups[0].rails == (1, 2)


def test_equal_groups_of_all_local_ranks_are_one_with_all_rails():
    groups = tuple((local, 8 + local) for local in range(8))
    wanted = demand([Family("dp", groups, "all_reduce", 100.0)], [8, 8])
    (group,) = wanted.families[0].groups
    assert (group.hosts, group.rails, group.edge_bytes) == ((0, 1), tuple(range(8)), 800.0)
    assert wanted.forwarded == 0


def test_traffic_inside_hosts_is_left_out():
    assert demand([Family("tp", ((0, 1), (2, 3)), "all_reduce", 9.0)], [2, 2]).families == ()


def test_an_all_to_all_counts_every_pair_of_ranks():
    wanted = demand([Family("ep", ((0, 1, 2, 3),), "all_to_all", 16.0)], [2, 2])
    # Two ranks here, two there, four bytes from each to each.
    assert between(wanted) == {(0, 1): 16.0, (1, 0): 16.0}
    uneven = demand([Family("ep", ((0, 1, 2),), "all_to_all", 9.0)], [2, 1])
    assert between(uneven) == {(0, 1): 6.0, (1, 0): 6.0}
    assert uneven.families[0].pattern == "edges"


def test_a_pipeline_that_comes_back_to_a_host_crosses_each_time():
    wanted = demand([Family("pp", ((0, 2, 1, 3),), "send_recv", 5.0)], [2, 2])
    assert between(wanted) == {(0, 1): 15.0, (1, 0): 15.0}
    assert total(wanted) == 30.0


def test_what_changes_the_local_rank_is_counted_as_forwarded():
    wanted = demand([Family("pp", ((0, 3),), "send_recv", 5.0)], [2, 2])
    assert wanted.forwarded == 10.0


def test_flows_split_an_edge_over_rails_channels_and_queue_pairs():
    groups = tuple((local, 2 + local) for local in range(2))
    wanted = demand([Family("dp", groups, "all_gather", 64.0)], [2, 2])
    flows = list(nccl_flows(wanted, channels=2, queue_pairs=4))
    assert len(flows) == 2 * 2 * 2 * 4  # directions, rails, channels, queue pairs
    assert len({(f.source, f.rail, f.channel, f.queue_pair) for f in flows}) == len(flows)
    assert sum(f.bytes for f in flows) == pytest.approx(total(wanted))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("x", ((0, 1),), "all_sum", 1.0), "collective 'all_sum': expected one of all_reduce"),
        (("x", ((0, 1),), "all_reduce", 1.0, "pairs"), "'pairs': expected ring or tree"),
        (("x", ((0, 1),), "all_reduce", -1.0), "-1.0 bytes"),
        (("x", ((0, 1),), "all_reduce", float("nan")), "nan bytes"),
        (("x", ((0, 0),), "all_reduce", 1.0), "occurs twice"),
    ],
)
def test_a_wrong_family_is_named(arguments, expected):
    with pytest.raises(UsageError, match=expected):
        Family(*arguments)


def test_a_rank_beyond_the_world_is_named():
    with pytest.raises(UsageError, match="rank 9: expected 0 to 3"):
        demand([Family("dp", ((0, 9),), "all_reduce", 1.0)], [2, 2])


def test_work_follows_from_a_model_as_written_down():
    model = Model(
        1e9, 8, 1024, 2048, micro_batches=4, expert_parameters=8e9, expert_layers=4, kv_share=0.25
    )
    found = work(model, {"tp": 2, "cp": 2, "dp": 4, "pp": 2, "ep": 4})
    activation = 2048 / 2 * 1024 * 2
    assert found["dp"].size == 1e9 / 4 * 3
    assert (found["pp"].size, found["pp"].algorithm) == (activation / 2 * 4, "line")
    assert found["cp"].size == 3 * 2 * 2 * activation * 0.25 / 2 * 4 * 4
    assert found["ep"].size == activation / 2 * 2 * 4 * 2 * 4
    assert found["edp"].size == 8e9 / 8 * 3
    assert found["tp"].size == 4 * activation * 4 * 4
    assert "edp" not in work(Model(1e9, 8, 1024, 2048), {"dp": 4})


def test_a_wrong_model_is_named():
    with pytest.raises(UsageError, match="layers=0: expected a number from 1"):
        Model(1e9, 0, 1024, 2048)
