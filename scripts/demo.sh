#!/usr/bin/env bash
# The main job on real input: model configurations as published, vLLM's production runner and scheduler, real connectors.
# Exit code 0 only if every run ends in the verdict stated beside it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kvproof=${VENV:-.venv}/bin/kvproof
out=demo-evidence

# model, connector, expected verdict; one line for each way of laying out a cache. ExampleConnector must FAIL: with
# chunked prefill it saves only the first chunk of a prompt (public fault, vLLM pull request 53314), and the check says so.
runs=(
  "qwen3-0.6b        SimpleCPUOffloadConnector  PASS"
  "qwen3-0.6b        OffloadingConnector        PASS"
  "qwen3-0.6b        MultiConnector             PASS"
  "qwen3-0.6b        ExampleConnector           FAIL"
  "gemma-3-1b        OffloadingConnector        PASS"
  "gpt-oss-20b-bf16  SimpleCPUOffloadConnector  PASS"
  "lfm2-1.2b         OffloadingConnector        PASS"
)
verdicts=([0]="PASS" [1]="FAIL" [2]="USAGE ERROR" [3]="UNSUPPORTED" [4]="PARTIALLY VERIFIED")

rm -rf "$out"
mkdir -p "$out"
table=() surprises=0 number=0
for run in "${runs[@]}"; do
  read -r model connector expected <<<"$run"
  evidence=$out/$model-$connector
  printf '[%d/%d] %s with %s ... ' $((++number)) ${#runs[@]} "$model" "$connector"
  begin=$SECONDS code=0
  "$kvproof" check "$model" --connector "$connector" --mode all --evidence "$evidence" >"$evidence.txt" 2>&1 </dev/null || code=$?
  verdict=${verdicts[code]:-"exit code $code"}
  printf '%s (%d s)\n' "$verdict" $((SECONDS - begin))
  remark=
  if [[ $verdict != "$expected" ]]; then
    remark="expected $expected"
    surprises=$((surprises + 1))
    tail -n 20 "$evidence.txt" | sed 's/^/    /'
  fi
  table+=("$(printf '%-18s  %-26s  %-18s  %5d s  %s  %s' "$model" "$connector" "$verdict" $((SECONDS - begin)) "$evidence" "$remark")")
done

printf '\n%-18s  %-26s  %-18s  %7s  %s\n' model connector verdict time evidence
printf '%s\n' "${table[@]}"
printf '\nreports to open in a browser:\n'
find "$PWD/$out" -name report.html | sort | sed 's/^/  /'
if ((surprises)); then
  printf '\ndemo: %d of %d verdicts are not the expected ones (%d s)\n' "$surprises" ${#runs[@]} $SECONDS
  exit 1
fi
printf '\ndemo: all %d verdicts as expected (%d s)\n' ${#runs[@]} $SECONDS
