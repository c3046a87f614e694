#!/usr/bin/env bash
# Everything that needs a GPU, in one go: build, tests, compute-sanitizer, benchmarks. Results go to the folder given,
# as they lie in benchmarks/results; those of other builds and backends to its folder variants.
#
#     bash tests/gpu/gpu.sh OUT [STEP ...]        (default: all but those that need vLLM, one after the other)
#
# Where there are several GPUs, build once, and then run steps side by side, each on one: CUDA_VISIBLE_DEVICES=1 bash
# tests/gpu/gpu.sh OUT figures; `tests` uses all that it sees (TESTS: which ones; DEADLINE: seconds). The machine needs torch,
# nvcc, pytest with its timeouts, hypothesis, peft and transformers; it reaches no registry. quantised needs bitsandbytes,
# zero3 DeepSpeed and two GPUs; rollout, rollout-experts, grpo, fidelity, sync, timeline, quantised-engines (verl, too), fsdp-x2
# (two GPUs), fsdp-x4 (four), disaggregated-x2, -x4, -x8 (as many), publish, versions, tenants and architectures need vLLM
# (0.26 for torch 2.11), step, step-x2 and one-copy TRL, too: an engine for each of five ways, and as many starts, which take most of the time; sglang and sglang-x2 (two GPUs) need
# SGLang (0.5.17 for torch 2.11; FlashInfer is not needed). Each step should stay below ten minutes (estimated); its record
# is written after every way.
set -uo pipefail
cd "$(dirname "$0")/../.."
mkdir -p "${1:?folder for results}"
out=$(realpath "$1")
shift
steps=${*:-build tests sanitizer figures ranks restore peers sweep latency energy triton portable}
status=0
export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
card=$(nvidia-smi --query-gpu=name --format=csv,noheader 2> /dev/null | grep -oim 1 'h[12]00' | tr '[:upper:]' '[:lower:]')
card=${card:-gpu} # records are called by the card that made them
section() { printf '\n===== %s (%d s) =====\n' "$*" "$SECONDS"; }
try() { "$@" || { status=1 && echo "FAILED: $*"; }; }
bench() { # NAME SCRIPT OPTIONS...: figures to OUT/NAME.json
  local name=$1 script=$2
  shift 2
  try python3 "benchmarks/$script.py" "$@" --json "$out/$name.json"
}
merge() { # NAME OPTIONS...
  local name=$1
  shift
  bench "$name" merge --device cuda --repeat 7 --plot "$out/$name.png" "$@"
}

