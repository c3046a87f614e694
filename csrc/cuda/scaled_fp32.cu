// Results of 8 bits, of float32 bases that are merged in bf16; and which file has what a launch asks for.
#include "scaled.cuh"

namespace lora_merge {

int launch_scaled_bf16(int, int, const ScaledLaunch&, void*);
int launch_scaled_fp16(int, int, const ScaledLaunch&, void*);

int launch_scaled(int source_dtype, int dtype, int adapters, int part, const ScaledLaunch& launch, void* stream) {
  if (source_dtype == kBFloat16 && dtype == kBFloat16) return launch_scaled_bf16(adapters, part, launch, stream);
  if (source_dtype == kFloat16 && dtype == kFloat16) return launch_scaled_fp16(adapters, part, launch, stream);
  if (source_dtype == kFloat32 && dtype == kBFloat16)
    return launch_scaled_from<float, bf16>(adapters, part, launch, static_cast<cudaStream_t>(stream));
  return cudaErrorInvalidConfiguration;
}

}  // namespace lora_merge
