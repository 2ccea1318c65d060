"""A bar on the terminal of rank 0; silent where standard error is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Bar:
    """Moves only between phases: drawing while a size is timed would disturb the times."""

    def __init__(self, total: int, enabled: bool) -> None:
        self._progress: Progress | None = None
        self._task = TaskID(0)
        if enabled and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} sizes"),
                TimeElapsedColumn(),
                console=Console(file=sys.stderr),
                auto_refresh=False,  # no thread of its own
                transient=True,
                redirect_stdout=False,  # the table may go to a file
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("", total=total)
            self._progress.start()

    def show(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text)
            self._progress.refresh()

    def advance(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._task)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While rows are printed: they may share the terminal with the bar."""
        if self._progress is None:
            yield
            return
        self._progress.stop()
        try:
            yield
        finally:
            self._progress.start()

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
