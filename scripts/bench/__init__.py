"""Benchmarks: always a ratio beside a baseline, measured in one run. See scripts/bench/__main__.py."""
