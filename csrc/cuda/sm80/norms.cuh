// Norms of the rows of W + scaling B A, for DoRA.
#pragma once
#include "../adapters.cuh"
#include "../tiles.cuh"

namespace lora_merge {

// Ranks of lora_A in shared memory at a time: 54 KiB of float32 parts, which every GPU has.
constexpr int kNormRanks = 128;

// Some ranks of a segment.
__device__ __forceinline__ Segment ranks_of(const Segment& s, int first, int count) {
  Segment part = s;
  part.lora_A += first * s.lora_A_stride[0] * (((s.dtypes >> 16) & 0xff) == kFloat32 ? 4 : 2);
  part.rank = count;
  return part;
}

// Sum over the columns of (W + scaling B A)^2, for 64 rows a block, in float64 and in one fixed order. The segments'
// `units_across` holds the place of their first row in `out`.
template <typename Source>
__global__ void __launch_bounds__(kThreads) row_norms_kernel(const __grid_constant__ Launch launch, double* out) {
  extern __shared__ __align__(128) char memory[];
  bf16* shared_A = reinterpret_cast<bf16*>(memory);
  constexpr int kPitch = 64 + kNormPad;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4;
  const uint32_t a_address = operand_A_address(shared_A, 0, kPitch);

  for (int unit = blockIdx.x; unit < launch.n_units; unit += gridDim.x) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    const int first_row = (unit - static_cast<int>(s.unit_begin)) * kNormRows + warp * kStepRows, rank = s.rank;
    const float scaling = static_cast<float>(s.scaling);
    double total[2] = {};
    for (int strip = 0; strip < s.cols; strip += 64) {
      float sum[1][4][4] = {};
      for (int first = 0; first < rank; first += kNormRanks) {
        const int count = rank - first < kNormRanks ? rank - first : kNormRanks;
        __syncthreads();
        load_A<float>(shared_A, ranks_of(s, first, count), strip, 64, kPitch);
        __syncthreads();
        for (int k = 0; k < count; k += kChunk) {
          uint32_t b[1][3][4];
          operand_B<float>(b[0], fetch_B<float>(s, first_row + lane / 4, first + k + quad * 8));
          multiply_chunk<float, true, 1>(sum, a_address + k * kPitch * 2, kPitch, up_to_chunk(count) * kPitch * 2, b,
                                         turned(s));
        }
      }
      const int col = strip + lane / 4 * 8;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = first_row + 2 * quad + e;
        if (row >= s.rows) continue;
        const Eight w = load_elements<Source>(s, row, col);  // zeros beyond the last column, and so are sums there
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const double value = fmaf(scaling, sum[0][i / 2][i % 2 * 2 + e], w.value[i]);
          total[e] += value * value;
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) total[e] += __shfl_xor_sync(~0u, total[e], mask);
      const int row = first_row + 2 * quad + e;
      if (lane < 4 && row < s.rows) out[s.units_across + row] = total[e];
    }
  }
}

}  // namespace lora_merge
