"""commkit-agent and a rank's client, built with sanitizers, once for their sources."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
programs = SimpleNamespace(**runpy.run_path(str(ROOT / "tests/cpp/native_programs.py")))


def agent() -> Path:
    """With the address and undefined-behaviour sanitizers."""
    return programs.build("commkit-agent", programs.agent_sources(main=True), programs.ADDRESS)


def thread_agent() -> Path:
    """With ThreadSanitizer."""
    return programs.build("commkit-agent", programs.agent_sources(main=True), programs.THREAD)


def threaded_rank() -> Path:
    """tests/cpp/client_threads.cc, with ThreadSanitizer."""
    own = ROOT / "tests/cpp/client_threads.cc"
    return programs.build(
        "client_threads", [*programs.agent_sources(main=False), own], programs.THREAD
    )
