"""Proves that every parallel layout trains like one process: lab/proof/verify/command.py."""
import sys

from lab.proof.verify.command import main
from runtime.failure import fail_cleanly

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
