// Merging fp16 bases. One file a source dtype, so that they compile side by side.
#include "merge.cuh"

namespace lora_merge {
template int launch_from<__half>(int, int, const Launch&, cudaStream_t);
template int row_norms_from<__half>(const Launch&, double*, cudaStream_t);
}  // namespace lora_merge
