# Makes a bare GPU machine ready that reaches no registry: `. tests/gpu/ready.sh`, in each command, at the repository's root.
#
# Unpacks, once and side by side, what came in .gpu: site.tar.xz (vLLM), sglang.tar.xz, verl.tar.xz (verl_bundle.py), whl/*.whl
# (TRL); compiles the module; sets the environment. Then `go NAME SECONDS COMMAND ...` runs a command with its own limit and
# log, $OUT/NAME.log; `with_sglang COMMAND ...` and `with_verl COMMAND ...` run one with other packages in front.
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0
export TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST:-9.0}
root=$PWD begun=$SECONDS
# No name server answers: each look-up of an address, one a process group that torch makes, would take 20 seconds.
export RES_OPTIONS="timeout:1 attempts:1"
for address in $(hostname -I); do
  grep -q "^$address " /etc/hosts || echo "$address $(hostname)" >> /etc/hosts
done

unpacked() { # ARCHIVE FOLDER
  [ ! -e "$1" ] || [ -e "$2/.unpacked" ] || { mkdir -p "$2" && tar xJf "$1" -C "$2" && touch "$2/.unpacked"; }
}
compiled() {
  [ -e build/.gpu_compiled ] && return
  MAX_JOBS=16 python3 setup.py -q egg_info build_ext --inplace > /tmp/build.log 2>&1 && touch build/.gpu_compiled || tail -n 20 /tmp/build.log
}
unpacked .gpu/site.tar.xz .gpu/site &
unpacked .gpu/sglang.tar.xz .gpu/sgl &
unpacked .gpu/verl.tar.xz .gpu/verl_site &
compiled &
if [ -d .gpu/whl ] && [ ! -d /tmp/whl ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/whl .gpu/whl/*.whl
fi
wait
# Else each process compiles what it imports: verl's, one after the other, took 250 seconds to their first step.
unset PYTHONDONTWRITEBYTECODE
python3 -m compileall -q -j 0 .gpu/site .gpu/sgl .gpu/verl_site /tmp/whl lora_merge > /dev/null 2>&1
export PYTHONPATH=$root/.gpu/site:/tmp/whl:$root
echo "ready after $((SECONDS - begun)) s"
nvidia-smi --query-gpu=name,memory.used --format=csv,noheader

go() { # NAME SECONDS COMMAND ...
  local name=$1 limit=$2 from=$SECONDS status
  shift 2
  timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1
  status=$?
  echo "== $name: status $status after $((SECONDS - from)) s"
  return $status
}
with_sglang() ( # COMMAND ..., also one of `go`
  export PYTHONPATH="$root/.gpu/sgl:$root" SGLANG_IS_FLASHINFER_AVAILABLE=0 OMP_NUM_THREADS=2
  export CUDA_HOME="$(dirname "$(dirname "$(readlink -f "$(command -v nvcc)")")")"
  "$@"
)
with_verl() (
  export PYTHONPATH="$root/.gpu/verl_site:$root/.gpu/site:$root"
  "$@"
)
