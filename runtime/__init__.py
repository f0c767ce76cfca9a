"""Everything around the training step: start-up, metrics, evaluation, stop, failures.

Import this package before torch, since OpenMP reads its settings when it is loaded.
"""
import ctypes
import os

import config.machine  # noqa: F401  ends here on Windows, which has no CDLL(None) either

# Let idle OpenMP threads sleep instead of spinning. Two spinning threads on two cores shared with another
# process made a step 15 times slower (4.7 s against 0.3 s, measured). On idle cores sleeping costs a few
# percent of a tiny model's step.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Make glibc keep freed memory instead of returning it to the kernel. This avoids page faults on the
# activations of the next step, which took 6 % of a step's CPU time (8 layers, hidden 512, bf16).
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)  # None outside of glibc
if MALLOPT is not None:
    MALLOPT(M_TRIM_THRESHOLD, 2**31 - 1)
    MALLOPT(M_MMAP_THRESHOLD, 1 << 25)  # the maximum
