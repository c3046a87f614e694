// Merging what codes stand for in bf16. One file a dtype, so that they compile side by side.
#include "packed.cuh"

namespace lora_merge {
int launch_packed_bf16(int destination_dtype, int adapters, const Launch& launch, void* stream) {
  return launch_packed_from<bf16>(destination_dtype, adapters, launch, static_cast<cudaStream_t>(stream));
}
int row_norms_packed_bf16(const Launch& launch, double* out, void* stream) {
  return row_norms_from<Coded<bf16>>(launch, out, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
