"""Benchmarks: always a ratio beside a baseline, measured in one run. See lab/benchmarks/command.py."""
import runtime  # noqa: F401  before torch: OpenMP and malloc settings
