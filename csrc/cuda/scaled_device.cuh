// What both kernels with results of 8 bits share: scales, conversion, and which group an element is in.
#pragma once
#include <cuda_fp8.h>

#include "tiles.cuh"

namespace lora_merge {

constexpr float kLargestFp8 = 448.0f;
// Sixteen bits each, as unsigned numbers.
__device__ __forceinline__ uint32_t larger2(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }

// The largest magnitude of eight numbers, and of two in a word: its bits in their own format.
template <typename T>
__device__ __forceinline__ uint32_t largest2(const Packed<T>& x) {
  const uint4 w = x.word[0];
  const uint32_t m = 0x7fff7fff;
  return larger2(larger2(w.x & m, w.y & m), larger2(w.z & m, w.w & m));
}
__device__ __forceinline__ uint32_t larger_half(uint32_t x) { return max(x & 0xffff, x >> 16); }
template <typename T>
__device__ __forceinline__ uint32_t float_bits(uint32_t half) {
  return __float_as_uint(half_as_float(half, std::is_same_v<T, bf16> ? kBFloat16 : kFloat16));
}

// A group's scale, and how elements are divided by it.
struct Divisor {
  float scale, inverse;
  bool divides;  // by one division each; else they are multiplied by the inverse
  bool odd;      // zero, infinite or no number, or its inverse is
  bool hides;    // a quotient that is no number becomes the largest one, as in vLLM's kernel

  __device__ __forceinline__ Divisor(float largest, int kind) {
    divides = kind == kChannel, hides = kind == kTensor;
    if (kind == kTensor) scale = __fdiv_rn(largest, kLargestFp8);
    // A NaN stays one.
    else if (kind == kChannel) scale = larger(__fdiv_rn(largest, kLargestFp8), 1.0f / (kLargestFp8 * 512.0f));
    else scale = __fmul_rn(larger(largest, 1e-4f), 1.0f / kLargestFp8);
    inverse = __fdiv_rn(1.0f, scale);
    odd = !(scale > 0.0f && scale < INFINITY && inverse < INFINITY);
  }
  static __device__ __forceinline__ float larger(float x, float least) { return x < least ? least : x; }

  // Division rounds right: the quotient by the inverse is off by little, and what remains says by how much. (For every
  // scale's fraction and every one of 11 bits: tried.) What remains of a zero would lose its sign.
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = __fmul_rn(x, inverse);
    return divides ? copysignf(fmaf(fmaf(-quotient, scale, x), inverse, quotient), x) : quotient;
  }
  __device__ __noinline__ float carefully(float x) const {
    const float y = divides ? __fdiv_rn(x, scale) : __fmul_rn(x, inverse);
    return hides ? fmaxf(-kLargestFp8, fminf(y, kLargestFp8)) : y;
  }
};

// Eight numbers in 8 bits: four pairs.
template <typename T>
__device__ __forceinline__ void convert8(uint32_t (&pair)[4], const Packed<T>& x, const Divisor& by) {
  Eight e = unpack(x);
  if (by.odd) {
#pragma unroll
    for (int i = 0; i < 8; ++i) e.value[i] = by.carefully(e.value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) e.value[i] = by(e.value[i]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(e.value[2 * i], e.value[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
}

// Which group an element is in, and where that has its scale. Groups are as wide as units, or wider.
struct Grid {
  float* const scale;
  uint32_t* const largest;
  const int kind, first_row, first_col, across;
  __device__ __forceinline__ explicit Grid(const Segment& segment) : Grid(*reinterpret_cast<const Scaled*>(segment.code)) {}
  __device__ __forceinline__ explicit Grid(const Scaled& s)
      : scale(reinterpret_cast<float*>(s.scale)),
        largest(reinterpret_cast<uint32_t*>(s.largest)),
        kind(static_cast<int>(s.kind)),
        first_row(static_cast<int>(s.first_row)),
        first_col(static_cast<int>(s.first_col)),
        across(static_cast<int>(s.across)) {}
  __device__ __forceinline__ int64_t group(int row, int col) const {
    if (kind == kTensor) return 0;
    if (kind == kChannel) return first_row + row;
    return static_cast<int64_t>((first_row + row) / kScaledBlock) * across + (first_col + col) / kScaledBlock;
  }
};

}  // namespace lora_merge
