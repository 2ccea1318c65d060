"""The fuzz harnesses as programs: under libFuzzer with clang, or as plain replays of inputs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "cpp"))

import native_programs  # noqa: E402

#: One file each: a LLVMFuzzerTestOneInput, and at its top what it shows.
HARNESSES = ("agent", "client", "handshake", "parsers", "store", "stream", "tuner")
SHARED = ("agent_peers", "simulated")
#: Without the agent, and without its simulated clock.
ALONE = ("tuner",)
WRAPPED = [f"-Wl,--wrap={name}" for name in ("clock_gettime", "getrandom", "usleep")]


def clang() -> str:
    """A clang++ with libFuzzer, or ''."""
    names = ["clang++", *(f"clang++-{n}" for n in range(25, 10, -1))]
    return next((path for path in map(shutil.which, names) if path), "")


def sources(harness: str) -> list[Path]:
    if harness in ALONE:
        return [HERE / f"{harness}.cc", *native_programs.tuner_sources()]
    own = [HERE / f"{name}.cc" for name in (harness, *SHARED)]
    return [*native_programs.agent_sources(main=False), *own]


def wrapped(harness: str) -> list[str]:
    return [] if harness in ALONE else WRAPPED


def fuzzer(harness: str) -> Path:
    return native_programs.build(
        f"fuzz-{harness}",
        sources(harness),
        ["-fsanitize=fuzzer-no-link", *native_programs.ADDRESS],
        link=["-fsanitize=fuzzer", *wrapped(harness)],
        command=[clang()],
    )


def replay(harness: str) -> Path:
    """Runs the harness once on each file it is given; any compiler will do."""
    return native_programs.build(
        f"replay-{harness}",
        [*sources(harness), HERE / "replay_main.cc"],
        native_programs.ADDRESS,
        link=wrapped(harness),
    )
