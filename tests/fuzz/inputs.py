"""What the harnesses are given: kept inputs, one base64 line each, and those that once failed."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
KEPT = HERE / "corpus"  # HARNESS.txt: together they reach what long runs have reached
FAILED = HERE / "crashes"  # HARNESS/NAME: named by the fault


def kept(harness: str) -> list[bytes]:
    path = KEPT / f"{harness}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [base64.b64decode(line) for line in lines]


def keep(harness: str, found: list[bytes]) -> None:
    lines = sorted((base64.b64encode(one).decode() for one in found), key=lambda s: (len(s), s))
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{harness}.txt").write_text("".join(f"{line}\n" for line in lines))


def failed(harness: str) -> list[Path]:
    return sorted((FAILED / harness).glob("*"))


def unpack(harness: str, directory: Path) -> None:
    """Writes the kept inputs and those that once failed into `directory`, a file each."""
    directory.mkdir(parents=True, exist_ok=True)
    for one in [*kept(harness), *(path.read_bytes() for path in failed(harness))]:
        (directory / hashlib.sha1(one).hexdigest()).write_bytes(one)
