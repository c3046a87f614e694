// Merging bf16 bases. One file a source dtype, so that they compile side by side.
#include "merge.cuh"

namespace lora_merge {
int launch_from_bf16(int destination_dtype, int adapters, const Launch& launch, void* stream) {
  return launch_from<bf16>(destination_dtype, adapters, launch, static_cast<cudaStream_t>(stream));
}
int row_norms_from_bf16(const Launch& launch, double* out, void* stream) {
  return row_norms_from<bf16>(launch, out, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
