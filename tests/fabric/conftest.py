"""A fabric for each test that asks for one."""

from __future__ import annotations

import pytest
from fabric import Fabric
from ranks import Ranks


@pytest.fixture
def fabric():
    with Fabric() as made:
        yield made


@pytest.fixture
def ranks(fabric, tmp_path):
    """Ranks(placement, master=...) of this test's fabric, with the agents' logs in tmp_path."""

    def make(placement, **options):
        return Ranks(fabric, placement, tmp_path, **options)

    return make
