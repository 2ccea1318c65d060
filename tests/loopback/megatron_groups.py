"""Compares layouts with the real Megatron-core: python megatron_groups.py generator|state SEED.

A program of its own, since importing Megatron-core warns, takes seconds and changes torch.  Prints
one JSON object: what was compared, and the first differences.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import warnings

warnings.simplefilter("ignore")

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from shapes import factorings  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from commkit import layout  # noqa: E402
from commkit.errors import LayoutError  # noqa: E402

DENSE = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-dp-cp", "tp-dp", "tp-cp", "cp-pp")
#: Megatron's word in the experts' generator -> ours
EXPERT = {"ep": "ep", "tp": "etp", "dp": "edp", "tp-ep": "tp-ep", "tp-ep-pp": "tp-ep-pp"}
#: Megatron's description of a group -> ours
FAMILIES = {
    "DATA_PARALLEL_GROUP_WITH_CP": "dp-cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp-dp-cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp-dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp-cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp-ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp-ep-pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_edp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}


def generator(seed):
    """Every shape of up to 64 ranks in the default order; the other orders take turns."""
    rng = random.Random(seed)
    orders = ["-".join(order) for order in itertools.permutations(("tp", "cp", "ep", "dp", "pp"))]
    rng.shuffle(orders)
    turn = itertools.cycle(orders)
    compared, different, used = 0, [], set()
    for world in range(1, 65):
        for tp, cp, dp, pp in factorings(world, 4):
            for order in (layout.ORDER, next(turn)):
                used.add(order)
                sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
                text = ",".join(f"{name}={size}" for name, size in sizes.items())
                ours = layout.parse(text, world, order=order, families=DENSE)
                theirs = parallel_state.RankGenerator(**sizes, ep=1, order=order)
                for token in DENSE:
                    compared += 1
                    if [*map(list, ours[token])] != theirs.get_ranks(token):
                        different.append((text, order, token))
        for etp, ep, edp, pp in factorings(world, 4):
            order = next(turn)
            text = f"tp={etp},ep={ep},dp={ep * edp},pp={pp}"
            try:
                ours = layout.parse(text, world, order=order, families=[*EXPERT.values()])
            except LayoutError:
                # Megatron's own condition: both parts have the same pipeline groups.
                dense = parallel_state.RankGenerator(etp, 1, ep * edp, pp, 1, order)
                expert = parallel_state.RankGenerator(etp, ep, edp, pp, 1, order)
                if dense.get_ranks("pp") == expert.get_ranks("pp"):
                    different.append((text, order, "refused"))
                continue
            theirs = parallel_state.RankGenerator(etp, ep, edp, pp, 1, order)
            for token, word in EXPERT.items():
                compared += 1
                if [*map(list, ours[word])] != theirs.get_ranks(token):
                    different.append((text, order, word))
    return {"compared": compared, "orders": len(used), "different": different[:20]}


def created(world, instances, order, **sizes):
    """The groups that initialize_model_parallel() creates, family by family, in its order."""
    found: dict[str, list[tuple[int, ...]]] = {}
    real = dist.new_group

    def new_group(ranks=None, *args, group_desc=None, **rest):
        found.setdefault(FAMILIES[group_desc], []).append(tuple(ranks))
        return real(ranks, *args, group_desc=group_desc, **rest)

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    dist.new_group = new_group
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=sizes["etp"],
            num_distributed_optimizer_instances=instances,
            order=order,
            create_gloo_process_groups=False,
        )
    finally:
        dist.new_group = real
        parallel_state.destroy_model_parallel()
        # It leaves these behind.
        for name, value in vars(parallel_state).items():
            if name.isupper() and name.endswith(("_GROUP", "_GLOO", "_AG", "_CP")) and value:
                setattr(parallel_state, name, None)
        dist.destroy_process_group()
    return found


def state(seed, count=150):
    """Whole sets of groups as initialize_model_parallel() makes them, for random layouts."""
    rng = random.Random(seed)
    different, compared, refused, with_instances = [], 0, 0, 0
    orders = ["tp-cp-ep-dp-pp", "tp-cp-pp-ep-dp", "tp-pp-dp-cp-ep", "cp-tp-dp-ep-pp", "tp-dp-pp"]
    while compared < count:
        pp, cp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 3))
        tp, dp = rng.choice((1, 2, 2, 4)), rng.choice((1, 2, 4, 6, 8))
        world = tp * cp * dp * pp
        ep, etp = rng.choice((1, 2, 4)), rng.choice((1, tp))
        instances = rng.choice([i for i in (1, 1, 2, 3) if dp % i == 0])
        order = rng.choice(orders)
        if world > 64:
            continue
        text = f"tp={tp},cp={cp},ep={ep},etp={etp},pp={pp}"
        text += f",dp_replicate={instances}" if instances > 1 else f",dp={dp}"
        sizes = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "pp": pp}
        try:
            ours = layout.parse(text, world, order=order, families="megatron")
        except LayoutError as error:
            ours = error
        try:
            theirs = created(world, instances, order, **sizes)
        except (AssertionError, RuntimeError) as error:
            theirs = error
        if isinstance(theirs, Exception) or isinstance(ours, Exception):
            refused += 1
            # We need not refuse what Megatron does, but must refuse nothing that it takes.
            if isinstance(ours, Exception) and not isinstance(theirs, Exception):
                different.append((text, order, str(ours)))
            continue
        compared += 1
        with_instances += instances > 1
        if {name: list(family) for name, family in ours.families.items()} != theirs:
            names = set(theirs) ^ set(ours.families)
            names |= {name for name in theirs if [*ours.families.get(name, ())] != theirs[name]}
            different.append((text, order, sorted(names)))
        order_of_ours = [name for name in ours.families if name not in ("embd", "pos_embd")]
        order_of_theirs = [name for name in theirs if name not in ("embd", "pos_embd")]
        if order_of_ours != order_of_theirs:
            different.append((text, order, order_of_ours, order_of_theirs))
    return {
        "compared": compared,
        "refused": refused,
        "with_instances": with_instances,
        "different": different[:20],
    }


if __name__ == "__main__":
    what = {"generator": generator, "state": state}[sys.argv[1]]
    print(json.dumps(what(int(sys.argv[2]))))
