// Merging fp32 bases. One file a source dtype, so that they compile side by side.
#include "merge.cuh"

namespace lora_merge {
template int launch_from<float>(int, int, const Launch&, cudaStream_t);
template int row_norms_from<float>(const Launch&, double*, cudaStream_t);
}  // namespace lora_merge
