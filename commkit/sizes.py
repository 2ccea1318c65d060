"""`tp=8,cp=2,ep=4,dp=16,pp=8` and an order -> the sizes of all dimensions, and their grids."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from commkit.errors import LayoutError
from commkit.grids import Dimensions, Grids, strides
from commkit.ranks import shown

ORDER = "tp-cp-ep-dp-pp"

_DENSE = ("tp", "cp", "dp", "pp")
_HYBRID = ("dp_shard", "dp_replicate")
_EXPERT = ("ep", "etp")
_WORD = re.compile(r"[a-z][a-z0-9_]*")
_NUMBER = re.compile(r"-?[0-9]{1,18}")

MOST_RANKS = 1 << 24  # that the agents take (csrc/overlay)


@dataclass(frozen=True, slots=True)
class Request:
    """What a text and an order say: the order is complete, with dp as its halves if it has them."""

    text: str
    order: tuple[str, ...]
    given: Mapping[str, int]  # -1: what remains

    @property
    def hybrid(self) -> bool:
        return any(name in self.given for name in _HYBRID)

    @property
    def experts(self) -> bool:
        return any(name in self.given for name in _EXPERT)

    def named(self) -> list[str]:
        """The dimensions that the text names or leaves to be inferred, in the order's order."""
        names = {name for name in self.given if name != "dp"} | {*(_HYBRID if self.hybrid else ())}
        if not self.hybrid:
            names.add("dp")
        return [name for name in self.order if name in names]


def world(world_size: Any) -> int:
    try:
        size = 0 if isinstance(world_size, bool) else operator.index(world_size)
    except TypeError:
        size = 0
    if not 1 <= size <= MOST_RANKS:
        raise LayoutError(
            f"world size {shown(world_size)}: expected an integer of at least 1"
            + (f" and at most {MOST_RANKS}" if size > 1 else "")
        )
    return size


def positive(what: str, size: Any, *, rest: bool = False) -> int:
    """`size`, a number or its text, as an int of at least 1; with `rest` -1 passes, too."""
    try:
        if isinstance(size, str):
            value = int(size) if _NUMBER.fullmatch(size) else 0
        else:
            value = 0 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        value = 0
    if value < 1 and not (rest and value == -1):
        also = " or -1 (what remains)" if rest else ""
        raise LayoutError(f"{what}={size}: expected an integer of at least 1{also}")
    return value


def fits(terms: str, product: int, world_size: int, allow_partial: bool) -> None:
    if product == world_size or (allow_partial and product < world_size):
        return
    hint = "; allow_partial=True leaves the other ranks out" if product < world_size else ""
    raise LayoutError(f"{terms}, but the world size is {world_size}{hint}")


def read(text: str, order: str) -> Request:
    """Raises LayoutError for what is wrong whatever the world size is."""
    if not isinstance(text, str):
        raise LayoutError(f"layout {shown(text)}: expected text such as 'tp=8,dp=16'")
    what = f"layout {shown(text)}"
    given: dict[str, int] = {}
    for item in text.split(",") if text.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.lower()
        if not equals or not _WORD.fullmatch(name) or not value:
            raise LayoutError(f"{what}: {item.strip()!r} is no NAME=SIZE, such as in 'tp=8,dp=16'")
        if name in given:
            raise LayoutError(f"{what}: {name} is there more than once")
        given[name] = positive(f"{what}: {name}", value, rest=name not in _EXPERT)
    tokens = _tokens(order)
    if any(name.startswith("edp") for name in given):
        raise LayoutError(f"{what}: edp is what etp and ep leave of a pipeline stage; leave it out")
    for name in given:
        if name not in (*_DENSE, *_HYBRID, *_EXPERT, *tokens):
            raise LayoutError(
                f"{what}: unknown dimension {name!r}: expected one of "
                f"{', '.join((*_DENSE, *_HYBRID, *_EXPERT))}, or one that the order names"
            )
    return Request(text, _completed(tokens, given, order, what), given)


def _tokens(order: str) -> list[str]:
    if not isinstance(order, str):
        raise LayoutError(f"order {order!r}: expected text such as {ORDER!r}")
    tokens = order.lower().split("-")
    for token in tokens:
        if not _WORD.fullmatch(token):
            raise LayoutError(f"order {order!r}: expected names joined by '-', such as {ORDER!r}")
        if tokens.count(token) > 1:
            raise LayoutError(f"order {order!r}: {token} is there more than once")
        if token == "etp" or token.startswith("edp"):
            raise LayoutError(f"order {order!r}: {token} goes where {token[1:]} is; leave it out")
    if "dp" in tokens and any(half in tokens for half in _HYBRID):
        raise LayoutError(f"order {order!r}: dp is dp_shard and dp_replicate: name either")
    return tokens


