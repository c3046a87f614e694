// Scales of groups of 8-bit numbers: from the largest magnitude of a group to its e4m3 elements. What becomes of a
// number is what vLLM's quantisers make of a weight that is loaded (lora_merge/kernels/scaled/weights.py has the rules).
// Magnitudes that several threads found are compared as bits, whose order is that of numbers, with NaN above infinity,
// so that none hides.
#pragma once
#include <cuda_fp8.h>

#include "tiles.cuh"

namespace lora_merge {

constexpr float kLargestFp8 = 448.0f;

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
    inverse = kind == kCompiled ? compiled_inverse(scale) : __fdiv_rn(1.0f, scale);
    odd = !(scale > 0.0f && scale < INFINITY && inverse < INFINITY);
  }
  static __device__ __forceinline__ float larger(float x, float least) { return x < least ? least : x; }
  // The division that Triton compiles: its last bit or two may be others.
  static __device__ __forceinline__ float compiled_inverse(float x) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(1.0f), "f"(x));
    return quotient;
  }

  // Division rounds right: the quotient by the inverse is off by little, and what remains says by how much. (Tried for
  // the fractions of all scales and of all bf16 and fp16 numbers.) What remains of a zero would lose its sign.
  template <bool Divides>
  __device__ __forceinline__ float quotient_of(float x) const {
    const float quotient = __fmul_rn(x, inverse);
    return Divides ? copysignf(fmaf(fmaf(-quotient, scale, x), inverse, quotient), x) : quotient;
  }
  __device__ __noinline__ float carefully(float x) const {
    const float y = divides ? __fdiv_rn(x, scale) : __fmul_rn(x, inverse);
    return hides ? fmaxf(-kLargestFp8, fminf(y, kLargestFp8)) : y;
  }
};

// The larger magnitudes of two pairs of numbers: NaN is larger than all. Signs are anything.
template <typename T>
__device__ __forceinline__ uint32_t larger2(uint32_t x, uint32_t y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 860  // which has no such instruction
  return __vmaxu2(x & 0x7fff7fff, y & 0x7fff7fff);
#else
  uint32_t z;
  if constexpr (std::is_same_v<T, bf16>) asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  else asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
  return z;
#endif
}

// The largest magnitudes of eight numbers: two of them.
template <typename T>
__device__ __forceinline__ uint32_t largest2(const Packed<T>& x) {
  const uint4 w = x.word[0];
  return larger2<T>(larger2<T>(w.x, w.y), larger2<T>(w.z, w.w));
}

// Their bits, without signs.
__device__ __forceinline__ uint32_t larger_half(uint32_t two) { return max(two & 0x7fff, two >> 16 & 0x7fff); }

// Bits of the float32 that a number of 16 bits is.
template <typename T>
__device__ __forceinline__ uint32_t float_bits(uint32_t half) {
  return __float_as_uint(half_as_float(half, std::is_same_v<T, bf16> ? kBFloat16 : kFloat16));
}

// Of a warp, out of two of each lane: bits of a float32.
template <typename T>
__device__ __forceinline__ uint32_t largest_of_warp(uint32_t two) {
  return float_bits<T>(__reduce_max_sync(~0u, larger_half(two)));
}

// Eight numbers, divided, as four pairs of e4m3. Odd: by a divisor that may be `odd`; else Divides is what it
// `divides`.
template <bool Odd, bool Divides>
__device__ __forceinline__ void divide8(uint32_t (&pair)[4], Eight e, const Divisor& by) {
#pragma unroll
  for (int i = 0; i < 8; ++i) e.value[i] = Odd ? by.carefully(e.value[i]) : by.quotient_of<Divides>(e.value[i]);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(e.value[2 * i], e.value[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
}

}  // namespace lora_merge
