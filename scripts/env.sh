#!/usr/bin/env bash
# Make a virtual environment: the lock file, exactly, then kvproof itself as an editable install.
# Safe to repeat. An install that was interrupted is begun anew, because pip takes a half-written package for a whole one;
# what was downloaded stays in pip's cache, so it is not downloaded twice.
#
#   scripts/env.sh [cpu|cuda]
#
#   VENV=.venv       where
#   PYTHON=...       which interpreter (3.11 or newer)
#   TORCH_WHEEL=...  a CPU build of torch, where pip cannot find one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-cpu}
case $kind in
  cpu) venv=${VENV:-.venv} pythons='python3.11 python3' least='3, 11' vllm='the vLLM wheel alone is 130 MB' ;;
  cuda) venv=${VENV:-.venv-cuda} pythons='python3.12' least='3, 12' vllm='4.5 GB to download, 10 GB on disk' ;;
  *) echo "kvproof: environment $kind: expected cpu or cuda" >&2 && exit 2 ;;
esac
lock=requirements/$kind.lock
unfinished=$venv/.kvproof-unfinished
stamp=$venv/.kvproof-env # the Makefile compares its age with the lock's
export PIP_RESUME_RETRIES=5 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

step() { printf '\n[%d/4] %s\n' "$1" "$2"; }
die() { printf 'kvproof: %s\n' "$*" >&2 && exit 1; }
pip() { "$venv/bin/python" -m pip "$@"; }
pin() { grep "^$1==" "$lock"; }

usable() { "$1" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < ($least))" 2>/dev/null; }

# The Python the lock was made on first. Asking it to run also sees through pyenv's shims, which only answer for the
# versions pyenv was told to use; its other versions are looked up where it keeps them.
find_python() {
  local candidate
  for candidate in ${PYTHON:-$pythons "${PYENV_ROOT:-$HOME/.pyenv}"/versions/${least/, /.}.*/bin/python}; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python ${least/, /.} or newer with its venv module (on Debian: python3-venv); tried: ${PYTHON:-$pythons}. Set PYTHON=/path/to/python${least/, /.}"
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

step 2 "torch ($(pin torch))"
pip install --no-deps "${TORCH_WHEEL:-$(pin torch)}" || die "pip cannot see $(pin torch) for $("$venv/bin/python" --version): \
run again with TORCH_WHEEL=/path/to/torch-$(pin torch | cut -d= -f3)-cp3XX-....whl, or point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at a place that has it"

step 3 "$(grep -c '==' "$lock") pinned packages ($vllm)"
pip install --no-deps --requirement <(grep -v '^torch==' "$lock")
"$venv/bin/python" -c 'from importlib.metadata import version; import torch; print("torch", version("torch"))'

step 4 "kvproof, editable"
pip install --quiet --no-deps --no-build-isolation --editable .

rm "$unfinished"
touch "$stamp"
printf '\nenvironment ready in %d s: %s\n' $((SECONDS - start)) "$venv"
