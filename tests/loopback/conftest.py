"""Fixtures of the agent tree's tests: `jobs` makes worlds of real ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import overlay_jobs
import overlay_sanitized
import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "sanitizers: runs an agent built with the address and UB sanitizers"
    )


@pytest.fixture(scope="session")
def rank_server() -> Iterator[overlay_jobs.Server]:
    with overlay_jobs.running_server() as server:
        yield server


@pytest.fixture
def jobs(rank_server: overlay_jobs.Server, tmp_path: Path) -> Callable[..., overlay_jobs.Job]:
    """jobs([4, 4]): a job of two hosts with four ranks each; its logs are in tmp_path."""
    return functools.partial(overlay_jobs.Job, rank_server, tmp_path)


@pytest.fixture(scope="session")
def sanitized_agent() -> Path:
    return overlay_sanitized.agent()


@pytest.fixture(params=["plain", pytest.param("sanitized", marks=pytest.mark.sanitizers)])
def checked_jobs(
    request: pytest.FixtureRequest, jobs: Callable[..., overlay_jobs.Job]
) -> Callable[..., overlay_jobs.Job]:
    """As `jobs`, with the agent that users get and once more with a sanitized one."""
    if request.param == "plain":
        return jobs
    return functools.partial(jobs, agent=request.getfixturevalue("sanitized_agent"))
