"""Benchmarks: always a ratio to a baseline, measured in the same run. See lab/benchmarks/command.py."""
import runtime  # noqa: F401  before torch: OpenMP and malloc settings
