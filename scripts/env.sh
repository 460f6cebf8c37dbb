#!/usr/bin/env bash
# Make a virtual environment: the lock file, exactly, then kvproof itself as an editable install.
# Safe to repeat. An install that was interrupted is begun anew, because pip takes a half-written package for a whole one;
# what was downloaded stays in pip's cache, so it is not downloaded twice.
#
#   scripts/env.sh [cpu|cuda|cuda-0.32|ascend]
#
#   VENV=.venv                where
#   PYTHON=...                which interpreter (cpu: 3.11 or newer, cuda: 3.12 or newer, ascend: 3.11)
#   TORCH_WHEEL=...           a CPU build of torch (cpu, ascend), where pip cannot find one
#   SOC_VERSION=ascend910b1   the chip vllm-ascend is told it is built for (A2); --declare-soc declares another at run time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-cpu} venv=${VENV:-.venv}
case $kind in
  cpu) python=3.11 newer=yes size='the vLLM wheel alone is 130 MB' ;;
  cuda | cuda-0.32) python=3.12 newer=yes size='4.5 GB to download, 10 GB on disk' ;;
  ascend) python=3.11 newer='' size='700 MB to download, 4 GB on disk' ;;
  *) echo "kvproof: environment $kind: expected cpu, cuda, cuda-0.32 or ascend" >&2 && exit 2 ;;
esac
lock=requirements/$kind.lock
unfinished=$venv/.kvproof-unfinished
stamp=$venv/.kvproof-env # the Makefile compares its age with the lock's
export PIP_RESUME_RETRIES=5 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

step() { printf '\n[%d/4] %s\n' "$1" "$2"; }
die() { printf 'kvproof: %s\n' "$*" >&2 && exit 1; }
pip() { "$venv/bin/python" -m pip "$@"; }
pin() { grep "^$1==" "$lock"; }
wanted=${python}${newer:+ or newer}

usable() {
  "$1" - "$python" "$newer" 2>/dev/null <<'CODE'
import ensurepip, sys, venv
least = tuple(map(int, sys.argv[1].split(".")))
sys.exit(not (sys.version_info[:2] == least or (sys.argv[2] and sys.version_info[:2] > least)))
CODE
}

# The Python the lock was made on first. Asking it to run also sees through pyenv's shims, which only answer for the
# versions pyenv was told to use; its other versions are looked up where it keeps them.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python$python "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$python".*/bin/python python3}; do
    if usable "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  die "needs Python $wanted with its venv module (on Debian: python3-venv); tried: ${PYTHON:-python$python, python3}. Set PYTHON=/path/to/python$python"
}

start=$SECONDS
step 1 "virtual environment in $venv"
if [[ -e $unfinished ]] || ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
  found=$(find_python)
  "$found" -m venv --clear "$venv"
fi
rm -f "$stamp"
touch "$unfinished"
"$venv/bin/python" --version
pip install --quiet --no-deps "$(pin pip)"

step 2 "torch ($(pin torch))"
pip install --no-deps "${TORCH_WHEEL:-$(pin torch)}" || die "pip cannot see $(pin torch) for $("$venv/bin/python" --version): \
run again with TORCH_WHEEL=/path/to/torch-$(pin torch | cut -d= -f3)-cp3XX-....whl, or point PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL at a place that has it"

step 3 "$(grep -c '==' "$lock") pinned packages ($size)"
pip install --no-deps --requirement <(grep -vE '^(torch|vllm-ascend)==' "$lock")
if [[ $kind = ascend ]]; then
  # From its source package, without kernels. The build asks torch for its version, and torch would load torch_npu, which
  # wants CANN. Not from pip's cache of wheels built before: it does not know for which chip they were built.
  SOC_VERSION=${SOC_VERSION:-ascend910b1} COMPILE_CUSTOM_KERNELS=0 TORCH_DEVICE_BACKEND_AUTOLOAD=0 \
    pip install --no-deps --no-build-isolation --no-cache-dir "$(pin vllm-ascend)"
fi
TORCH_DEVICE_BACKEND_AUTOLOAD=0 "$venv/bin/python" -c 'import torch; print("torch", torch.__version__)'

step 4 "kvproof, editable"
TORCH_DEVICE_BACKEND_AUTOLOAD=0 pip install --quiet --no-deps --no-build-isolation --editable .

rm "$unfinished"
touch "$stamp"
printf '\nenvironment ready in %d s: %s\n' $((SECONDS - start)) "$venv"
