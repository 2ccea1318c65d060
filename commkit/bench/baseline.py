"""A run beside an earlier one: what --baseline says at its end."""

from __future__ import annotations

from collections.abc import Sequence

from commkit.bench import compare
from commkit.errors import EXIT_REGRESSION, EXIT_USAGE, UsageError
from commkit.records import Measurement


def judge(
    path: str, threshold: float, records: Sequence[Measurement]
) -> tuple[list[str], int, str]:
    """(lines to print, exit code, what is short in a few words) of `records` beside file `path`.

    Code 0, EXIT_REGRESSION, or EXIT_USAGE where nothing can be compared.  Wrong data are the
    run's own business.
    """
    try:
        found = compare.against(path, records, threshold)
    except UsageError as error:
        return [f"# baseline {path}: {error}"], EXIT_USAGE, str(error)
    lines = [f"# baseline {path}", *found.lines()]
    if not found.slower:
        return lines, 0, ""
    rows = len(found.slower)
    return lines, EXIT_REGRESSION, f"{rows} of {len(found.rows)} rows are slower than {path}"
