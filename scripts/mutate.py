"""Checks whether the proof catches bugs: lab/proof/mutate/command.py."""
import sys

from lab.proof.mutate.command import main
from runtime.failure import fail_cleanly

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
