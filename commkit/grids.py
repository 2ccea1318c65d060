"""The grid of a layout, and the words for families in it: "tp", "dp-cp", "embd", "mp", ...

The dense part of a model and its experts have a grid each over the same ranks; pp, and what else
an order names, is common to both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from commkit.errors import LayoutError
from commkit.families import Family, GridFamily

#: The groups that Megatron-core makes, in its order.
MEGATRON = (
    *("dp-cp", "dp", "cp", "mp", "tp", "pp", "embd", "pos_embd", "tp-dp-cp", "tp-dp", "tp-cp"),
    *("ep", "etp", "tp-ep", "tp-ep-pp", "edp", "intra_dist_opt"),
)
#: Those it adds behind some if the optimizer is sharded over several instances (dp_replicate > 1).
_INSTANCES = {"dp-cp": ("intra_dp_cp",), "edp": ("intra_edp", "inter_edp")}

#: Other words for the same families: what Megatron's settings call them.
ALIASES = MappingProxyType(
    {
        "dp_cp": "dp-cp",
        "tp_cp": "tp-cp",
        "tp_dp": "tp-dp",
        "tp_dp_cp": "tp-dp-cp",
        "mp": "tp-pp",
        "ep_tp": "etp",
        "ep_dp": "edp",
        "tp_ep_mp": "tp-ep",
        "tp_ep_pp": "tp-ep-pp",
        "intra_ep_dp": "intra_edp",
        "inter_ep_dp": "inter_edp",
        "intra_dist_opt_instance": "intra_dist_opt",
    }
)
SPECIAL = ("embd", "pos_embd", "intra_dp_cp", "intra_edp", "inter_edp", "intra_dist_opt")

#: What a word means: the grid or the special family, and the dimensions inside a group.
Meaning = tuple[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Dimension:
    name: str
    size: int
    stride: int


Dimensions = tuple[Dimension, ...]  # the one of neighbouring ranks first


def strides(names: Iterable[str], sizes: Mapping[str, int]) -> Dimensions:
    """Dimensions over ranks 0, 1, ...; a name without a size has size 1."""
    result: list[Dimension] = []
    stride = 1
    for name in names:
        result.append(Dimension(name, sizes.get(name, 1), stride))
        stride *= result[-1].size
    return tuple(result)


def megatron(instances: int) -> list[str]:
    """The words of all groups of Megatron-core for that many instances of the optimizer."""
    added = _INSTANCES if instances > 1 else {}
    return [word for name in MEGATRON for word in (name, *added.get(name, ()))]


@dataclass(frozen=True, slots=True)
class Grids:
    """The dense grid and that of the experts (etp, ep, edp in the place of tp, cp, dp).

    `instances` is the number of instances of a distributed optimizer.  Where the experts cannot
    have a grid, `no_expert` says why.  In a `plain` grid, a mesh's, no word has a special meaning.
    """

    world_size: int
    dense: Dimensions
    expert: Dimensions = ()
    no_expert: str = ""
    instances: int = 1
    plain: bool = False

    def meaning(self, word: str) -> Meaning:
        """Equal for two words of one family.  LayoutError if there is no such family."""
        if self.plain:
            names = [word] if self._has(self.dense, word) else word.split("-")
            return "dense", frozenset(self._known(self.dense, name, word) for name in names)
        plain_word = ALIASES.get(word.lower(), word.lower())
        if plain_word in SPECIAL:
            return plain_word, frozenset()
        names = plain_word.split("-")
        if any(name in ("ep", "etp") or name.startswith("edp") for name in names):
            if "cp" in names:
                raise LayoutError(f"family {word!r}: the experts' part of a layout has no cp")
            ours = {"tp": "etp", "dp": "edp", "dp_shard": "edp_shard"}
            ours["dp_replicate"] = "edp_replicate"
            names = [ours.get(name, name) for name in names]
            return "expert", self._dimensions(self.expert, names, word)
        return "dense", self._dimensions(self.dense, names, word)

    def family(self, name: str, word: str) -> Family:
        """The family that `word` means, under `name`."""
        kind, inside = self.meaning(word)
        if kind == "dense":
            return self._along(name, self.dense, inside)
        if kind == "expert":
            return self._along(name, self.expert, inside)
        if kind == "pos_embd":
            return self._along(name, self.dense, {"pp"}, pick=(0,))
        if kind == "embd":
            stages = self._product(self.dense, {"pp"})
            return self._along(name, self.dense, {"pp"}, pick=(0, stages - 1))
        if kind == "intra_dp_cp":
            inside = self._dimensions(self.dense, ("dp", "cp"), word)
            size = self._product(self.dense, inside) // self.instances
            return self._along(name, self.dense, inside, split=(size, 1))
        inside = self._dimensions(self.expert, ("edp",), word)
        size = self._product(self.expert, inside) // self.instances
        if kind == "intra_edp":
            return self._along(name, self.expert, inside, split=(size, 1))
        if kind == "inter_edp":
            return self._along(name, self.expert, inside, split=(self.instances, size))
        return self._dist_opt(name, inside, size)

    def _dist_opt(self, name: str, edp: Collection[str], size: int) -> Family:
        """One instance of the optimizer: `size` of the tp-ep-pp groups, one after the other."""
        inner = [(d.size, d.stride) for d in self.expert if d.name not in edp]
        outer: list[tuple[int, int]] = []
        for dimension in self.expert:
            if dimension.name in edp:
                taken = math.gcd(dimension.size, size)  # edp, or its half that is the faster one
                inner.append((taken, dimension.stride))
                outer.append((dimension.size // taken, dimension.stride * taken))
                size //= taken
        return GridFamily(name, self.world_size, inner, outer)

    def _along(
        self, name: str, grid: Dimensions, inside: Collection[str], **narrowed: Any
    ) -> Family:
        inner = [(d.size, d.stride) for d in grid if d.name in inside]
        outer = [(d.size, d.stride) for d in grid if d.name not in inside]
        return GridFamily(name, self.world_size, inner, outer, **narrowed)

    def _dimensions(self, grid: Dimensions, names: Iterable[str], word: str) -> frozenset[str]:
        """`names` with dp or edp as its halves where the grid has those."""
        result: set[str] = set()
        for name in names:
            halves = (f"{name}_shard", f"{name}_replicate")
            if not self._has(grid, name) and self._has(grid, halves[0]):
                result.update(halves)
            else:
                result.add(self._known(grid, name, word))
        return frozenset(result)

    def _known(self, grid: Dimensions, name: str, word: str) -> str:
        if not self._has(grid, name):
            if not grid:
                raise LayoutError(f"family {word!r}: {self.no_expert}")
            names = ", ".join(repr(d.name) if self.plain else d.name for d in grid)
            special = "" if self.plain else f", and {', '.join(SPECIAL)}, mp"
            raise LayoutError(
                f"family {word!r}: no dimension {name!r} in this layout: it has {names}, joined "
                f"by '-' for several{special}"
            )
        return name

    @staticmethod
    def _has(grid: Dimensions, name: str) -> bool:
        return any(dimension.name == name for dimension in grid)

    @staticmethod
    def _product(grid: Dimensions, inside: Collection[str]) -> int:
        return math.prod(d.size for d in grid if d.name in inside)
