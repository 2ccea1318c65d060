"""Sizes of a model and of its layout -> what each family of groups sends in a step.

The formulas are those of Megatron-style training: gradients and parameters of a distributed
optimizer over dp, activations between pipeline stages, keys and values around cp, tokens to experts
over ep.  They are estimates for placement, where ratios count; measured sizes are better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from commkit.errors import UsageError


@dataclass(frozen=True)
class Model:
    """A transformer and a step.  Bytes are those of one element."""

    parameters: float  #: without the experts
    layers: int
    hidden: int
    sequence: int  #: tokens
    micro_batch: int = 1  #: sequences of one micro-batch
    micro_batches: int = 8  #: of a step and pipeline
    kv_share: float = 1.0  #: of the hidden size that keys have; grouped-query attention: less
    expert_parameters: float = 0.0  #: of all experts together
    expert_layers: int = 0
    top_k: int = 2  #: experts a token goes to
    virtual_stages: int = 1  #: of an interleaved pipeline
    gradient_bytes: float = 4.0
    parameter_bytes: float = 2.0
    activation_bytes: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.startswith("expert") else 1
            if field.name == "kv_share":
                least = 0
            if not (math.isfinite(value) and value >= least):
                raise UsageError(f"model: {field.name}={value}: expected a number from {least} on")


@dataclass(frozen=True)
class Work:
    """What one family does in a step."""

    collective: str
    size: float
    algorithm: str = ""


def work(model: Model, sizes: Mapping[str, int]) -> dict[str, Work]:
    """Family -> what it does in a step, for the families tp, cp, dp, pp, ep and edp.

    `sizes` has the sizes of tp, cp, dp, pp, ep and edp (1 where one is missing; edp follows from
    the others).  dp stands for all ranks that hold the same dense parameters, cp included.

    dp, edp   reduce-scatter of gradients and all-gather of parameters: on a ring the bytes of an
              all-reduce of half their sum
    pp        a micro-batch's activations over each boundary, forward, and as many back
    cp        keys and values pass round the ring, forward, and with their gradients backward
    ep        tokens go to their experts and back, forward and backward: four all-to-alls a layer
    tp        an all-gather and a reduce-scatter around attention and MLP, forward and backward
    """
    tp, cp, pp, ep = (sizes.get(name, 1) for name in ("tp", "cp", "pp", "ep"))
    dp = sizes.get("dp", 1)
    edp = sizes.get("edp", max(1, tp * cp * dp // ep))
    both = (model.gradient_bytes + model.parameter_bytes) / 2
    tokens = model.micro_batch * model.sequence / cp
    activation = tokens * model.hidden * model.activation_bytes
    layers = model.layers / pp
    found: dict[str, Work] = {}
    if dp * cp > 1:
        found["dp"] = Work("all_reduce", model.parameters / (tp * pp) * both)
    if pp > 1:
        rounds: float = model.micro_batches * model.virtual_stages
        shape = "loop" if model.virtual_stages > 1 else "line"
        found["pp"] = Work("send_recv", activation / tp * rounds, shape)
    if cp > 1:
        pair = 2 * activation * model.kv_share / tp
        found["cp"] = Work("all_gather", 3 * cp * pair * layers * model.micro_batches)
    if ep > 1 and model.expert_layers:
        rounds = 4 * model.expert_layers / pp * model.micro_batches
        found["ep"] = Work("all_to_all", activation / tp * model.top_k * rounds)
    if edp > 1 and model.expert_parameters:
        found["edp"] = Work("all_reduce", model.expert_parameters / (ep * pp) * both)
    if tp > 1:
        found["tp"] = Work("all_reduce", 4 * activation * layers * model.micro_batches)
    return found
