// float32 numbers as three bf16 ones whose sum they are (8 bits each): the matrix unit multiplies these exactly, beside
// activations in bf16. Training on merged weights takes gradients of float32 adapters so (training/products.py).
#include <cuda_bf16.h>

#include "launch.h"

namespace lora_merge {
namespace {

constexpr int kThirdThreads = 256;

// One number a thread. What comes from a product of thirds is three numbers yet, a plane of columns each, to be summed.
__global__ void __launch_bounds__(kThirdThreads) thirds_kernel(const __grid_constant__ ThirdsLaunch launch) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThirdThreads + threadIdx.x;
  if (at >= launch.rows * launch.columns) return;
  const int64_t row = at / launch.columns, column = at - row * launch.columns;
  const float* const from = launch.source + row * launch.row_stride + column * launch.column_stride;
  float x = *from;
  for (int plane = 1; plane < launch.planes; ++plane) x += from[plane * launch.columns * launch.column_stride];
  __nv_bfloat16* const to = reinterpret_cast<__nv_bfloat16*>(launch.destination) + row * 3 * launch.columns + column;
#pragma unroll
  for (int third = 0; third < 3; ++third) {
    const __nv_bfloat16 part = __float2bfloat16_rn(x);
    to[third * launch.columns] = part;
    x -= __bfloat162float(part);
  }
}

}  // namespace

int launch_thirds(const ThirdsLaunch& launch, void* stream) {
  const int64_t blocks = (launch.rows * launch.columns + kThirdThreads - 1) / kThirdThreads;
  thirds_kernel<<<static_cast<unsigned>(blocks), kThirdThreads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace lora_merge
