"""Benchmarks, always against a baseline in one run: lab/benchmarks/command.py."""
import sys

from config.command_line import needs_lab

with needs_lab():
    from lab.benchmarks.first_environment import prepare

prepare(sys.argv[1:])  # before torch and Triton

from lab.benchmarks.command import main
from runtime.failure import fail_cleanly

if __name__ == "__main__":
    sys.exit(fail_cleanly(main, sys.argv[1:]))
