#!/usr/bin/env bash
# Runs the core tests on a bare machine. --all runs every test, --changed those that run changed code
# (tests/selection.py). Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh requirements.txt requirements-test.txt
exec python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
