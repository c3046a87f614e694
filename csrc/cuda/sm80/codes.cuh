// Codes and what they stand for (lora_merge/kernels/packed.py says what): eight columns of a row at a time.
#pragma once
#include "../tiles.cuh"

namespace lora_merge {

// A source of codes that stand for elements of T.
template <typename T>
struct Coded {};

// What a block of a kernel has of it in shared memory: values of the codes of 4 bits, and of the bytes of a quantised
// absmax.
struct CodeTables {
  float value[16];
  float absmax[256];

  // By all threads; what is there is no longer read, and a barrier follows.
  __device__ __forceinline__ void load(const Segment& s) {
    const auto copy = [](float* to, int64_t from, int count) {
      if (from != 0 && static_cast<int>(threadIdx.x) < count)
        to[threadIdx.x] = __ldg(reinterpret_cast<const float*>(from) + threadIdx.x);
    };
    static_assert(kThreads >= 256);
    copy(value, s.code, 16);
    copy(absmax, s.absmax_code, 256);
  }
};

// n as a power of two; -1: it is none.
__device__ __forceinline__ int log2_of(int64_t n) {
  return n > 0 && (n & (n - 1)) == 0 ? __ffsll(static_cast<long long>(n)) - 1 : -1;
}

// To T and back, two at a time.
template <typename T>
__device__ __forceinline__ void through(float& x, float& y) {
  if constexpr (std::is_same_v<T, bf16>) {
    const uint32_t both = pack2<bf16>(x, y);
    x = __uint_as_float(both << 16), y = __uint_as_float(both & 0xffff0000u);
  } else if constexpr (std::is_same_v<T, __half>) {
    const float2 both = __half22float2(__floats2half2_rn(x, y));
    x = both.x, y = both.y;
  }
}

// Eight codes side by side. Those of 4 bits become offsets in the table, four in a word; int8 becomes a float by taking
// the place of the last bits of 2^23, which conversions would take the slow unit for.
template <typename T, bool Int8>
__device__ __forceinline__ Eight decode8(uint2 codes, float scale, const float* table) {
  constexpr uint32_t kOffsets = 0x3c3c3c3c;
  const uint32_t upper = Int8 ? codes.x ^ 0x80808080u : codes.x >> 2 & kOffsets,
                 lower = Int8 ? codes.y ^ 0x80808080u : codes.x << 2 & kOffsets;
  const auto int8 = [&](uint32_t words, int i) {
    const float q = __uint_as_float(__byte_perm(words, 0x4b000000, 0x7440 + i)) - 8388736.0f;
    return __fmul_rn(__fmul_rn(q, scale), kInt8Step);
  };
  const auto value = [&](uint32_t offsets, int i) {
    const uint32_t at = __byte_perm(offsets, 0, 0x4440 + i);
    return __fmul_rn(*reinterpret_cast<const float*>(reinterpret_cast<const char*>(table) + at), scale);
  };
  Eight w;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float &x = w.value[2 * i], &y = w.value[2 * i + 1];
    if constexpr (Int8) x = int8(i < 2 ? upper : lower, 2 * i % 4), y = int8(i < 2 ? upper : lower, 2 * i % 4 + 1);
    else x = value(upper, i), y = value(lower, i);
    through<T>(x, y);
  }
  return w;
}

// Whether eight columns of a row are whole words of codes that share a scale, at every eighth column.
__device__ __forceinline__ bool in_words(const Segment& s) {
  const int64_t aligned = (s.dtypes >> 32) == kInt8 ? 7 : 3;
  return s.source_stride[1] == 1 && ((s.place | s.source_stride[0] | s.block) & 7) == 0 && (s.source & aligned) == 0;
}

// Eight columns of a row, whatever their place: at edges, for codes that are no runs of words, for norms.
template <typename T>
__device__ __noinline__ Eight decode_elements(const Segment& s, int row, int col) {
  const auto scale_at = [&](int64_t at) {
    const int shift = log2_of(s.block);
    const int64_t number = shift >= 0 ? at >> shift : at / s.block;
    if (s.absmax_code == 0) return __ldg(reinterpret_cast<const float*>(s.absmax) + number);
    const int byte = __ldg(reinterpret_cast<const uint8_t*>(s.absmax) + number);
    const int outer = log2_of(s.absmax_block);
    const float factor = __ldg(reinterpret_cast<const float*>(s.absmax_scale) +
                               (outer >= 0 ? number >> outer : number / s.absmax_block));
    return __fadd_rn(__fmul_rn(__ldg(reinterpret_cast<const float*>(s.absmax_code) + byte), factor),
                     __ldg(reinterpret_cast<const float*>(s.absmax_offset)));
  };
  const bool int8 = (s.dtypes >> 32) == kInt8;
  const float* const table = reinterpret_cast<const float*>(s.code);
  const int64_t first = s.place + row * s.source_stride[0] + col * s.source_stride[1];
  if (col + 8 <= s.cols && in_words(s)) {
    if (int8) return decode8<T, true>(__ldg(reinterpret_cast<const uint2*>(s.source + first)), scale_at(first), table);
    const uint32_t word = __ldg(reinterpret_cast<const unsigned int*>(s.source + (first >> 1)));
    return decode8<T, false>(make_uint2(word, 0), scale_at(first), table);
  }
  Eight w;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float x = 0.0f, unused = 0.0f;
    if (col + e < s.cols) {
      const int64_t at = first + e * s.source_stride[1];
      const float scale = scale_at(at);
      if (int8) {
        const int q = __ldg(reinterpret_cast<const signed char*>(s.source) + at);
        x = __fmul_rn(__fmul_rn(static_cast<float>(q), scale), kInt8Step);
      } else {
        const int byte = __ldg(reinterpret_cast<const uint8_t*>(s.source) + (at >> 1));
        x = __fmul_rn(__ldg(table + (at & 1 ? byte & 15 : byte >> 4)), scale);
      }
      through<T>(x, unused);
    }
    w.value[e] = x;
  }
  return w;
}

template <>
__device__ __forceinline__ Eight load_elements<Coded<bf16>>(const Segment& s, int row, int col) {
  return decode_elements<bf16>(s, row, col);
}
template <>
__device__ __forceinline__ Eight load_elements<Coded<__half>>(const Segment& s, int row, int col) {
  return decode_elements<__half>(s, row, col);
}
template <>
__device__ __forceinline__ Eight load_elements<Coded<float>>(const Segment& s, int row, int col) {
  return decode_elements<float>(s, row, col);
}

}  // namespace lora_merge
