"""From a layout, a fabric and hosts to a placement: what is assumed, warned about and refused."""

from __future__ import annotations

import pytest

from commkit import placing
from commkit.errors import NoTopology, TopologyError, UsageError
from commkit.placing import Wish, parse_bytes, parse_model, parse_work, placed, repaired
from commkit.topology.fabric import leaf_spine
from commkit.topology.traffic import Family


def fabric(**changes):
    sizes = {"per_leaf": 8, "leaves": 4, "spines": 4, "nic_gbps": 400, "uplink_gbps": 400}
    return leaf_spine(**{**sizes, **changes})


def names(numbers):
    return tuple(f"h{number:05d}" for number in numbers)


INTERLEAVED = names(leaf * 8 + slot for slot in range(8) for leaf in range(4))
WORK = parse_work(["dp=all_reduce:10.9G", "pp=send_recv/loop:1.2G"])


def test_interleaved_hosts_are_sorted_out():
    answer = placed(Wish(INTERLEAVED, "tp=8,dp=8,pp=4", work=WORK), fabric())
    assert sorted(answer.hosts) == sorted(INTERLEAVED)
    assert answer.plan.gaps[0] < 1.01
    scores = dict(answer.baselines)
    assert scores["launcher"].crossing[0] > 2 * answer.plan.score.crossing[0]
    # Slurm's order is that of the fabric's file, which the names follow here.
    assert scores["Slurm"] == scores["names"]
    assert answer.notes == ()
    report = answer.report()
    assert report["hosts"] == answer.hosts and report["digest"] == answer.digest
    assert report["gaps"] == list(answer.plan.gaps)


def test_data_parallel_ranks_share_gradients_over_cp_too():
    some, _ = placing.families(Wish(names(range(4)), "tp=8,cp=2,dp=2"))
    by_name = {family.name: family for family in some}
    assert len(by_name["dp-cp"].groups[0]) == 4 and "dp" not in by_name


def test_a_layout_of_experts_has_their_traffic():
    model = parse_model(
        "parameters=1e9,layers=4,hidden=512,sequence=128,expert_layers=2,expert_parameters=4e9"
    )
    some, notes = placing.families(Wish(names(range(4)), "tp=2,ep=4,dp=16", model=model))
    assert {family.name for family in some} >= {"tp", "dp", "ep"}
    assert all(isinstance(family, Family) for family in some) and notes == []


def test_what_is_assumed_is_said():
    answer = placed(Wish(INTERLEAVED, "tp=8,dp=32"), fabric(nic_gbps=None))
    assert answer.notes[0].startswith("no sizes given: assumed a model of 1.75e+11 parameters")
    assert "no time is estimated; say --uplinks" in answer.notes[1]
    assert answer.plan.score.hashed is None


def test_tensor_parallelism_over_hosts_is_warned_about():
    answer = placed(
        Wish(INTERLEAVED, "tp=16,dp=16", work=parse_work(["tp=all_reduce:1G"])), fabric()
    )
    assert any("tp: 16 of 16 groups cross hosts of 8 ranks" in note for note in answer.notes)


def test_rank_pairs_that_cross_rails_are_counted():
    wish = Wish(names(range(16)), "tp=2,dp=2,pp=8", 2, work=parse_work(["tp=all_reduce:1G"]))
    assert not any("cross rails" in note for note in placed(wish, fabric(rails=2)).notes)
    wish = Wish(names(range(16)), "pp=32", 2, work=parse_work(["pp=send_recv:1G"]))
    assert any("cross rails" in note for note in placed(wish, fabric(rails=2)).notes)


def test_a_host_that_the_fabric_does_not_know_is_said():
    hosts = (*names(range(3)), "stranger")
    answer = placed(Wish(hosts, "tp=8,dp=4", work=parse_work(["dp=all_reduce:1G"])), fabric())
    assert any("stranger" in note for note in answer.notes)


def test_one_switch_needs_no_placement():
    answer = placed(Wish(names(range(8)), "tp=8,dp=8"), fabric())
    assert "all hosts are under one switch: every order is as good" in answer.notes
    assert answer.plan.host_of == tuple(range(8))
    (one,) = answer.advice("roce")
    assert one.kind == "keep"


