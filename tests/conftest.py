"""One thread a process: the tests share two cores, and a single thread makes every result bitwise repeatable."""
import runtime  # noqa: F401  before torch (see there)

import contextlib
import os

import pytest
import torch

if not torch.cuda.is_available():  # kernels run through Triton's interpreter, which decides when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ImportError):  # no wheel for this platform: the tests that need it skip themselves
        import interpreter  # noqa: F401

from runtime.pool import Pool

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """ranks(n): a warm pool of n gloo ranks, one for the whole run of tests (runtime/pool.py)."""
    pools = {}

    def pool(n: int) -> Pool:
        if n not in pools or pools[n].closed:  # a rank that failed closes its pool: the next test gets another
            pools[n] = Pool(n)
        return pools[n]

    yield pool
    for p in pools.values():
        p.close()
