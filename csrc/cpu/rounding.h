// What merge.h asks of AVX-512 where it has bf16, with avx512.h; included by translation units that set kTileRows.

// One instruction rounds to bf16, but it takes denormals for zeros.
inline bool any_special(const F (&t)[kTileRows][2]) {
  constexpr int kNanOrDenormal = 0x80 | 0x20 | 0x01;
  __mmask16 any = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    any |= _mm512_fpclass_ps_mask(t[i][0], kNanOrDenormal) | _mm512_fpclass_ps_mask(t[i][1], kNanOrDenormal);
  }
  return any != 0;
}
constexpr bool kPlainDiffers = true;
inline void store_plain(BFloat16* p, F a, F b) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
}
