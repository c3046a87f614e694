// What merge.h asks of an instruction set, with AVX-512; included by translation units that set kTileRows.

constexpr int kLanes = 16;

using F = __m512;

inline F set(float x) { return _mm512_set1_ps(x); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F quiet(F a) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q),
                            _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
}

inline __m256i load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const BFloat16* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_words(p)), 16));
}
inline F load(const Float16* p) { return _mm512_cvtph_ps(load_words(p)); }

inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
inline void store(float* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
inline __m256i bfloat16(F a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(sum, 16));
}
inline __m512i joined(__m256i a, __m256i b) { return _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1); }
inline void store(BFloat16* p, F a, F b) { _mm512_storeu_si512(p, joined(bfloat16(a), bfloat16(b))); }
inline void store(Float16* p, F a, F b) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm512_storeu_si512(p, joined(_mm512_cvtps_ph(a, kNearest), _mm512_cvtps_ph(b, kNearest)));
}
inline F no_nan(F a) { return _mm512_min_ps(a, _mm512_set1_ps(__builtin_inff())); }  // the second one, if one is NaN

template <class Codes, class Words>
inline Codes narrow(Words a, Words b) {
  return reinterpret_cast<Codes>(
      joined(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(a)), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(b))));
}
template <class Codes, class Words>
inline void widen(Codes x, Words (&to)[2]) {
  const __m512i all = reinterpret_cast<__m512i>(x);
  to[0] = reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(all)));
  to[1] = reinterpret_cast<Words>(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(all, 1)));
}
template <class V>
inline V at_most_3(V x) {
  const __m512i y = reinterpret_cast<__m512i>(x);
  if constexpr (sizeof(x[0]) == 2) return reinterpret_cast<V>(_mm512_min_epu16(y, _mm512_set1_epi16(3)));
  else return reinterpret_cast<V>(_mm512_min_epu32(y, _mm512_set1_epi32(3)));
}
// The low bits, then the high ones.
template <class Codes>
inline void put_codes(Codes x, uint8_t* to) {
  const __m512i codes = reinterpret_cast<__m512i>(x);
  const uint64_t low = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(1));
  const uint64_t high = _mm512_test_epi16_mask(codes, _mm512_set1_epi16(2));
  const uint64_t bits = low | high << 32;
  __builtin_memcpy(to, &bits, sizeof bits);
}
template <class Codes>
inline Codes plus_codes(Codes x, const uint8_t* from) {
  uint64_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  __m512i y = reinterpret_cast<__m512i>(x);
  y = _mm512_mask_add_epi16(y, static_cast<__mmask32>(bits), y, _mm512_set1_epi16(1));
  return reinterpret_cast<Codes>(_mm512_mask_add_epi16(y, static_cast<__mmask32>(bits >> 32), y, _mm512_set1_epi16(2)));
}
struct Escapes {
  uint32_t bits;

  explicit Escapes(const uint8_t* codes) {
    uint64_t both;
    __builtin_memcpy(&both, codes, sizeof both);
    bits = static_cast<uint32_t>(both & both >> 32);
  }
  bool any() const { return bits != 0; }
  uint32_t all() const { return bits; }
};
template <class Longs>
inline Longs multiply_halves(Longs x) {
  const __m512i low = reinterpret_cast<__m512i>(x);
  return reinterpret_cast<Longs>(_mm512_mul_epu32(low, _mm512_srli_epi64(low, 32)));
}
inline void stream(void* to, const void* from) {
  _mm512_stream_si512(static_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
inline void drain() { _mm_sfence(); }
inline void prefetch(const void* p) { _mm_prefetch(p, _MM_HINT_T0); }

// Lanes that bf16 products cannot be trusted with: anything but zeros and 2^-50 <= |x| < 2^50. Of others they are no
// denormals, nor is a sum of them, since each is a multiple of 2^-114.
inline __mmask16 odd(F x) {
  const __m512i size = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff));
  const __m512i least = _mm512_castps_si512(set(0x1p-50f)), beyond = _mm512_castps_si512(set(0x1p50f));
  const __m512i above = _mm512_sub_epi32(size, least);
  return _mm512_test_epi32_mask(size, size) & _mm512_cmpge_epu32_mask(above, _mm512_sub_epi32(beyond, least));
}
