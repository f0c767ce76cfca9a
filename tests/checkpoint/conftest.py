"""A folder with two committed checkpoints."""
import pytest
from sample import state, whole

from checkpoint import store


@pytest.fixture
def saved(tmp_path):
    """(root, path of step 20, its tensors); step 10 is there too."""
    store.save(tmp_path, 10, whole(state(10)), {"tokens": 10}, keep=3)
    return tmp_path, store.save(tmp_path, 20, whole(state(20)), {"tokens": 20}, keep=3), state(20)
