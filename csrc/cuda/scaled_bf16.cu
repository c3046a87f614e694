// Results of 8 bits, of bf16 bases that are merged in bf16. One file a dtype, as of from_bf16.cu and its like.
#include "scaled.cuh"

namespace lora_merge {
int launch_scaled_bf16(int adapters, int part, const ScaledLaunch& launch, void* stream) {
  return launch_scaled_from<bf16, bf16>(adapters, part, launch, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
