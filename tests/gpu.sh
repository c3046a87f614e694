#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, compute-sanitizer, benchmarks. Results go to the folder given.
#
#     bash tests/gpu.sh OUT [build] [tests] [sanitizer] [merge]        (default: all of them)
#
# The machine needs torch, nvcc, pytest with xdist, hypothesis, peft and transformers; it reaches no registry.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${1:?folder for results}")
shift
steps=${*:-build tests sanitizer merge}
status=0
export PYTHONUNBUFFERED=1
section() { printf '\n===== %s (%d s) =====\n' "$*" "$SECONDS"; }

for step in $steps; do
  section "$step"
  case $step in
    build) # the extension for the visible GPU; torch and nvcc are there, no registry is
      time python3 -m pip install --no-build-isolation --no-deps -q -e . || status=1 ;;
    tests)
      python3 -m pytest -m gpu -q -n 6 --timeout=300 "${TESTS:-tests}" 2>&1 | tail -n 60
      [ "${PIPESTATUS[0]}" = 0 ] || status=1 ;;
    sanitizer) # every kernel path on small shapes: dtypes, layouts, ranks, copies, norms
      for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --error-exitcode 1 --launch-timeout 120 \
          python3 tests/sanitize.py 2>&1 | tail -n 4
        [ "${PIPESTATUS[0]}" = 0 ] || status=1
      done ;;
    merge)
      for shape in qwen2.5-7b qwen3-30b-a3b-8layers; do
        python3 benchmarks/merge.py --shape "$shape" --device cuda --adapter-dtype bf16 \
          --json "$out/merge-$shape.json" --plot "$out/merge-$shape.png" || status=1
      done
      python3 benchmarks/merge.py --shape qwen2.5-7b --device cuda --json "$out/merge-qwen2.5-7b-fp32-adapters.json" || status=1 ;;
  esac
done
section "done, status $status"
exit $status
