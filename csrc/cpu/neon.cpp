// aarch64, whose processors all have NEON: tiles of 8 x 8.
//
// No bf16 products: BFDOT and BFMMLA round a sum otherwise than fused multiply-adds in float32 do.
#if defined(__aarch64__)
#include <arm_neon.h>

#include "kernel.h"

namespace lora_merge::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kTileRows = 8;

using F = float32x4_t;

inline F set(float x) { return vdupq_n_f32(x); }
inline F add(F a, F b) { return vaddq_f32(a, b); }
inline F mul(F a, F b) { return vmulq_f32(a, b); }
inline F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
inline F quiet(F a) { return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000))); }

inline bool any_special(const F (&t)[kTileRows][2]) {
  F most = vmaxq_f32(t[0][0], t[0][1]);  // NaN, if one is
#pragma GCC unroll 16
  for (int i = 1; i < kTileRows; ++i) most = vmaxq_f32(most, vmaxq_f32(t[i][0], t[i][1]));
  return vminvq_u32(vceqq_f32(most, most)) == 0;
}

template <class T>
inline uint16x4_t load_words(const T* p) {
  return vld1_u16(&p->bits);
}

inline F load(const float* p) { return vld1q_f32(p); }
inline F load(const BFloat16* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_words(p), 16)); }
inline F load(const Float16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_words(p))); }

inline void store(float* p, F a) { vst1q_f32(p, a); }
inline void store(float* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
inline uint16x4_t bfloat16(F a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  return vaddhn_u32(vaddq_u32(bits, odd), vdupq_n_u32(0x7fff));  // the upper halves of a sum
}
inline void store(BFloat16* p, F a, F b) { vst1q_u16(&p->bits, vcombine_u16(bfloat16(a), bfloat16(b))); }
inline void store(Float16* p, F a, F b) {
  const float16x8_t both = vcombine_f16(vcvt_f16_f32(a), vcvt_f16_f32(b));
  vst1q_u16(&p->bits, vreinterpretq_u16_f16(both));
}
constexpr bool kPlainDiffers = false;
inline F no_nan(F a) { return vminnmq_f32(a, vdupq_n_f32(__builtin_inff())); }  // the number, if one is NaN

template <class Codes, class Words>
inline Codes narrow(Words a, Words b) {
  return (Codes)vcombine_u16(vmovn_u32((uint32x4_t)a), vmovn_u32((uint32x4_t)b));
}
template <class Codes, class Words>
inline void widen(Codes x, Words (&to)[2]) {
  to[0] = (Words)vmovl_u16(vget_low_u16((uint16x8_t)x));
  to[1] = (Words)vmovl_u16(vget_high_u16((uint16x8_t)x));
}
template <class V>
inline V at_most_3(V x) {
  if constexpr (sizeof(x[0]) == 2) return (V)vminq_u16((uint16x8_t)x, vdupq_n_u16(3));
  else return (V)vminq_u32((uint32x4_t)x, vdupq_n_u32(3));
}

// A code is two adjacent bits.
inline int16x8_t places() {
  constexpr int16_t kPlaces[] = {0, 2, 4, 6, 8, 10, 12, 14};
  return vld1q_s16(kPlaces);
}
template <class Codes>
inline void put_codes(Codes x, uint8_t* to) {
  const uint16_t bits = vaddvq_u16(vshlq_u16((uint16x8_t)x, places()));
  __builtin_memcpy(to, &bits, sizeof bits);
}
template <class Codes>
inline Codes plus_codes(Codes x, const uint8_t* from) {
  uint16_t bits;
  __builtin_memcpy(&bits, from, sizeof bits);
  const uint16x8_t shifted = vshlq_u16(vdupq_n_u16(bits), vnegq_s16(places()));
  return (Codes)vaddq_u16((uint16x8_t)x, vandq_u16(shifted, vdupq_n_u16(3)));
}
struct Escapes {
  uint32_t bits;  // every other one

  explicit Escapes(const uint8_t* codes) {
    uint16_t both;
    __builtin_memcpy(&both, codes, sizeof both);
    bits = both & both >> 1 & 0x5555;
  }
  bool any() const { return bits != 0; }
  uint32_t all() const {
    const uint32_t pairs = (bits | bits >> 1) & 0x3333, fours = (pairs | pairs >> 2) & 0x0f0f;
    return (fours | fours >> 4) & 0xff;
  }
};
template <class Longs>
inline Longs multiply_halves(Longs x) {
  return (Longs)vmull_u32(vmovn_u64((uint64x2_t)x), vshrn_n_u64((uint64x2_t)x, 32));
}
inline void stream(void* to, const void* from) {
  const float* words = static_cast<const float*>(from);
  const F a = load(words), b = load(words + kLanes), c = load(words + 2 * kLanes), d = load(words + 3 * kLanes);
  asm volatile("stnp %q1, %q2, [%0]\n\tstnp %q3, %q4, [%0, #32]" ::"r"(to), "w"(a), "w"(b), "w"(c), "w"(d) : "memory");
}
inline void drain() {}  // other threads see these stores in the order in which they see any
inline void prefetch(const void* p) { __builtin_prefetch(p); }

template <int kLane>
__attribute__((always_inline)) inline void add_rank(const float* a, const F (&b)[kTileRows], F (&t)[kTileRows][2]) {
  const F a0 = load(a), a1 = load(a + kLanes);
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    t[i][0] = vfmaq_laneq_f32(t[i][0], a0, b[i], kLane);
    t[i][1] = vfmaq_laneq_f32(t[i][1], a1, b[i], kLane);
  }
}

// One rank block of a tile of kTileRows x 2 kLanes sums, in registers: B block x A panel, on top of `start`. Four ranks
// of lora_B are loaded at a time: to multiply by one lane costs nothing, to fill all lanes with it would.
__attribute__((always_inline)) inline void multiply(const float* a, const float* b, int64_t depth, float start,
                                                    F (&t)[kTileRows][2]) {
  constexpr int64_t kStep = 2 * kLanes;
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) t[i][0] = t[i][1] = set(start);
  F x[kTileRows];
  for (; depth >= kLanes; depth -= kLanes, a += kLanes * kStep, b += kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) x[i] = load(b + i * kRankBlock);
    add_rank<0>(a, x, t);
    add_rank<1>(a + kStep, x, t);
    add_rank<2>(a + 2 * kStep, x, t);
    add_rank<3>(a + 3 * kStep, x, t);
  }
  for (; depth > 0; --depth, a += kStep, ++b) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) x[i] = set(b[i * kRankBlock]);
    add_rank<0>(a, x, t);
  }
}

#include "plain.h"

}  // namespace

const Kernels kNeon{"neon", kPanel, merge, row_norms, track, write, checksum, untrack};

}  // namespace lora_merge::cpu
#endif
