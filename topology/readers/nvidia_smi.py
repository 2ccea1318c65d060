"""The matrix of `nvidia-smi topo -m`: one host's GPUs and NICs.

Cells are separated by tabs (by blanks where the text was pasted), the heading may be underlined
with escape codes, and what follows the link cells differs with the driver: CPU Affinity, NUMA
Affinity, GPU NUMA ID, or nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from commkit.topology.fabric import Device, Fabric, Host, Nic
from commkit.topology.inside import is_kind
from commkit.topology.readers.source import Source

#: More NUMA nodes than a kernel can be built for.
MAX_NUMA = 1024
_ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"GPU\d+")
_TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_LEGEND = re.compile(r"(NIC\d+):\s*(\S+)")


@dataclass(frozen=True)
class Matrix:
    """What the text says, without interpretation.

    nics           column -> adapter, "NIC0" -> "mlx5_0"
    numa, cpus, gpu_numa   of GPUs: None where the cell says N/A or the column is missing
    """

    gpus: tuple[str, ...]
    nics: dict[str, str]
    links: dict[tuple[str, str], str]
    cpus: dict[str, str | None]
    numa: dict[str, tuple[int, ...] | None]
    gpu_numa: dict[str, int | None]


def read(source: Source) -> Fabric:
    """One host, called after the file; several NUMA nodes of one GPU are not one: unknown."""
    matrix = parse(source)
    devices = tuple(
        Device(gpu, numa=_single(matrix.numa[gpu]), cpus=matrix.cpus[gpu]) for gpu in matrix.gpus
    )
    nics = tuple(Nic(name) for name in matrix.nics.values())
    names = {**{gpu: gpu for gpu in matrix.gpus}, **matrix.nics}
    order = {name: place for place, name in enumerate(names)}
    paths = tuple(
        (names[a], names[b], kind) for (a, b), kind in matrix.links.items() if order[a] < order[b]
    )
    host = Host(source.stem, nics, devices, paths=paths)
    note = "the matrix alone does not tell NICs for the job from storage or management NICs"
    return Fabric((host,), notes=(note,) if nics else ())


def parse(source: Source) -> Matrix:
    rows = [_ESCAPE.sub("", line) for line in source.lines()]
    start = next((n for n, row in enumerate(rows) if _GPU.search(row)), None)
    if start is None:
        raise source.nothing("no heading with GPU0")
    tabs = "\t" in rows[start]
    columns = _heading(rows[start], tabs)
    links: dict[tuple[str, str], str] = {}
    cells_of: dict[str, list[str]] = {}
    for n, row in enumerate(rows[start + 1 :], start + 1):
        cells = _cells(row, tabs)
        if not cells or cells[0] not in columns:
            if row.strip():
                break  # the legend
            if cells_of:
                break
            continue
        name, found = cells[0], cells[1:]
        for column, cell in zip(columns, found, strict=False):
            if cell != "X" and not is_kind(cell):
                column_at = max(rows[n].find(cell), 0) + 1
                raise source.error_at(
                    n + 1,
                    column_at,
                    f"{cell!r} between {name} and {column}: expected X, NV#, PIX, "
                    "PXB, PHB, NODE or SYS",
                )
            if column != name:
                links[name, column] = cell
        if len(found) < len(columns):
            raise source.error_at(
                n + 1,
                1,
                f"{name} has {len(found)} cells: expected {len(columns)}, one for each of "
                f"{columns[0]} to {columns[-1]}",
            )
        cells_of[name] = found[len(columns) :]
    missing = [column for column in columns if column not in cells_of]
    if missing:
        raise source.error_at(
            start + 1, 1, f"no row for {missing[0]}: expected one for each column"
        )
    return _matrix(rows, start, columns, links, cells_of, tabs)


def _matrix(
    rows: list[str],
    start: int,
    columns: list[str],
    links: dict[tuple[str, str], str],
    cells_of: dict[str, list[str]],
    tabs: bool,
) -> Matrix:
    gpus = tuple(column for column in columns if _GPU.fullmatch(column))
    legend = {m[1]: m[2] for row in rows if (m := _LEGEND.match(row.strip()))}
    nics = {column: legend.get(column, column) for column in columns if column not in gpus}
    titles = [title for title in _TITLES if title in rows[start]]
    cpus: dict[str, str | None] = {}
    numa: dict[str, tuple[int, ...] | None] = {}
    gpu_numa: dict[str, int | None] = {}
    for gpu in gpus:
        # Empty cells stand between the columns; with blanks instead of tabs there are none.
        tail = [cell for cell in cells_of[gpu] if cell] if tabs else cells_of[gpu]
        values = dict(zip(titles, tail, strict=False))
        cpus[gpu] = _text(values.get("CPU Affinity"))
        numa[gpu] = _numbers(values.get("NUMA Affinity"))
        own = _numbers(values.get("GPU NUMA ID"))
        gpu_numa[gpu] = own[0] if own else None
    return Matrix(gpus, nics, links, cpus, numa, gpu_numa)


def _heading(row: str, tabs: bool) -> list[str]:
    for title in _TITLES:
        row = row.replace(title, "")
    return [cell.strip() for cell in (row.split("\t") if tabs else row.split()) if cell.strip()]


def _cells(row: str, tabs: bool) -> list[str]:
    if tabs and "\t" in row:
        return [cell.strip() for cell in row.split("\t")]
    return row.split()


def _text(cell: str | None) -> str | None:
    return None if cell in (None, "", "N/A") else cell


def _numbers(cell: str | None) -> tuple[int, ...] | None:
    """`0`, `0-1`, `0,2` -> the numbers."""
    if cell is None or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", cell):
        return None
    found: list[int] = []
    for part in cell.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), min(int(high or low), int(low) + MAX_NUMA) + 1)
    return tuple(found)


def _single(numbers: tuple[int, ...] | None) -> int | None:
    return numbers[0] if numbers is not None and len(numbers) == 1 else None
