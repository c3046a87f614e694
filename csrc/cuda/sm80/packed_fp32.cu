// Merging what codes stand for in fp32. One file a dtype, so that they compile side by side.
#include "packed.cuh"

namespace lora_merge {
template int launch_packed_from<float>(int, int, const Launch&, cudaStream_t);
template int row_norms_from<Coded<float>>(const Launch&, double*, cudaStream_t);
}  // namespace lora_merge
