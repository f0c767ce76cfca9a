#!/usr/bin/env bash
# Trains a real tiny language model on this machine's own Python source, from nothing installed to a sample, in minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_venv.sh requirements.txt
rc=0
python train.py quickstart "$@" || rc=$?
[ $rc -eq 0 ] || [ $rc -eq 75 ] || exit $rc   # 75: stopped early, e.g. by --train.max_minutes; everything is saved
echo
python -m scripts.generate runs/quickstart --prompt "class " --max-new-tokens 120
