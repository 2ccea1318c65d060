"""What is to be created: "tp=8,cp=2,dp=16,pp=8", a device mesh or lists of ranks -> named families.

Ranks are numbered as Megatron numbers them: the order names the dimensions, the one whose ranks
are neighbours first.  The experts of a mixture have a grid of their own over the same ranks, etp x
ep x edp x pp, where expert data parallelism (edp) is what remains; ep is no factor of the world.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commkit import sizes
from commkit.errors import LayoutError, UsageError
from commkit.families import Family, ListFamily
from commkit.grids import Dimensions, Grids, Meaning, megatron, strides
from commkit.ranks import shown
from commkit.sizes import ORDER

__all__ = ["ORDER", "Layout", "Words", "from_lists", "from_mesh", "parse"]

#: Which families: words, in a list or separated by commas, or {name: word}.
Words = str | Iterable[str] | Mapping[str, str]


@dataclass(frozen=True)
class Layout:
    """Families by name, in the order in which they are created.

    `mesh_shape` and `mesh_names` are the torch DeviceMesh with the same groups, slowest dimension
    first as torch has it, and `expert_mesh_*` that of the experts; () where there is none.
    """

    world_size: int
    families: Mapping[str, Family]
    mesh_shape: tuple[int, ...] = ()
    mesh_names: tuple[str, ...] = ()
    expert_mesh_shape: tuple[int, ...] = ()
    expert_mesh_names: tuple[str, ...] = ()
    _grids: Grids | None = field(default=None, repr=False)
    _names: Mapping[Meaning, str] = field(default_factory=dict, repr=False)

    def __getitem__(self, word: str) -> Family:
        """The family of that name, or of another word for it: "cp-dp" and "dp_cp" find "dp-cp".

        UsageError listing what there is.
        """
        name: str | None = word
        if word not in self.families and self._grids is not None:
            try:
                name = self._names.get(self._grids.meaning(word))
            except LayoutError:
                name = None
        if name is None or name not in self.families:
            raise UsageError(
                f"no family {word!r} in this layout: it has {', '.join(map(repr, self.families))}"
            )
        return self.families[name]

    def __contains__(self, word: object) -> bool:
        try:
            return isinstance(word, str) and self[word] is not None
        except UsageError:
            return False

    def describe(self) -> str:
        """Canonical text in one line: equal if and only if the same groups are to be created, in
        the same order under the same names."""
        return self._description

    def digest(self) -> bytes:
        """SHA-256 of what describe() says; the same in every process."""
        return self._digest

    # Both are asked for several times while ranks wait for one another.
    @functools.cached_property
    def _description(self) -> str:
        parts = [f"{name!r}: {family.describe()}" for name, family in self.families.items()]
        return f"{self.world_size} ranks; {'; '.join(parts)}"

    def summary(self, width: int = 2000) -> str:
        """describe(), families of more than their part of `width` characters shortened to their
        beginning, the number of groups and a hash: different layouts differ in it, too."""
        limit = max(40, width // max(1, len(self.families)))
        parts = []
        for name, family in self.families.items():
            text = f"{name!r}: {family.describe()}"
            if len(text) > limit:
                mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
                text = f"{text[:limit]}... ({family.count:,} groups, {mark})"
            parts.append(text)
        return f"{self.world_size} ranks; {'; '.join(parts)}"

    @functools.cached_property
    def _digest(self) -> bytes:
        digest = hashlib.sha256(b"commkit layout 1")
        parts = [str(self.world_size)]
        for name, family in self.families.items():
            parts += (name, family.describe())
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()


def parse(
    text: str,
    world_size: int,
    *,
    order: str = ORDER,
    families: Words | None = None,
    allow_partial: bool = False,
) -> Layout:
    """The layout that `text` describes: "tp=8,cp=2,ep=4,dp=16,pp=8".

    tp, cp, dp, pp   sizes whose product is the world size; one may be -1, dp may be left out: it
                     is then what remains.  A dimension of size 1 has groups of one rank.
    dp_shard, dp_replicate   the halves of dp as HSDP has them; one may be left out or -1.  Ranks
                     of a shard are the closer neighbours.  dp_replicate is also Megatron's number
                     of instances of the distributed optimizer.
    ep, etp          expert and expert tensor parallelism: etp x ep x edp x pp is the world again;
                     etp is tp unless it is given
    Other names are allowed if `order` has them.

    `order` is Megatron's: the dimension of neighbouring ranks first; what it does not name has
    size 1.  `families` says what is created, and in which order: None one family for each
    dimension that `text` names, and for dp, and edp if there are experts; "megatron" all groups of
    Megatron-core; or words, each a dimension or several joined by "-" ("tp-dp"), "embd",
    "pos_embd", "mp" or another name of Megatron's.  With `allow_partial` the layout may be smaller
    than the world; the ranks beyond it are in no group.

    Raises LayoutError (a ValueError and a UsageError).
    """
    world_size = sizes.world(world_size)
    request = sizes.read(text, order)
    grids = sizes.grids(request, world_size, allow_partial)
    named = request.named()
    if families is None:
        also = [name for name in ("etp", "edp") if name in request.given or name == "edp"]
        families = [*named, *(also if request.experts else ())]
    elif isinstance(families, str) and families.lower() == "megatron":
        families = megatron(grids.instances)
    return _layout(
        grids,
        families,
        _kept(grids.dense, named),
        _kept(grids.expert, [*named, *request.given]) if request.experts else (),
    )


def from_mesh(
    shape: Iterable[int],
    names: Iterable[str] | None,
    world_size: int,
    *,
    families: Words | None = None,
    allow_partial: bool = False,
) -> Layout:
    """The layout of torch's init_device_mesh(..., shape, mesh_dim_names=names): row-major, the
    last dimension that of neighbouring ranks.

    Without names the dimensions are "dim_0", "dim_1", ...  `families` as for parse(), in words of
    `names` only; None is every dimension, the first one first, as torch creates them.
    Raises LayoutError.
    """
    world_size = sizes.world(world_size)
    if not isinstance(shape, Iterable) or isinstance(shape, str | bytes):
        raise LayoutError(f"mesh shape {shown(shape)}: expected sizes, such as (2, 4)")
    if isinstance(names, str | bytes):
        raise LayoutError(f"mesh names {shown(names)}: expected names, such as ('dp', 'tp')")
    lengths = [sizes.positive(f"mesh dimension {index}", size) for index, size in enumerate(shape)]
    if not lengths:
        raise LayoutError("the shape of a mesh is empty: expected one size or more, such as (2, 4)")
    words = [f"dim_{index}" for index in range(len(lengths))] if names is None else list(names)
    if len(words) != len(lengths):
        raise LayoutError(
            f"mesh of {len(lengths)} dimensions {tuple(lengths)}: expected as many names, not "
            f"{len(words)} {tuple(words)}"
        )
    for word in words:
        if not isinstance(word, str) or not word:
            raise LayoutError(f"mesh dimension {word!r}: expected a name that is not empty")
        if words.count(word) > 1:
            raise LayoutError(f"mesh dimension {word!r} is there more than once in {tuple(words)}")
    product = math.prod(lengths)
    terms = f"mesh: {' * '.join(map(str, lengths))} = {product}"
    sizes.fits(terms, product, world_size, allow_partial)
    grid = strides(words[::-1], dict(zip(words, lengths, strict=True)))
    grids = Grids(world_size, grid, plain=True)
    return _layout(grids, words if families is None else families, grid[::-1], ())


def from_lists(
    families: Mapping[str, Iterable[Any]], world_size: int, *, overlap: Collection[str] = ()
) -> Layout:
    """A layout of explicit lists of ranks, {family: [[0, 1], [2, 3, 4]]}, kept in their order.

    A list may be whatever check_ranks() takes.  Groups of a family may differ in size and may
    leave ranks out; they have no rank in common unless `overlap` names the family.
    Raises LayoutError or LayoutTypeError naming family, group and rank.
    """
    world_size = sizes.world(world_size)
    if not isinstance(families, Mapping):
        raise LayoutError(f"families {shown(families)}: expected {{name: [[0, 1], [2, 3]], ...}}")
    if isinstance(overlap, str):
        overlap = (overlap,)
    if not isinstance(overlap, Collection):
        raise LayoutError(f"overlap {shown(overlap)}: expected names of families")
    if unknown := [name for name in overlap if name not in families]:
        raise LayoutError(
            f"overlap names {unknown[0]!r}, which is no family: there are "
            f"{', '.join(map(repr, families))}"
        )
    result = {
        _name(name): ListFamily(name, world_size, groups, overlap=name in overlap)
        for name, groups in families.items()
    }
    return Layout(world_size, result)


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise LayoutError(f"family {name!r}: expected a name that is not empty")
    return name


def _kept(grid: Dimensions, named: Collection[str]) -> Dimensions:
    """The dimensions of the mesh: slowest first, and of size 1 only those that were asked for."""
    return tuple(d for d in reversed(grid) if d.size > 1 or d.name in named)


def _layout(grids: Grids, words: Words, mesh: Dimensions, expert_mesh: Dimensions) -> Layout:
    if isinstance(words, str):
        words = [word.strip() for word in words.split(",")]
    if not isinstance(words, Iterable):
        raise LayoutError(f"families {shown(words)}: expected words, such as ['tp', 'dp']")
    pairs = words.items() if isinstance(words, Mapping) else [(word, word) for word in words]
    families: dict[str, Family] = {}
    names: dict[Meaning, str] = {}
    for name, word in pairs:
        if _name(name) in families:
            raise LayoutError(f"family {name!r} is there more than once")
        families[name] = grids.family(name, _name(word))
        names.setdefault(grids.meaning(word), name)
    if not families:
        raise LayoutError("families: expected at least one")
    return Layout(
        grids.world_size,
        families,
        mesh_shape=tuple(d.size for d in mesh),
        mesh_names=tuple(d.name for d in mesh),
        expert_mesh_shape=tuple(d.size for d in expert_mesh),
        expert_mesh_names=tuple(d.name for d in expert_mesh),
        _grids=grids,
        _names=names,
    )
