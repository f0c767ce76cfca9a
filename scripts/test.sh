#!/usr/bin/env bash
# The tests on a bare machine: the core. --all takes every test, --changed those that run what has changed
# (tests/selection.py). Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh requirements.txt requirements-test.txt
exec python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder "$@"
