"""Benchmarks, always beside a baseline in one run: benchmarks/command.py."""
import sys

from benchmarks.first_environment import prepare

prepare(sys.argv[1:])  # before torch and Triton

from benchmarks.command import main
from runtime.failure import fail_cleanly

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
