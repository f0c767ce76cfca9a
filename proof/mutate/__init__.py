"""Does the proof see a bug? See proof/mutate/command.py."""

from proof.mutate.checkout import ROOT  # noqa: F401
from proof.mutate.table import TABLE, Mutation, caught, plant  # noqa: F401
