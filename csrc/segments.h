// The segment table: what every compiled kernel reads, and what lora_merge/kernels/segments.py writes.
//
// A segment is one rectangle of work:
//
//     destination[i, j] = round(scale[i] * (source[i, j] + scaling * sum_k lora_B[i, k] * lora_A[k, j]))
//
// All fields are 64-bit words, so that Python, C++ and Triton read one and the same array.
#pragma once
#include <cstdint>

namespace lora_merge {

enum Dtype : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kRaw1 = 3, kRaw2 = 4, kRaw4 = 5, kRaw8 = 6 };

struct Segment {
  int64_t source;       // addresses
  int64_t destination;
  int64_t lora_A;       // [rank, cols]
  int64_t lora_B;       // [rows, rank]
  int64_t row_scale;    // float32 [rows] (DoRA), 0 = none
  int64_t rows;
  int64_t cols;
  int64_t rank;         // 0 = a copy; a raw dtype copies bits, the others convert
  int64_t source_stride[2];       // in elements: per row, per column
  int64_t destination_stride[2];
  int64_t lora_A_stride[2];       // per rank, per column
  int64_t lora_B_stride[2];       // per row, per rank
  double scaling;
  int64_t dtypes;       // source | destination << 8 | lora_A << 16 | lora_B << 24
  uint64_t key;         // hash of the weight's name: stochastic rounding
  int64_t first;        // index in the whole weight of element (0, 0)
  int64_t pitch[2];     // what a row and a column add to that index
  int64_t unit_begin;   // first work unit of this segment within its launch (set by the backend)
  int64_t units_across; // work units side by side in a row of units (set by the backend)
};
static_assert(sizeof(Segment) == 24 * 8, "lora_merge/kernels/segments.py packs 24 words");

#if defined(__CUDACC__)
#define LORA_MERGE_HD __host__ __device__ __forceinline__
#else
#define LORA_MERGE_HD inline
#endif

// Whether columns of the whole weight are rows here, and lora_A and lora_B in each other's place. Products of their
// parts are then summed in the order in which they are otherwise: where a weight lies does not show in its bits.
LORA_MERGE_HD bool turned(const Segment& s) {
  return s.pitch[0] < s.pitch[1] || (s.pitch[0] == s.pitch[1] && s.rows < s.cols);
}

// Random bits of stochastic rounding: the same function in every backend.
// Two rounds of a 32-bit avalanche hash over (key ^ seed, index of the element in the whole weight).
LORA_MERGE_HD uint32_t avalanche(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}

LORA_MERGE_HD uint32_t random_bits(uint64_t key, uint64_t index) {
  uint32_t h = avalanche(static_cast<uint32_t>(index) ^ static_cast<uint32_t>(key));
  return avalanche(h ^ static_cast<uint32_t>(index >> 32) ^ static_cast<uint32_t>(key >> 32));
}

}  // namespace lora_merge
