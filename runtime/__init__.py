"""Everything around the step: start-up, metrics, guard, stop, faults. Imports config and parallel, nothing above them.

Import this before torch: OpenMP reads its settings when it is loaded.
"""
import os

# Idle OpenMP threads sleep instead of spinning. Two spinning threads on two cores that a neighbour also uses made a step
# 15 times slower (4.7 s against 0.3 s, measured); on quiet cores sleeping costs a few percent of a tiny model's step.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
