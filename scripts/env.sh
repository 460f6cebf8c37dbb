#!/usr/bin/env bash
# Make the virtual environment: the lock file, exactly, then kvproof itself as an editable install.
# Safe to repeat. An install that was interrupted is begun anew, because pip takes a half-written package for a whole one.
#
#   VENV=.venv       where
#   PYTHON=...       which interpreter (3.11 or newer)
#   TORCH_WHEEL=...  a CPU build of torch, where pip cannot find one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv}
lock=requirements/cpu.lock
unfinished=$venv/.kvproof-unfinished
stamp=$venv/.kvproof-env # the Makefile compares its age with the lock's
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

step() { printf '\n[%d/4] %s\n' "$1" "$2"; }
die() { printf 'kvproof: %s\n' "$*" >&2 && exit 1; }
pip() { "$venv/bin/python" -m pip "$@"; }
pin() { grep "^$1==" "$lock"; }

usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

# 3.11 first: it is the Python the lock was made on. Asking it to run also sees through pyenv's shims.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3}; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python 3.11 or newer with its venv module (on Debian: python3-venv); tried: ${PYTHON:-python3.11, python3}. Set PYTHON=/path/to/python3.11"
}

start=$SECONDS
step 1 "virtual environment in $venv"
if [[ -e $unfinished ]] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  python=$(find_python)
  "$python" -m venv --clear "$venv"
fi
rm -f "$stamp"
touch "$unfinished"
"$venv/bin/python" --version
pip install --quiet --no-deps "$(pin pip)"

step 2 "torch, CPU build ($(pin torch))"
pip install --no-deps "${TORCH_WHEEL:-$(pin torch)}" || die "pip cannot see $(pin torch) for $("$venv/bin/python" --version): \
run again with TORCH_WHEEL=/path/to/torch-$(pin torch | cut -d= -f3)-cp3XX-....whl, or point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at a place that has it"

step 3 "$(grep -c '==' "$lock") pinned packages (the vLLM wheel alone is 130 MB)"
pip install --no-deps --requirement <(grep -v '^torch==' "$lock")
"$venv/bin/python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "on torch", torch.__version__)'

step 4 "kvproof, editable"
pip install --quiet --no-deps --no-build-isolation --editable .

rm "$unfinished"
touch "$stamp"
printf '\nenvironment ready in %d s: %s\n' $((SECONDS - start)) "$venv"
