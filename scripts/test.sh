#!/usr/bin/env bash
# Runs every test on a bare machine; .ci/run calls this. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh requirements.txt requirements-test.txt
exec python -m pytest --numprocesses 2 --dist loadfile "$@"
