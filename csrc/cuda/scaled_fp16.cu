// Results of 8 bits, of fp16 bases that are merged in fp16.
#include "scaled.cuh"

namespace lora_merge {
int launch_scaled_fp16(int adapters, int part, const ScaledLaunch& launch, void* stream) {
  return launch_scaled_from<__half, __half>(adapters, part, launch, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
