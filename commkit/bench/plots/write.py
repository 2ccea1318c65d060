"""Files with charts, their sort told by their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from commkit.bench.plots import page, png, results
from commkit.bench.plots.results import Source
from commkit.errors import UsageError


def write(
    sources: Sequence[Source], outputs: Sequence[str], link: float | None = None, title: str = ""
) -> list[tuple[str, int]]:
    """(path, number of charts) of what was written.  Raises UsageError before anything is."""
    for output in outputs:
        if Path(output).suffix not in (".html", ".png"):
            raise UsageError(f"-o {output}: expected a name that ends in .html or .png")
    if link is not None and not 0 < link < 1e6:
        raise UsageError(f"--link-speed {link:g}: expected GB/s above 0, such as 50 for NDR")
    names = [Path(path).name for path, _ in sources]
    # Files of the same name are told apart by their directories.
    labels = names if len(set(names)) == len(names) else [path for path, _ in sources]
    named = [(label, found) for label, (_, found) in zip(labels, sources, strict=True)]
    charts = results.charts(named, link)
    if not charts:
        raise UsageError(f"{', '.join(labels)}: nothing to draw; expected rows with size and time")
    title = title or ", ".join(labels)
    for output in outputs:
        if output.endswith(".png"):
            png.save(charts, output, title)
            continue
        try:
            Path(output).write_text(page.page(named, charts, title), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{output}: {error.strerror}: expected a file to write") from None
    return [(output, len(charts)) for output in outputs]
