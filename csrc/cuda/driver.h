// The driver's functions, without linking the driver: this library loads where there is none.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace lora_merge {

// Null where the driver has none of this name, or is older than CUDA 12.
template <typename Function>
Function of_driver(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<Function>(found);
}

}  // namespace lora_merge
