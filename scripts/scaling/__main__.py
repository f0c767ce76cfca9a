"""Scaling experiments: lab/scaling/command.py."""
import sys

from runtime.failure import fail_cleanly
from lab.scaling.command import main

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
