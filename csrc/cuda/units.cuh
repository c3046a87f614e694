// How a launch is cut: constants of the merge kernel, units of work and how blocks get them.
#pragma once
#include "device.cuh"
#include "shapes.h"

namespace lora_merge {

constexpr int kStepRows = 8;  // rows a warp finishes in a step
constexpr int kNormPad = 8;   // elements added to a row of A in shared memory: no bank conflicts
static_assert(kWarpCols == 64, "the kernels' lanes are laid out for 64 columns a warp");

__device__ __forceinline__ int segment_of(const Launch& launch, int unit) {
  if (launch.unit_segment != nullptr) return launch.unit_segment[unit];
  int s = 0;
  while (s + 1 < launch.n_segments && unit >= launch.inline_segments[s + 1].unit_begin) ++s;
  return s;
}

__device__ __forceinline__ const Segment* segments_of(const Launch& launch) {
  return launch.segments != nullptr ? launch.segments : launch.inline_segments;
}

// Where the table has the adapter of a product of a segment. Of two products it has all segments twice: those behind
// have the adapters of the first one.
template <int Products>
__device__ __forceinline__ int row_of(const Launch& launch, int segment, int product) {
  return product + 1 == Products ? segment : segment + launch.n_segments / 2;
}

// Whether rows of a view can be touched 16 bytes at a time (edges aside), and a step of rows fits into 32 bits.
__device__ __forceinline__ bool aligned16(int64_t address, const int64_t (&stride)[2], int size) {
  const int64_t bytes = stride[0] * size;
  return stride[1] == 1 && ((address | bytes) & 15) == 0 && bytes < (1 << 24);
}

__device__ __forceinline__ int up_to_chunk(int rank) { return (rank + kChunk - 1) & -kChunk; }

// Where the steps of this warp lie in a unit, and this lane in a step.
struct Walk {
  int strip;       // first column of the unit
  int first_row;   // of the warp's first step
  int row_end;     // of the unit
  int steps;       // even, and at least one more than are in flight, so that loads look at most one unit ahead
  int full_steps;  // the leading ones whose 8 x 64 elements all exist
  int col;         // of this lane's eight columns

  __device__ __forceinline__ Walk(const Launch& launch, const Segment& s, int unit) {
    const int warp = threadIdx.x / 32, row_warp = warp / launch.col_warps,
              col_warp = warp - row_warp * launch.col_warps;
    const uint32_t local = static_cast<uint32_t>(unit - s.unit_begin), across = static_cast<uint32_t>(s.units_across);
    const uint32_t down = local / across;
    const int begin = down * launch.rows_per_unit, stride = row_stride(launch);
    strip = (local - down * across) * launch.col_warps * 64;
    first_row = begin + row_warp * kStepRows;
    row_end = min(begin + launch.rows_per_unit, static_cast<int>(s.rows));
    steps = (max(launch.stages + 1, (row_end - first_row + stride - 1) / stride) + 1) & ~1;
    full_steps = strip + col_warp * 64 + 64 <= s.cols ? max(0, (row_end - kStepRows - first_row + stride) / stride) : 0;
    col = strip + col_warp * 64 + threadIdx.x % 32 / 4 * 8;
  }
  // Rows from one step of a warp to its next.
  static __device__ __forceinline__ int row_stride(const Launch& launch) {
    return kStepRows * (kWarps / launch.col_warps);
  }
};

// The units of a block, in order: handed out one by one, because multiprocessors do not run at one pace. The next one
// is asked for while the last one asked for is at work.
struct Units {
  const Launch& launch;
  int* const ring;  // in shared memory: the n-th unit of this block at n % 4

  // By one thread; the others see it after the next barrier.
  __device__ __forceinline__ void fetch(int n) const {
    const int last = n == 0 ? 0 : ring[(n - 1) % 4];
    int next = last + static_cast<int>(gridDim.x);
    if (n == 0) next = blockIdx.x;
    else if (launch.counter != nullptr) next = gridDim.x + atomicAdd(launch.counter, 1);
    ring[n % 4] = next;
  }
  __device__ __forceinline__ int operator[](int n) const { return ring[n % 4]; }

  // The last block to finish leaves the counters as it found them.
  __device__ __forceinline__ void close() const {
    if (launch.counter != nullptr && threadIdx.x == 0 && atomicAdd(launch.counter + 1, 1) == gridDim.x - 1)
      launch.counter[0] = launch.counter[1] = 0;
  }
};

}  // namespace lora_merge
