#!/usr/bin/env bash
# A scaling experiment on two CPU cores, from nothing installed to a law and its test on the next size:
#
#     bash scripts/scaling/laptop.sh [FOLDER] [--section.key VALUE ...]
#
# Five sizes at four budgets, on the source of Python's standard library. If stopped, run it again to resume.
set -euo pipefail
cd "$(dirname "$0")/../.."
FOLDER=runs/ladder
case ${1:-} in "" | -*) ;; *) FOLDER=$1; shift ;; esac
. scripts/setup_venv.sh requirements.txt
python -m scripts.scaling ladder --out "$FOLDER" "$@"
echo
python -m scripts.scaling fit "$FOLDER"
echo
python -m scripts.scaling next "$FOLDER"
