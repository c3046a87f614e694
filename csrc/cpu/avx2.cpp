// x86 with AVX2, FMA and F16C: tiles of 6 x 16.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel.h"

LORA_MERGE_BEGIN_TARGET("avx2,fma,f16c")

namespace lora_merge::cpu {
namespace {

constexpr int kLanes = 8;
constexpr int kTileRows = 6;

using F = __m256;

inline F set(float x) { return _mm256_set1_ps(x); }
inline F add(F a, F b) { return _mm256_add_ps(a, b); }
inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
inline F quiet(F a) {
  return _mm256_blendv_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000)), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

inline bool any_special(const F (&t)[kTileRows][2]) {
  F any = _mm256_cmp_ps(t[0][0], t[0][1], _CMP_UNORD_Q);
#pragma GCC unroll 16
  for (int i = 1; i < kTileRows; ++i) any = _mm256_or_ps(any, _mm256_cmp_ps(t[i][0], t[i][1], _CMP_UNORD_Q));
  return _mm256_movemask_ps(any) != 0;
}

inline __m128i load_words(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline void store_words(void* p, __m128i x) { _mm_storeu_si128(static_cast<__m128i*>(p), x); }

inline F load(const float* p) { return _mm256_loadu_ps(p); }
inline F load(const BFloat16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_words(p)), 16));
}
inline F load(const Float16* p) { return _mm256_cvtph_ps(load_words(p)); }

inline void store(float* p, F a) { _mm256_storeu_ps(p, a); }
inline void store(float* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
inline __m256i bfloat16(F a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}
inline void store(BFloat16* p, F a, F b) {
  const __m256i both = _mm256_packus_epi32(bfloat16(a), bfloat16(b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store(Float16* p, F a, F b) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m256i both = _mm256_set_m128i(_mm256_cvtps_ph(b, kNearest), _mm256_cvtps_ph(a, kNearest));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), both);
}
constexpr bool kPlainDiffers = false;
inline F no_nan(F a) { return _mm256_min_ps(a, _mm256_set1_ps(__builtin_inff())); }  // the second one, if one is NaN

template <class Codes, class Words>
inline Codes narrow(Words a, Words b) {
  const __m256i both = _mm256_packus_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b));
  return reinterpret_cast<Codes>(_mm256_permute4x64_epi64(both, 0xd8));
}
template <class Codes, class Words>
inline void widen(Codes x, Words (&to)[2]) {
  const __m256i all = reinterpret_cast<__m256i>(x);
  to[0] = reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)));
  to[1] = reinterpret_cast<Words>(_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1)));
}
template <class V>
inline V at_most_3(V x) {
  const __m256i y = reinterpret_cast<__m256i>(x);
  if constexpr (sizeof(x[0]) == 2) return reinterpret_cast<V>(_mm256_min_epu16(y, _mm256_set1_epi16(3)));
  else return reinterpret_cast<V>(_mm256_min_epu32(y, _mm256_set1_epi32(3)));
}
// Of each half of 8 codes, a byte of low bits and one of high bits.
template <class Codes>
inline void put_codes(Codes x, uint8_t* to) {
  const __m256i codes = reinterpret_cast<__m256i>(x);
  const __m256i bytes = _mm256_packs_epi16(_mm256_slli_epi16(codes, 15), _mm256_slli_epi16(codes, 14));
  const int bits = _mm256_movemask_epi8(bytes);
  __builtin_memcpy(to, &bits, sizeof bits);
}
template <class Codes>
inline Codes plus_codes(Codes x, const uint8_t* from) {
  int bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  const __m256i own = _mm256_setr_epi64x(0x0100010001000100, 0x0100010001000100, 0x0302030203020302, 0x0302030203020302);
  const __m128i bit = _mm_setr_epi16(0x0101, 0x0202, 0x0404, 0x0808, 0x1010, 0x2020, 0x4040, static_cast<short>(0x8080));
  const __m256i mine = _mm256_broadcastsi128_si256(bit);
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), own);
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, mine), mine);  // -1 where the bit is
  const __m256i minus = _mm256_maddubs_epi16(_mm256_set1_epi16(0x0201), set);
  return reinterpret_cast<Codes>(_mm256_sub_epi16(reinterpret_cast<__m256i>(x), minus));
}
struct Escapes {
  uint32_t bits;

  explicit Escapes(const uint8_t* codes) {
    __builtin_memcpy(&bits, codes, sizeof bits);
    bits &= bits >> 8 & 0x00ff00ff;
  }
  bool any() const { return bits != 0; }
  uint32_t all() const { return (bits | bits >> 8) & 0xffff; }
};
template <class Longs>
inline Longs multiply_halves(Longs x) {
  const __m256i low = reinterpret_cast<__m256i>(x);
  return reinterpret_cast<Longs>(_mm256_mul_epu32(low, _mm256_srli_epi64(low, 32)));
}
inline void stream(void* to, const void* from) {
  __m256i* line = static_cast<__m256i*>(to);
  _mm256_stream_si256(line, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
  _mm256_stream_si256(line + 1, _mm256_loadu_si256(static_cast<const __m256i*>(from) + 1));
}
inline void drain() { _mm_sfence(); }
inline void prefetch(const void* p) { _mm_prefetch(p, _MM_HINT_T0); }

#include "broadcast.h"
#include "plain.h"

}  // namespace

const Kernels kAvx2{"avx2", kPanel, merge, row_norms, track, write, checksum, untrack};

}  // namespace lora_merge::cpu

LORA_MERGE_END_TARGET
#endif
