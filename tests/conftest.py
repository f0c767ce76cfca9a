"""One thread a process: the tests share two cores, and a single thread makes every result bitwise repeatable."""
import runtime  # noqa: F401  before torch (see there)

import torch

torch.set_num_threads(1)