sglang() { # what its processes want of the environment
  export SGLANG_IS_FLASHINFER_AVAILABLE=0 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2
  export CUDA_HOME=${CUDA_HOME:-$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")}
}

for step in $steps; do
  section "$step"
  case $step in
    build) # the extension for the visible GPU; torch and nvcc are there, no registry is
      # egg_info: engines find the plugin by its entry points, which a folder on PYTHONPATH has only then
      NVCC_APPEND_FLAGS=-lineinfo try python3 setup.py -q egg_info build_ext --inplace
      try python3 -m lora_merge doctor ;;
    tests)
      try python3 tests/gpu/gpu_tests.py "$out/tests.log" --deadline "${DEADLINE:-3600}" ${TESTS:-tests} ;;
    wheel) # the kernels' tests from an installed wheel (WHEEL=, of `make wheel`), with no compiler on the path
      site=$(mktemp -d) copy=$(mktemp -d)
      try python3 -m pip install -q --no-index --no-deps --target "$site" "${WHEEL:?which one}"
      cp -r tests benchmarks csrc docs setup.py pyproject.toml README.md "$copy"
      kernels="tests/kernels tests/models tests/stream tests/saving"
      bare=$(tr : '\n' <<< "$PATH" | while read -r folder; do [ -x "$folder/nvcc" ] || echo "$folder"; done | paste -sd:)
      (cd "$copy" && PYTHONPATH=$site PATH=$bare python3 tests/gpu/gpu_tests.py "$out/wheel.log" --each 4 \
        --deadline "${DEADLINE:-3600}" ${TESTS:-$kernels}) || { status=1 && echo "FAILED: tests of the wheel"; } ;;
    sanitizer) # every kernel path on small shapes: dtypes, layouts, ranks, copies, norms
      for tool in memcheck racecheck; do
        compute-sanitizer --tool "$tool" --launch-timeout 120 --print-limit 10000 \
          python3 tests/support/sanitize.py > "$out/$tool.log" 2>&1 || status=1
        tail -n 4 "$out/$tool.log"
      done
      grep -q "ERROR SUMMARY: 0 errors" "$out/memcheck.log" || status=1
      try python3 tests/support/racecheck.py "$out/racecheck.log" ;;
    figures)
      for shape in qwen2.5-7b qwen3-30b-a3b-8layers; do merge "merge-$shape" --shape "$shape" --adapter-dtype bf16; done
      merge merge-qwen2.5-7b-fp32-adapters --shape qwen2.5-7b --adapter-dtype fp32
      merge merge-qwen2.5-7b-fp32-base --shape qwen2.5-7b --dtype fp32 --adapter-dtype bf16 ;;
    restore)
      large="--rows 18944 --cols 3584 --matrices 84" small="--rows 8192 --cols 8192 --matrices 20"
      bench restore-$card-7b restore --device cuda $large --ranks 32 --bases bf16 --updates 0.001 0.01 0.1
      bench restore-$card restore --device cuda $small --ranks 32 --updates 0.001 0.01 0.1 1
      bench restore-$card-ranks restore --device cuda $small --ranks 8 64 128 256 --bases bf16 --updates 0.01
      bench restore-$card-fp32-adapters restore --device cuda $small --ranks 32 --bases bf16 --adapters fp32 \
        --updates 0.01
      bench variants/restore-$card-remerge-7b restore --device cuda $large --ranks 32 --bases bf16 --adapters bf16 fp32 \
        --updates 0.01 0.1
      bench variants/restore-$card-remerge restore --device cuda $small --ranks 8 32 64 128 --bases bf16 --adapters bf16 fp32 \
        --updates 0.01
      bench variants/restore-$card-remerge-dtypes restore --device cuda $small --ranks 32 --bases fp16 fp32 \
        --adapters bf16 fp32 --updates 0.01 ;;
    peers) bench peers-$card peers --shape qwen2.5-7b --device cuda --adapter-dtype bf16 --plot "$out/peers-$card.png" ;;
    ranks) bench ranks-$card ranks --shape qwen2.5-7b --device cuda --plot "$out/ranks-$card.png" ;;
    sweep) bench sweep-$card sweep --device cuda --plot "$out/sweep-$card.png" ;;
    latency) bench latency-$card latency ;;
    energy) bench energy-$card energy ;;
    rollout) bench rollout-$card rollout --shape qwen2.5-7b --plot "$out/rollout-$card.png" ;;
    rollout-experts) # a quarter of the 48 layers: capturing CUDA graphs of more of them takes most of ten minutes
      bench rollout-experts-$card rollout --shape qwen3-30b-a3b --layers 12 --repeats 2 \
        --plot "$out/rollout-experts-$card.png" ;;
    step) bench step-$card step --shape qwen2.5-7b --steps 3 --completions 48 --plot "$out/step-$card.png" ;;
    step-x2) bench step-$card-x2 step --shape qwen2.5-7b --ranks 2 --steps 3 --completions 48 \
      --plot "$out/step-$card-x2.png" ;;
    verl-step) # verl's main_ppo in five ways, as many as there is time for (WAYS: which; the same OUT: those that lack)
      bench "verl-step-$card" verl_step --logs "$out" --ways ${WAYS:-push engine stream merge adapter} ;;
    verl-step-x2 | verl-step-x4)
      bench "verl-step-$card-${step##*-}" verl_step --gpus "${step##*-x}" --tp 2 --logs "$out" \
        --ways ${WAYS:-push engine stream merge adapter} ;;
    one-copy) # trainer and engine with one copy of 7B: memory and pushes; then GRPO within 24 GiB, a start a way
      bench one-copy-$card one_copy --parts memory
      bench one-copy-24-$card one_copy --parts grpo ;;
    publish | versions | tenants) bench "$step-$card" "$step" ;; # each about 180 s on an H200, half of it the first start
    architectures) # five at a time, about two minutes each (ONLY: some of them, one a line)
      names=${ONLY:-$(python3 -c 'import sys; sys.path.insert(0, "benchmarks"); import architectures
print("\n".join(one.title for one in architectures.ARCHITECTURES if one.gpu))')}
      for lane in 0 1 2 3 4; do
        mapfile -t some < <(awk -v lane=$lane '(NR - 1) % 5 == lane' <<< "$names")
        bench architectures-$lane architectures --device cuda --timeout 300 --logs "$out/logs" --only "${some[@]}" &
      done
      wait ;;
    train) bench train-$card train --plot "$out/train-$card.png" ;;
    fidelity) bench fidelity-$card fidelity --engine --plot "$out/fidelity-$card.png" ;;
    grpo) bench "grpo-$card" grpo --device cuda --seeds 3 --deadline 500 --plot "$out/grpo.png" ;;
    quantised) bench quantised-base-$card quantised --device cuda --shape qwen2.5-7b --layers 28 --repeat 20 ;;
    scaled) bench scaled-$card scaled --device cuda --layers 28 ;;
    quantised-engines) bench quantised-$card quantised_engines --device cuda --models --time qwen2.5-7b ;;
    sync) # 7B into an engine in one process, in another, and into one that reads; experts into one that reads
      bench sync-push-qwen2.5-7b sync --repeats 9 --parts pull same other
      bench sync-pull-qwen3-30b-a3b-8 sync --shape qwen3-30b-a3b-8 --parts pull ;;
    timeline) # where the milliseconds of such pushes go; --tp 2 by hand
      bench timeline-pull-$card timeline
      bench timeline-write-$card timeline --write ;;
    fsdp-x2)
      try python3 -m torch.distributed.run --nproc-per-node 2 benchmarks/fsdp.py --parts push --sleep-mode \
        --json "$out/fsdp-pull-qwen2.5-7b-x2.json" ;;
    fsdp-x4) # of 140 GB each
      try python3 -m torch.distributed.run --nproc-per-node 4 benchmarks/fsdp.py --shape qwen2.5-72b --parts push --tp 2 \
        --json "$out/fsdp-qwen2.5-72b-x4.json" ;;
    disaggregated-x2 | disaggregated-x4 | disaggregated-x8) # half of the GPUs train, the others serve
      half=$((${step##*x} / 2))
      try python3 -m torch.distributed.run --nproc-per-node $half benchmarks/disaggregated.py \
        --json "$out/disaggregated-qwen3-30b-a3b-x$((2 * half)).json" ;;
    zero3)
      try python3 -m torch.distributed.run --nproc-per-node 2 benchmarks/zero3.py --json "$out/zero3-qwen2.5-7b-x2.json" ;;
    sglang)
      sglang
      try python3 tests/gpu/gpu_tests.py "$out/sglang.log" tests/gpu/test_sglang_gpu.py
      bench sync-sglang sync_sglang --repeats 7 ;;
    sglang-x2)
      sglang
      try python3 tests/gpu/gpu_tests.py "$out/sglang-x2.log" tests/gpu/test_sglang_gpus.py
      bench sync-sglang-x2 sync_sglang --repeats 7 --parts across ;;
    triton)
      LORA_MERGE_BACKEND=triton bench variants/ranks-$card-triton ranks --shape qwen2.5-7b --device cuda --ranks 8 32 64 \
        --kinds bf16 "bf16, fp32 adapters" --methods "in place" "out of place" "there and back" ;;
    portable) # the kernels for any GPU, from code for sm_80, in a copy of the tree
      copy=$(mktemp -d)
      cp -r . "$copy"
      rm -rf "$copy"/build "$copy"/lora_merge/_C*.so
      cd "$copy" || exit 2
      TORCH_CUDA_ARCH_LIST=8.0+PTX try python3 setup.py -q build_ext --inplace
      PYTHONPATH=$copy merge variants/merge-qwen2.5-7b-sm80 --shape qwen2.5-7b --adapter-dtype bf16
      cd - > /dev/null || exit 2 ;;
    *) echo "unknown step $step" && status=2 ;;
  esac
done
section "done, status $status"
exit $status
