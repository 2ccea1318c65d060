"""Records as CSV: a column a field, those of `first_wrong` apart, lists and objects as JSON.

The header names every field in the order of docs/records.md; a missing value is an empty cell.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from commkit.records import Measurement, WrongElement

_WRONG = tuple(f"first_wrong_{item.name}" for item in fields(WrongElement))
COLUMNS = tuple(
    name
    for item in fields(Measurement)
    for name in (_WRONG if item.name == "first_wrong" else (item.name,))
)


def lines(records: Iterable[Measurement]) -> Iterator[str]:
    """Header first; without line ends.  RFC 4180, but lines end as the caller ends them."""
    yield _line(COLUMNS)
    for record in records:
        yield _line(_cells(record))


def _cells(record: Measurement) -> Iterator[Any]:
    for item in fields(Measurement):
        value = getattr(record, item.name)
        if item.name == "first_wrong":
            for part in fields(WrongElement):
                yield "" if value is None else getattr(value, part.name)
        elif isinstance(value, (tuple, dict)):
            yield json.dumps(value)
        elif isinstance(value, bool):
            yield "true" if value else "false"
        else:
            yield "" if value is None else value


def _line(cells: Iterable[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow(cells)
    return buffer.getvalue()
