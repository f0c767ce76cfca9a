"""One thread a process: the tests share two cores, and a single thread makes every result bitwise repeatable."""
import runtime  # noqa: F401  before torch (see there)

import pytest
import torch

from runtime.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """ranks(n): a warm pool of n gloo ranks, one for the whole run of tests (runtime/pool.py)."""
    pools = {}

    def pool(n: int) -> Pool:
        if n not in pools:
            pools[n] = Pool(n)
        return pools[n]

    yield pool
    for p in pools.values():
        p.close()