def test_advice_knows_the_busiest_leaf():
    answer = placed(
        Wish(names(range(32)), "tp=8,dp=32", work=parse_work(["dp=all_reduce:1G"])), fabric()
    )
    (family, flows, uplinks), *_ = answer.flows
    assert (family, flows, uplinks) == ("dp", 1, 4)
    assert any("1 flows over 4" in one.reason for one in answer.advice("roce"))


def test_a_spare_takes_the_place_of_a_lost_host():
    wish = Wish(names(range(16)), "tp=8,dp=16", work=parse_work(["dp=all_reduce:1G"]))
    found = repaired(wish, fabric(per_leaf=9), ["h00003"], ["h00030"], 0)
    assert found.changes == [("24-31", "h00003", "h00030")]
    assert found.moved == ()
    assert found.emit("slurm").split()[24:32] == ["h00030"] * 8
    assert found.before.crossing[0] < found.after.crossing[0]
    report = found.report()
    assert report["hosts"][3] == "h00030"


@pytest.mark.parametrize(
    ("lost", "spares", "expected"),
    [
        (["h00099"], ["h00030"], "--lost h00099: not one of --hosts"),
        (["h00003"], ["h00004"], "--spare h00004: already one of --hosts"),
        (["h00003"], [], "1 hosts are lost and 0 are spare"),
        (["h00003"], ["stranger"], "stranger: no place in the topology"),
    ],
)
def test_a_repair_that_does_not_fit_is_named(lost, spares, expected):
    wish = Wish(names(range(16)), "tp=8,dp=16", work=parse_work(["dp=all_reduce:1G"]))
    with pytest.raises((UsageError, TopologyError), match=expected):
        repaired(wish, fabric(), lost, spares, 0)


def test_hosts_that_no_network_joins_are_refused():
    with pytest.raises(TopologyError, match="no network in common"):
        placed(Wish(names((0, 16)), "tp=8,dp=2"), fabric(leaves_per_pod=2))
    with pytest.raises(NoTopology):
        placed(Wish(("a", "b"), "tp=8,dp=2"), fabric())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: placed(Wish(names(range(4)), "tp=8,dp=5"), fabric()), "5"),
        (
            lambda: placed(
                Wish(names(range(4)), "dp=4", 1, work=parse_work(["tp=all_reduce:1"])), fabric()
            ),
            "nothing to place",
        ),
        (lambda: placed(Wish(names(range(2)), "dp=0", 0), fabric()), "--ranks-per-host 0"),
        (lambda: placed(Wish(names(range(1)), "dp=1", 1), fabric()), "nothing to place"),
        (lambda: parse_work(["dp:1G"]), "--traffic dp:1G: expected FAMILY=COLLECTIVE"),
        (lambda: parse_work(["dp=all_reduce:1G", "dp=all_reduce:2G"]), "dp is given twice"),
        (lambda: parse_work(["dp=all_reduce:lots"]), "'lots' bytes: expected a number"),
        (lambda: parse_model("layers=4"), "parameters, hidden, sequence missing"),
        (lambda: parse_model("depth=4"), "'depth=4': expected NAME=NUMBER"),
        (lambda: parse_model("layers=many"), "'many' is no number"),
        (lambda: placing.host_names("@/nowhere/hosts"), "No such file"),
        (lambda: placing.host_names("n[1-"), r"host list 'n\[1-'"),
    ],
)
def test_a_wrong_wish_is_named(make, expected):
    with pytest.raises(UsageError, match=expected) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_sizes_have_decimal_and_binary_units():
    assert parse_bytes("10.9G", "") == 10.9e9
    assert parse_bytes("150Mi", "") == 150 * 2**20
    assert parse_bytes("1e6B", "") == 1e6


def test_hosts_come_from_a_file_as_well(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# the job\nn1:8\n\nn2 slots=8  # second\n")
    assert placing.host_names(f"@{file}") == ("n1", "n2")
    file.write_text("# nothing\n")
    with pytest.raises(UsageError, match="no host in it"):
        placing.host_names(f"@{file}")
