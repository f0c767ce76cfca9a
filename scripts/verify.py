"""Proves that every parallel layout trains like one process: proof/verify/command.py."""
import sys

from proof.verify.command import main
from runtime.failure import fail_cleanly

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
