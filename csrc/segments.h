// The segment table: what every compiled kernel reads, and what lora_merge/kernels/segments.py packs.
//
// A segment is one rectangle of work:
//
//     destination[i, j] = round(scale[i] * (source[i, j] + scaling * sum_k lora_B[i, k] * lora_A[k, j]))
//
// All fields are 64-bit words, so that Python, C++ and Triton read one and the same array: csrc/layout.h.
#pragma once
#include <cstdint>

#include "layout.h"

namespace lora_merge {

#if defined(__CUDACC__)
#define LORA_MERGE_HD __host__ __device__ __forceinline__
#else
#define LORA_MERGE_HD inline
#endif

constexpr float kInt8Step = 7.874015718698502e-3;  // what int8 codes are multiplied with: 1 / 127

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
