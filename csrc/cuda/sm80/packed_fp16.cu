// Merging what codes stand for in fp16. One file a dtype, so that they compile side by side.
#include "packed.cuh"

namespace lora_merge {
template int launch_packed_from<__half>(int, int, const Launch&, cudaStream_t);
template int row_norms_from<Coded<__half>>(const Launch&, double*, cudaStream_t);
}  // namespace lora_merge
