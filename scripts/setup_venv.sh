# Sourced by quickstart.sh and test.sh: makes .venv with the requirements of this checkout, once, and puts it on PATH.
# BEVATRON_PYTHON names another interpreter (3.10 to 3.12).
python=${BEVATRON_PYTHON:-}
for candidate in $python python3.12 python3.11 python3.10 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then python=$candidate; break; fi
  python=
done
if [ -z "$python" ]; then
  echo "error: Python 3.10, 3.11 or 3.12 is needed; install one, or name it in BEVATRON_PYTHON" >&2
  exit 2
fi
stamp=.venv/.requirements
if ! cat "$@" | cmp -s - "$stamp"; then
  echo "setting up .venv with $("$python" --version) (once; torch is the large part)"
  "$python" -m venv .venv || { echo "error: $python cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 2; }
  .venv/bin/python -m pip install --quiet --disable-pip-version-check $(printf -- '-r %s ' "$@") || { echo "error: pip install failed" >&2; exit 1; }
  cat "$@" > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
