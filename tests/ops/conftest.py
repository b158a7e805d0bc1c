"""What tests of compiled operators share."""

import os
from collections.abc import Iterator

import pytest

from tiers.compiled.options import compiled


@pytest.fixture(scope="module")
def compiling() -> Iterator[None]:
    """The other tests switch torch.compile off, see conftest.py above."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    compiled.cache_clear()
    yield
    compiled.cache_clear()
    if before is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = before