def _completed(
    tokens: list[str], given: Mapping[str, int], order: str, what: str
) -> tuple[str, ...]:
    """The order with every dimension: what it does not name must have size 1, and comes last."""
    hybrid = any(name in given for name in _HYBRID)
    if not hybrid and any(half in tokens for half in _HYBRID):
        raise LayoutError(f"order {order!r}: {what} has neither dp_shard nor dp_replicate")
    if hybrid and "dp" in tokens:
        place = tokens.index("dp")
        tokens[place : place + 1] = _HYBRID
    for name, size in given.items():
        place_of = "tp" if name == "etp" else name
        if place_of not in tokens and size != 1 and not (hybrid and name == "dp"):
            raise LayoutError(
                f"{what}: {name}={size}, but the order {order!r} does not name {place_of}"
            )
    missing = ("tp", "cp", "ep", *(_HYBRID if hybrid else ("dp",)), "pp")
    return (*tokens, *(name for name in missing if name not in tokens))


def grids(request: Request, world_size: int, allow_partial: bool) -> Grids:
    """Raises LayoutError for sizes that do not make the world."""
    sizes = _sizes(request, world_size, allow_partial)
    dense = strides([name for name in request.order if name != "ep"], sizes)
    replicas = sizes.get("dp_replicate", 1)
    try:
        return Grids(world_size, dense, _expert(request, sizes, dense), "", replicas)
    except LayoutError as error:
        if request.experts:
            raise
        return Grids(world_size, dense, (), str(error), replicas)


def _sizes(request: Request, world_size: int, allow_partial: bool) -> dict[str, int]:
    """All sizes but those of the experts' own dimensions: what remains is filled in."""
    what = f"layout {shown(request.text)}"
    sizes = {name: size for name, size in request.given.items() if name not in _EXPERT}
    if request.hybrid:
        _halves(sizes, what)
    else:
        sizes.setdefault("dp", -1)
    remain = [name for name, size in sizes.items() if size == -1]
    known = {name: size for name, size in sizes.items() if size != -1}
    if len(remain) > 1:
        raise LayoutError(
            f"{what}: {' and '.join(remain)} would both be what remains; give the size of one"
        )
    product = math.prod(known.values())
    terms = "*".join(known) + " = " + "*".join(map(str, known.values()))
    terms += f" = {product}" if len(known) > 1 else ""
    if not remain:
        fits(f"{what}: {terms}", product, world_size, allow_partial)
    elif world_size % product:
        raise LayoutError(
            f"{what}: a world of {world_size} is not divisible by {terms}, so no {remain[0]} fits"
        )
    else:
        sizes[remain[0]] = world_size // product
    return sizes


def _halves(sizes: dict[str, int], what: str) -> None:
    """dp_shard and dp_replicate in `sizes`, with the help of dp, which is taken out of it."""
    whole = sizes.pop("dp", -1)
    for half in _HYBRID:
        sizes.setdefault(half, -1)
    if whole == -1:
        return
    remain = [half for half in _HYBRID if sizes[half] == -1]
    known = {half: sizes[half] for half in _HYBRID if half not in remain}
    product = math.prod(known.values())
    terms = "*".join(known) + " = " + "*".join(map(str, known.values()))
    if len(remain) == 1 and whole % product:
        raise LayoutError(f"{what}: dp={whole} is not divisible by {terms}")
    if not remain and whole != product:
        raise LayoutError(f"{what}: dp={whole}, but {terms} = {product}")
    if len(remain) == 1:
        sizes[remain[0]] = whole // product


def _expert(request: Request, sizes: Mapping[str, int], dense: Dimensions) -> Dimensions:
    """The experts' grid: etp x ep x edp re-partition what tp x cp x dp are in the dense one."""
    what = f"layout {shown(request.text)}"
    tp, ep = sizes.get("tp", 1), request.given.get("ep", 1)
    etp = request.given.get("etp", tp)
    apart = [name for name in request.order if name not in ("tp", "cp", "dp", *_HYBRID, "ep")]
    stage = math.prod(d.size for d in dense if d.name not in apart)
    if stage % (etp * ep):
        if "etp" in request.given:
            raise LayoutError(
                f"{what}: etp*ep = {etp}*{ep} = {etp * ep} does not divide the {stage} ranks of a "
                "pipeline stage (tp*cp*dp)"
            )
        hint = "; with etp=1 a group of experts may span tp" if stage % ep == 0 else ""
        raise LayoutError(f"{what}: ep={ep}: {ep} does not divide dp*cp = {stage // tp}{hint}")
    edp, replicas = stage // (etp * ep), sizes.get("dp_replicate", 1)
    if edp % replicas:
        raise LayoutError(
            f"{what}: dp_replicate={replicas} does not divide edp = {edp}, which etp={etp} and "
            f"ep={ep} leave of a pipeline stage"
        )
    own = {"etp": etp, "ep": ep, "edp": edp, "edp_replicate": replicas}
    own |= {"edp_shard": edp // replicas} | {name: sizes.get(name, 1) for name in apart}
    place = {"tp": "etp", "dp": "edp", "dp_shard": "edp_shard", "dp_replicate": "edp_replicate"}
    expert = strides([place.get(name, name) for name in request.order if name != "cp"], own)
    stride = {d.name: d.stride for d in dense}
    for d in expert:
        if d.size > 1 and d.name in apart and stride[d.name] != d.stride:
            raise LayoutError(
                f"{what}: in the order {'-'.join(request.order)} the experts' {d.name} groups "
                f"would have other ranks than those of the rest; put {d.name} last"
            )
    return expert
