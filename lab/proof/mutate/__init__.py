"""Does the proof catch a bug? See lab/proof/mutate/command.py."""

from lab.proof.mutate.checkout import ROOT  # noqa: F401
from lab.proof.mutate.table import TABLE, Mutation, caught, plant  # noqa: F401
