# Sourced by quickstart.sh and test.sh: creates .venv once with the requirements of this checkout, and puts it on PATH.
# BEVATRON_PYTHON names another interpreter (3.10 to 3.14). BEVATRON_TORCH=default installs torch from pip's default
# index, for a .venv that is created on a machine without a GPU but used on one with GPUs.
CPU_INDEX=https://download.pytorch.org/whl/cpu

# PyPI's torch includes CUDA, 5 GB. A Linux machine without a GPU needs a tenth of that, from PyTorch's own index.
# Does nothing if torch is already installed, or if pip has an index configured.
torch_without_cuda() {
  if [ "$(uname -s)" != Linux ] || [ "${BEVATRON_TORCH:-}" = default ]; then return 0; fi
  if command -v nvidia-smi > /dev/null || [ -e /dev/kfd ]; then return 0; fi # /dev/kfd: an AMD GPU
  if .venv/bin/python -m pip show --quiet torch > /dev/null 2>&1; then return 0; fi
  local settings # not a pipe: grep -q closes it early, and under pipefail pip's complaint would count
  settings=$(.venv/bin/python -m pip config list)
  if grep -Eq 'index|find-links' <<< "$settings"; then return 0; fi
  echo "no GPU here: torch without CUDA, from $CPU_INDEX (BEVATRON_TORCH=default takes the other)"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 15 \
    --index-url "$CPU_INDEX" "$(grep '^torch' requirements.txt)" > /dev/null 2>&1 ||
    echo "that index does not answer: torch comes from PyPI, with CUDA (several GB)"
}

python=${BEVATRON_PYTHON:-}
for candidate in $python python3.12 python3.11 python3.10 python3.13 python3.14 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then python=$candidate; break; fi
  python=
done
if [ -z "$python" ]; then
  echo "error: Python 3.10 to 3.14 is needed; install one, or name it in BEVATRON_PYTHON" >&2
  exit 2
fi
stamp=.venv/.requirements
if ! cat "$@" | cmp -s - "$stamp"; then
  echo "setting up .venv with $("$python" --version) (once; torch is the large part)"
  "$python" -m venv .venv || { echo "error: $python cannot make a virtual environment (on Debian: apt install python3-venv)" >&2; exit 2; }
  torch_without_cuda
  .venv/bin/python -m pip install --quiet --disable-pip-version-check $(printf -- '-r %s ' "$@") || { echo "error: pip install failed" >&2; exit 1; }
  cat "$@" > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv"
