"""The library that texts and scores are compared with."""

import pytest


@pytest.fixture(scope="session")
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed: nothing is compared")
