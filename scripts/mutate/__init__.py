"""Does the proof see a bug? See scripts/mutate/__main__.py."""

from scripts.mutate.checkout import ROOT  # noqa: F401
from scripts.mutate.table import TABLE, Mutation, caught, plant  # noqa: F401
