// Merging fp16 bases. One file a source dtype, so that they compile side by side.
#include "merge.cuh"

namespace lora_merge {
int launch_from_fp16(int destination_dtype, int adapters, const Launch& launch, void* stream) {
  return launch_from<__half>(destination_dtype, adapters, launch, static_cast<cudaStream_t>(stream));
}
int row_norms_from_fp16(const Launch& launch, double* out, void* stream) {
  return row_norms_from<__half>(launch, out, static_cast<cudaStream_t>(stream));
}
}  // namespace lora_merge
