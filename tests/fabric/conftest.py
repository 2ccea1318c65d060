"""A fabric for each test that asks for one."""

from __future__ import annotations

import pytest
from fabric import Fabric
from ranks import Ranks

from commkit.topology import netns


@pytest.fixture(scope="session")
def needs_lab():
    """Beyond namespaces a lab needs a kernel whose multipath hash can be seeded."""
    if why := netns.why_not():
        pytest.skip(why)


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
