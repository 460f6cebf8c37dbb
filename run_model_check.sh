#!/usr/bin/env bash
# The standard check of one model on one platform: layout, then bulk, then layerwise.
#
#   ./run_model_check.sh MODEL PLATFORM [options of kvproof check]
#
# Each case keeps its log and its evidence in model-checks/MODEL/PLATFORM/TIME/CASE. A case passed if the checker printed
# its own line that begins with PASS, and by nothing else. The exit code is 0 if every case passed, else the worst of the
# cases: 1 FAIL, 2 usage, 3 UNSUPPORTED, 4 PARTIALLY VERIFIED, in this order. A case that is refused leaves nothing.
# KVPROOF names another checker than the one of the platform's environment, MODEL_CHECKS another directory.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

if (($# < 2)); then
  echo "run_model_check.sh: expected MODEL PLATFORM [options of kvproof check], got $# arguments" >&2
  exit 2
fi
model=$1 platform=$2
shift 2

case $platform in
  cuda*) environment=env-cuda ;;
  ascend*) environment=env-ascend ;;
  *) environment=env ;;
esac
kvproof=${KVPROOF:-$root/.v$environment/bin/kvproof}
if ! command -v "$kvproof" >/dev/null; then
  echo "run_model_check.sh: $kvproof is not there: make $environment" >&2
  exit 2
fi

results=${MODEL_CHECKS:-$root/model-checks}/$(basename "$model")/$platform/$(date -u +%Y%m%dT%H%M%SZ)
made=() missing=$results # what this run makes, the deepest folder first
until [[ -e $missing ]]; do
  made+=("$missing")
  missing=$(dirname "$missing")
done
mkdir -p "$(dirname "$results")"
mkdir "$results"

declare -A words=([0]="PASS" [1]="FAIL" [2]="USAGE ERROR" [3]="UNSUPPORTED" [4]="PARTIALLY VERIFIED")
worst=0
table=()
for mode in layout bulk layerwise; do
  log=$results/$mode/check.log
  if ((worst == 2 || worst == 3)); then
    # Refused or not staged: the next mode would be told the same.
    table+=("$(printf '%-10s  %-18s  %6s  %s' "$mode" "NOT RUN" "" "")")
    continue
  fi
  echo "$mode: $model on $platform"
  mkdir "$results/$mode"
  begin=$SECONDS code=0 place=$results/$mode
  "$kvproof" check "$model" --platform "$platform" --mode "$mode" --evidence "$results/$mode/evidence" "$@" \
    >"$log" 2>&1 </dev/null || code=$?
  if ! grep -q '^PASS ' "$log"; then
    # Whatever the exit code says: without the checker's own PASS nothing passed.
    ((code >= 1 && code <= 4)) || code=1
  elif ((code != 0)); then
    code=1
  fi
  if ((code != 0)); then
    tail -n 20 "$log" | sed 's/^/    /'
    if ((code == 2)); then
      place="" # what was refused has said why: nothing is worth keeping
      rm -r "${results:?}/$mode"
      rmdir "${made[@]}" 2>/dev/null || true
    fi
    # 1 is the worst, 4 the mildest.
    ((worst != 0 && worst <= code)) || worst=$code
  fi
  table+=("$(printf '%-10s  %-18s  %4d s  %s' "$mode" "${words[$code]}" $((SECONDS - begin)) "$place")")
done

printf '\n%-10s  %-18s  %6s  %s\n' case verdict time "log and evidence"
printf '%s\n' "${table[@]}"
printf '\n%s  %s on %s\n' "${words[$worst]}" "$model" "$platform"
exit "$worst"
