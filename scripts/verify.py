"""Proves that every parallel layout trains like one process: lab/proof/verify/command.py."""
import sys

from config.command_line import needs_lab
from runtime.failure import fail_cleanly

with needs_lab():
    from lab.proof.verify.command import main

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
