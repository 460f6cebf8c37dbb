#!/usr/bin/env bash
# Make the Ascend environment: requirements/ascend.lock, exactly, vllm-ascend built from its source package without kernels,
# then kvproof itself as an editable install. Needs no NPU and no CANN. Safe to repeat: an install that was interrupted is
# begun anew; what was downloaded or built stays in pip's cache.
#
#   VENV=.venv-ascend         where
#   PYTHON=...                which interpreter (3.11)
#   TORCH_WHEEL=...           a CPU build of torch, where pip cannot find one
#   SOC_VERSION=ascend910b1   the chip vllm-ascend is told it is built for (A2); --declare-soc declares another at run time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv-ascend}
lock=requirements/ascend.lock
unfinished=$venv/.kvproof-unfinished
stamp=$venv/.kvproof-env # the Makefile compares its age with the lock's
export PIP_RESUME_RETRIES=5 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
export SOC_VERSION=${SOC_VERSION:-ascend910b1} COMPILE_CUSTOM_KERNELS=0
# The build asks torch for its version, and torch would load torch_npu, which wants CANN.
export TORCH_DEVICE_BACKEND_AUTOLOAD=0

step() { printf '\n[%d/5] %s\n' "$1" "$2"; }
die() { printf 'kvproof: %s\n' "$*" >&2 && exit 1; }
pip() { "$venv/bin/python" -m pip "$@"; }
pin() { grep "^$1==" "$lock"; }
usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

# Asking an interpreter to run also sees through pyenv's shims; pyenv's own versions are looked up where it keeps them.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.11.*/bin/python}; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python 3.11 with its venv module (on Debian: python3-venv); tried: ${PYTHON:-python3.11, python3}. Set PYTHON=/path/to/python3.11"
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
run again with TORCH_WHEEL=/path/to/torch-$(pin torch | cut -d= -f3)-cp311-....whl, or point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at a place that has it"

step 3 "$(grep -c '==' "$lock") pinned packages (700 MB to download, 4 GB on disk)"
pip install --no-deps --requirement <(grep -vE '^(torch|vllm-ascend)==' "$lock")

step 4 "$(pin vllm-ascend), without kernels, for $SOC_VERSION (21 MB to download)"
# Not from pip's cache of wheels built before: it does not know for which chip they were built.
pip install --no-deps --no-build-isolation --no-cache-dir "$(pin vllm-ascend)"

step 5 "kvproof, editable"
pip install --quiet --no-deps --no-build-isolation --editable .

rm "$unfinished"
touch "$stamp"
printf '\nenvironment ready in %d s: %s\n' $((SECONDS - start)) "$venv"
