"""Everything around the step: start-up, metrics, guard, stop, faults. Imports config and parallel, nothing above them.

Import this before torch: OpenMP reads its settings when it is loaded.
"""
import ctypes
import os

# Idle OpenMP threads sleep instead of spinning. Two spinning threads on two cores that a neighbour also uses made a step
# 15 times slower (4.7 s against 0.3 s, measured); on quiet cores sleeping costs a few percent of a tiny model's step.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# glibc keeps freed memory instead of giving it back: the next step's activations come without page faults, which took
# 6 % of a step's CPU time (8 layers, hidden 512, bf16). -1 is M_TRIM_THRESHOLD, -3 M_MMAP_THRESHOLD at its upper bound.
MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)  # none outside glibc
if MALLOPT is not None:
    MALLOPT(-1, 2**31 - 1)
    MALLOPT(-3, 1 << 25)
