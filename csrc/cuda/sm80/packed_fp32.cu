// Merging what codes stand for in fp32. One file a dtype, so that they compile side by side.
#include "packed.cuh"

namespace lora_merge {
int launch_packed_fp32(int destination_dtype, int adapters, const Launch& launch, void* stream) {
  return launch_packed_from<float>(destination_dtype, adapters, launch, static_cast<cudaStream_t>(stream));
}
int row_norms_packed_fp32(const Launch& launch, double* out, void* stream) {
  return row_norms_from<Coded<float>>(launch, out, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
