"""What is to be created: "tp=8,cp=2,dp=16,pp=8", a device mesh or lists of ranks -> named families.

Ranks are numbered as Megatron numbers them: `order` names the dimensions, the one whose ranks are
neighbours first.  The experts of a mixture have a grid of their own over the same ranks, etp x ep x
edp x pp, where expert data parallelism (edp) is what remains; ep is no factor of the world.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from commkit.errors import LayoutError, UsageError
from commkit.families import Family, GridFamily, ListFamily

ORDER = "tp-cp-ep-dp-pp"

#: The groups that Megatron-core makes, in its order.
MEGATRON = (
    *("dp-cp", "dp", "cp", "mp", "tp", "pp", "embd", "pos_embd", "tp-dp-cp", "tp-dp", "tp-cp"),
    *("ep", "etp", "tp-ep", "tp-ep-pp", "edp", "intra_dist_opt"),
)
#: Those it adds if the optimizer is sharded over several instances (dp_replicate > 1).
_INSTANCES = {"dp-cp": ("intra_dp_cp",), "edp": ("intra_edp", "inter_edp")}

#: Other words for the same families: what Megatron's settings call them, and short forms.
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
_SPECIAL = ("embd", "pos_embd", "intra_dp_cp", "intra_edp", "inter_edp", "intra_dist_opt")

_DENSE = ("tp", "cp", "dp", "pp")
_HYBRID = ("dp_shard", "dp_replicate")
_EXPERT = ("ep", "etp")
_WORD = re.compile(r"[a-z][a-z0-9_]*")

Dimensions = tuple[tuple[str, int, int], ...]  # name, size, stride; the fastest first


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
    #: meaning -> name, so that "dp-tp" finds "tp-dp", and "tp-pp" finds "mp"
    _meanings: Mapping[Any, str] = field(default_factory=dict, repr=False)
    _grids: _Grids | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> Family:
        """The family `name`, by any of its words.  UsageError listing what there is."""
        found = self.families.get(name)
        if found is None and self._grids is not None:
            try:
                found = self.families.get(self._meanings.get(self._grids.meaning(name), ""))
            except LayoutError:
                found = None
        if found is None:
            raise UsageError(
                f"no family {name!r} in this layout: it has {', '.join(map(repr, self.families))}"
            )
        return found

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and self[name] is not None
        except UsageError:
            return False

    def describe(self) -> str:
        """Canonical text of everything that is created, a line: equal iff the layouts are equal."""
        parts = [f"{name!r}: {family.describe()}" for name, family in self.families.items()]
        return f"{self.world_size} ranks; " + "; ".join(parts)

    def digest(self) -> bytes:
        """SHA-256 of describe(), parts prefixed with their lengths; the same in every process."""
        digest = hashlib.sha256(b"commkit layout 1")
        parts = [str(self.world_size)]
        for name, family in self.families.items():
            parts += (name, family.describe())
        for part in parts:
            data = part.encode("utf-8", "surrogatepass")
            digest.update(len(data).to_bytes(8, "big") + data)
        return digest.digest()


@dataclass(frozen=True)
class _Grids:
    """The grid of the dense part, and that of the experts; they share pp."""

    world_size: int
    dense: Dimensions
    expert: Dimensions = ()
    instances: int = 1  # of the distributed optimizer
    mesh: bool = False  # names are a mesh's: no word has a special meaning

    def names(self) -> set[str]:
        return {name for name, _, _ in (*self.dense, *self.expert)}

    def meaning(self, name: str) -> tuple[str, frozenset[str]]:
        """(which grid or special family, dimensions inside): equal for two words of one thing."""
        if self.mesh:
            if name in self.names():
                return "dense", frozenset((name,))
            return "dense", frozenset(self._known(token, name) for token in name.split("-"))
        name = ALIASES.get(name.lower(), name.lower())
        if name in _SPECIAL:
            return name, frozenset()
        tokens = name.split("-")
        expert = any(token in ("ep", "etp") or token.startswith("edp") for token in tokens)
        result: set[str] = set()
        for token in tokens:
            if expert and token == "cp":
                raise LayoutError(f"family {name!r}: the experts' part of a layout has no cp")
            if expert:
                token = {"tp": "etp", "dp": "edp"}.get(token, token)
            if token in ("dp", "edp") and token not in self.names():
                halves = {f"{token}_shard", f"{token}_replicate"}
                result |= {self._known(half, name) for half in halves}
            else:
                result.add(self._known(token, name))
        return "expert" if expert else "dense", frozenset(result)

    def _known(self, token: str, name: str) -> str:
        if token not in self.names():
            special = "" if self.mesh else f"; and {', '.join(_SPECIAL)}, mp"
            raise LayoutError(
                f"family {name!r}: no dimension {token!r} in this layout: it has "
                f"{', '.join(sorted(self.names()))}, joined by '-' for several{special}"
            )
        return token

    def family(self, name: str, word: str) -> Family:
        """The family that `word` means, under `name`."""
        grid, inside = self.meaning(word)
        if grid in ("embd", "pos_embd"):
            last = self._size(self.dense, "pp") - 1
            pick = (0, last) if grid == "embd" else (0,)
            return self._along(name, self.dense, ("pp",), pick=pick)
        if grid == "intra_dp_cp":
            tokens = self.meaning("dp-cp")[1]
            size = math.prod(self._size(self.dense, token) for token in tokens)
            return self._along(name, self.dense, tokens, split=(size // self.instances, 1))
        if grid in ("intra_edp", "inter_edp"):
            tokens = self.meaning("edp")[1]
            size = math.prod(self._size(self.expert, token) for token in tokens)
            split = (size // self.instances, 1)
            if grid == "inter_edp":
                split = (self.instances, size // self.instances)
            return self._along(name, self.expert, tokens, split=split)
        if grid == "intra_dist_opt":
            return self._dist_opt(name)
        return self._along(name, self.dense if grid == "dense" else self.expert, inside)

    def _dist_opt(self, name: str) -> Family:
        """One instance of the optimizer: its tp-ep-pp groups, one after the other."""
        inner: list[tuple[int, int]] = []
        outer: list[tuple[int, int]] = []
        replicas = self.instances
        edp = self.meaning("edp")[1]
        for token, size, stride in self.expert:
            if token not in edp:
                inner.append((size, stride))
        for token, size, stride in self.expert:
            if token in edp:
                if token == "edp":
                    shard = size // replicas
                    inner.append((shard, stride))
                    outer.append((replicas, stride * shard))
                elif token == "edp_shard":
                    inner.append((size, stride))
                else:
                    outer.append((size, stride))
        return GridFamily(name, self.world_size, inner, outer)

    def _along(
        self, name: str, grid: Dimensions, inside: Collection[str], **narrowed: Any
    ) -> Family:
        inner = [(size, stride) for token, size, stride in grid if token in inside]
        outer = [(size, stride) for token, size, stride in grid if token not in inside]
        return GridFamily(name, self.world_size, inner, outer, **narrowed)

    def _size(self, grid: Dimensions, name: str) -> int:
        return next((size for token, size, _ in grid if token == name), 1)


def parse(
    text: str,
    world_size: int,
    *,
    order: str = ORDER,
    families: str | Iterable[str] | Mapping[str, str] | None = None,
    allow_partial: bool = False,
) -> Layout:
    """The layout that `text` describes: "tp=8,cp=2,ep=4,dp=16,pp=8".

    tp, cp, dp, pp   sizes whose product is the world size; one may be -1, dp may be left out: it
                     is then what remains.  A dimension of size 1 has groups of one rank.
    dp_replicate, dp_shard   dp as HSDP has it; either may be left out or -1
    ep, etp          expert and expert tensor parallelism: etp x ep x edp x pp is the world again;
                     etp is tp unless it is given
    Other words are allowed if `order` has them.

    `order` is Megatron's: the dimension of neighbouring ranks first; what it does not name has
    size 1.  `families` says what is created, and in which order: None one family for each
    dimension in `text`; "megatron" all groups of Megatron-core; or words, each a dimension or
    several joined by "-" ("tp-dp"), "embd", "pos_embd", "mp" or another name of Megatron's, as a
    list, comma-separated, or as {name: word}.  With `allow_partial` the layout may be smaller than
    the world; the ranks beyond it are in no group.

    Raises LayoutError (a ValueError and a UsageError).
    """
    world_size = _world(world_size)
    given = _sizes(text)
    tokens = _order(order, given)
    named = list(given)
    sizes = _complete(given, world_size, allow_partial)
    if "dp" not in given and not any(name in given for name in _HYBRID) and sizes["dp"] >= 1:
        named.append("dp")
    covered = math.prod(size for name, size in sizes.items() if name not in _EXPERT)
    dense = _strides(tokens, sizes, skip=_EXPERT)
    expert, instances = _expert(text, tokens, sizes, dense, covered)
    grids = _Grids(world_size, dense, expert, instances)
    if families is None:
        families = [token for token in _spread(tokens, sizes, named) if token != "etp"]
        families += [name for name in named if name == "etp"]
        if "ep" in named:
            families += ["edp"]
    elif isinstance(families, str) and families.lower() == "megatron":
        families = [
            word
            for name in MEGATRON
            for word in (name, *(_INSTANCES.get(name, ()) if instances > 1 else ()))
        ]
    layout_families, meanings = _families(grids, families)
    kept = [d for d in reversed(dense) if d[1] > 1 or d[0] in named]
    kept_expert = [d for d in reversed(expert) if d[1] > 1 or d[0] in named]
    if not any(name in _EXPERT for name in named):
        kept_expert = []
    return Layout(
        world_size,
        layout_families,
        mesh_shape=tuple(size for _, size, _ in kept),
        mesh_names=tuple(name for name, _, _ in kept),
        expert_mesh_shape=tuple(size for _, size, _ in kept_expert),
        expert_mesh_names=tuple(name for name, _, _ in kept_expert),
        _meanings=meanings,
        _grids=grids,
    )


def from_mesh(
    shape: Sequence[int],
    names: Sequence[str] | None,
    world_size: int,
    *,
    families: str | Iterable[str] | Mapping[str, str] | None = None,
    allow_partial: bool = False,
) -> Layout:
    """The layout of torch's init_device_mesh(..., shape, mesh_dim_names=names): row-major, the
    last dimension that of neighbouring ranks.

    Without names the dimensions are "dim_0", "dim_1", ...  `families` as for parse(), in words of
    `names`; None is every dimension, the first one first, as torch creates them.
    """
    world_size = _world(world_size)
    sizes = [_size(f"mesh dimension {index}", size) for index, size in enumerate(shape)]
    if not sizes:
        raise LayoutError("the shape of a mesh is empty: expected one size or more, such as (2, 4)")
    words = [f"dim_{index}" for index in range(len(sizes))] if names is None else list(names)
    if len(words) != len(sizes):
        raise LayoutError(
            f"{len(words)} names {tuple(words)} for a mesh of {len(sizes)} dimensions"
        )
    for word in words:
        if not isinstance(word, str) or not word:
            raise LayoutError(f"mesh dimension {word!r}: expected a name that is not empty")
        if words.count(word) > 1:
            raise LayoutError(f"mesh dimension {word!r} is there more than once in {tuple(words)}")
    covered = math.prod(sizes)
    _fits(" * ".join(map(str, sizes)), covered, world_size, allow_partial)
    named = dict(zip(words, sizes, strict=True))
    grids = _Grids(world_size, _strides(words[::-1], named), mesh=True)
    result, meanings = _families(grids, words if families is None else families)
    return Layout(
        world_size,
        result,
        mesh_shape=tuple(sizes),
        mesh_names=tuple(words),
        _meanings=meanings,
        _grids=grids,
    )


def from_lists(
    families: Mapping[str, Iterable[Any]], world_size: int, *, overlap: Collection[str] = ()
) -> Layout:
    """A layout of explicit lists of ranks, {family: [[0, 1], [2, 3, 4]]}, kept in their order.

    A list may be whatever check_ranks() takes.  Groups of a family may differ in size and may
    leave ranks out; they have no rank in common unless `overlap` names the family.
    Raises LayoutError or LayoutTypeError naming family, group and rank.
    """
    world_size = _world(world_size)
    if isinstance(overlap, str):
        overlap = (overlap,)
    if unknown := [name for name in overlap if name not in families]:
        raise LayoutError(
            f"overlap names {unknown[0]!r}, which is no family: there are "
            f"{', '.join(map(repr, families))}"
        )
    result: dict[str, Family] = {}
    for name, groups in families.items():
        _name(name)
        result[name] = ListFamily(name, world_size, groups, overlap=name in overlap)
    return Layout(world_size, MappingProxyType(result))


# --- Parts of parse() ----------------------------------------------------------------------------


def _world(world_size: Any) -> int:
    if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
        raise LayoutError(f"world size {world_size!r}: expected an integer of at least 1")
    return world_size


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise LayoutError(f"family {name!r}: expected a name that is not empty")
    return name


def _size(what: str, size: Any, *, infer: bool = False) -> int:
    try:
        value = int(size) if isinstance(size, str) else size.__index__()
    except (ValueError, AttributeError):
        value = 0
    if value < 1 and not (infer and value == -1):
        what_else = " or -1 (what remains)" if infer else ""
        raise LayoutError(f"{what}={size}: expected an integer of at least 1{what_else}")
    return int(value)


def _sizes(text: str) -> dict[str, int]:
    if not isinstance(text, str):
        raise LayoutError(f"layout {text!r}: expected text such as 'tp=8,dp=16'")
    sizes: dict[str, int] = {}
    for item in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.lower()
        if not equals or not _WORD.fullmatch(name) or not value:
            raise LayoutError(
                f"layout {text!r}: {item.strip()!r} is no NAME=SIZE, such as in 'tp=8,dp=16'"
            )
        if name in sizes:
            raise LayoutError(f"layout {text!r}: {name} is there more than once")
        sizes[name] = _size(f"layout {text!r}: {name}", value, infer=name not in _EXPERT)
    return sizes


def _order(order: str, given: Mapping[str, int]) -> list[str]:
    """The dimensions, fastest first; `dp` as its halves where the layout has those."""
    tokens = order.lower().split("-")
    for token in tokens:
        if not _WORD.fullmatch(token):
            raise LayoutError(f"order {order!r}: expected names joined by '-', such as {ORDER}")
        if tokens.count(token) > 1:
            raise LayoutError(f"order {order!r}: {token} is there more than once")
        if token in ("etp", "edp"):
            raise LayoutError(
                f"order {order!r}: {token} has the place of {token[1:]}; leave it out"
            )
    known = {*_DENSE, *_HYBRID, *_EXPERT, *tokens}
    for name in given:
        if name not in known:
            raise LayoutError(
                f"layout: unknown dimension {name!r}: expected one of "
                f"{', '.join([*_DENSE, *_HYBRID, *_EXPERT])}, or one that the order names"
            )
    hybrid = any(name in given for name in _HYBRID)
    if any(name in tokens for name in _HYBRID):
        if "dp" in tokens:
            raise LayoutError(f"order {order!r}: dp is dp_shard and dp_replicate: name either")
        if not hybrid:
            raise LayoutError(f"order {order!r}: the layout has neither dp_shard nor dp_replicate")
    elif hybrid and "dp" in tokens:
        place = tokens.index("dp")
        tokens[place : place + 1] = _HYBRID
    for name, size in given.items():
        place_of = {"etp": "tp", "dp": tokens[0] if hybrid else "dp"}.get(name, name)
        if place_of not in tokens and size != 1:
            raise LayoutError(
                f"layout: {name}={size}, but the order {order!r} does not name {place_of}"
            )
    # What the order does not name has size 1; its place changes nothing.
    tail = [] if hybrid else ["dp"]
    tokens += [name for name in ("tp", "cp", "ep", "pp", *tail) if name not in tokens]
    tokens += [name for name in _HYBRID if hybrid and name not in tokens]
    return tokens


def _complete(given: Mapping[str, int], world_size: int, allow_partial: bool) -> dict[str, int]:
    """Sizes of all dimensions: what was left out is 1, what is -1 (or dp) is what remains."""
    sizes = dict(given)
    hybrid = [name for name in _HYBRID if name in given]
    whole = sizes.pop("dp", None) if hybrid else None
    if len(hybrid) == 1:
        other = _HYBRID[1 - _HYBRID.index(hybrid[0])]
        sizes[other] = -1
    if whole is not None and whole != -1:
        unknown = [name for name in _HYBRID if sizes[name] == -1]
        known = math.prod(sizes[name] for name in _HYBRID if name not in unknown)
        if len(unknown) == 1 and whole % known == 0:
            sizes[unknown[0]] = whole // known
        elif unknown or known != whole:
            halves = " and ".join(f"{name}={sizes[name]}" for name in _HYBRID)
            raise LayoutError(f"layout: dp={whole} is not the product of {halves}")
    if not hybrid:
        sizes.setdefault("dp", -1)
    for name in ("tp", "cp", "pp"):
        sizes.setdefault(name, 1)
    dense = {name: size for name, size in sizes.items() if name not in _EXPERT}
    open_ones = [name for name, size in dense.items() if size == -1]
    shown = {name: size for name, size in dense.items() if name in given and size != -1}
    product = math.prod(size for size in dense.values() if size != -1)
    if len(open_ones) > 1:
        raise LayoutError(
            f"layout: {' and '.join(open_ones)} are both to be what remains: give the size of one"
        )
    terms = "*".join(shown) or "1"
    factors = "*".join(map(str, shown.values())) or "1"
    if open_ones:
        if world_size % product:
            raise LayoutError(
                f"layout: a world of {world_size} is not divisible by {terms} = {factors}"
                f"{f' = {product}' if len(shown) > 1 else ''}, so there is no {open_ones[0]}"
            )
        sizes[open_ones[0]] = world_size // product
    else:
        _fits(f"{terms} = {factors}", product, world_size, allow_partial, many=len(shown) > 1)
    return sizes


def _fits(
    terms: str, product: int, world_size: int, allow_partial: bool, *, many: bool = True
) -> None:
    if product == world_size or (allow_partial and product < world_size):
        return
    hint = "; allow_partial=True leaves the other ranks out" if product < world_size else ""
    raise LayoutError(
        f"layout: {terms}{f' = {product}' if many else ''}, but the world size is "
        f"{world_size}{hint}"
    )


def _strides(
    tokens: Iterable[str], sizes: Mapping[str, int], skip: Collection[str] = ()
) -> Dimensions:
    result: list[tuple[str, int, int]] = []
    stride = 1
    for token in tokens:
        if token not in skip:
            size = sizes.get(token, 1)
            result.append((token, size, stride))
            stride *= size
    return tuple(result)


def _expert(
    text: str, tokens: Sequence[str], sizes: Mapping[str, int], dense: Dimensions, covered: int
) -> tuple[Dimensions, int]:
    """The experts' grid over the same ranks, and the number of optimizer instances."""
    replicas = sizes.get("dp_replicate", 1)
    ep, tp, pp = sizes.get("ep", 1), sizes["tp"], sizes["pp"]
    etp = sizes.get("etp", tp)
    extra = [t for t in tokens if t not in (*_DENSE, *_HYBRID, *_EXPERT)]
    others = math.prod(sizes.get(token, 1) for token in extra)
    stage = covered // (pp * others)
    asked = "ep" in sizes or "etp" in sizes
    if stage % (etp * ep):
        beside = covered // (pp * others * tp)
        problem = f"layout {text!r}: ep={ep} with etp={etp}"
        if etp == tp and "etp" not in sizes:
            problem = f"layout {text!r}: ep={ep}: {ep} does not divide dp*cp = {beside}"
            if ep > 1 and stage % ep == 0:
                problem += "; with etp=1 the experts of a group may span tp"
        else:
            problem += (
                f": etp*ep = {etp * ep} does not divide the {stage} ranks of a pipeline stage"
            )
        raise LayoutError(problem)
    edp = stage // (etp * ep)
    expert_sizes = {**sizes, "etp": etp, "ep": ep, "edp": edp}
    names = {"tp": "etp", "dp": "edp", "dp_shard": "edp_shard", "dp_replicate": "edp_replicate"}
    if "dp_replicate" in tokens:
        if edp % replicas:
            if asked:
                raise LayoutError(
                    f"layout {text!r}: dp_replicate={replicas} does not divide the experts' data "
                    f"parallel size of {edp}"
                )
            return (), replicas
        expert_sizes |= {"edp_replicate": replicas, "edp_shard": edp // replicas}
    places = [names.get(token, token) for token in tokens if token != "cp"]
    expert = _strides(places, expert_sizes)
    strides = {name: stride for name, _, stride in dense}
    for name, size, stride in expert:
        if size > 1 and name in ("pp", *extra) and strides[name] != stride:
            if asked:
                raise LayoutError(
                    f"layout {text!r}: with this order the pipeline stages of the experts would "
                    f"have other ranks than those of the rest; put {name} last"
                )
            return (), replicas
    return expert, replicas


def _spread(tokens: Sequence[str], sizes: Mapping[str, int], named: Collection[str]) -> list[str]:
    """The named dimensions, in the order's order; both halves of dp if one is named."""
    both = any(name in named for name in _HYBRID)
    return [t for t in tokens if t in named or (both and t in _HYBRID)]


def _families(
    grids: _Grids, wanted: str | Iterable[str] | Mapping[str, str]
) -> tuple[Mapping[str, Family], Mapping[Any, str]]:
    if isinstance(wanted, str):
        wanted = [word.strip() for word in wanted.split(",")]
    pairs = wanted.items() if isinstance(wanted, Mapping) else [(word, word) for word in wanted]
    result: dict[str, Family] = {}
    meanings: dict[Any, str] = {}
    for name, word in pairs:
        _name(name)
        _name(word)
        if name in result:
            raise LayoutError(f"family {name!r} is there more than once")
        result[name] = grids.family(name, word)
        meanings.setdefault(grids.meaning(word), name)
    if not result:
        raise LayoutError("families: expected at least one")
    return MappingProxyType(result), MappingProxyType(meanings)
