// Any machine: plain C++ over small arrays, which compilers turn into what vectors there are.
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>

#include "kernel.h"

namespace lora_merge::cpu {
namespace {

constexpr int kLanes = 4;
constexpr int kTileRows = 4;

struct F { float x[kLanes]; };

template <class Op>
inline F each(Op op) {
  F y;
  for (int l = 0; l < kLanes; ++l) y.x[l] = op(l);
  return y;
}

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline F set(float x) { return each([&](int) { return x; }); }
inline F add(F a, F b) { return each([&](int l) { return a.x[l] + b.x[l]; }); }
inline F mul(F a, F b) { return each([&](int l) { return a.x[l] * b.x[l]; }); }
inline F fma(F a, F b, F c) { return each([&](int l) { return std::fma(a.x[l], b.x[l], c.x[l]); }); }
inline F quiet(F a) { return each([&](int l) { return a.x[l] == a.x[l] ? a.x[l] : float_of(0x7fc00000); }); }

inline bool any_nan(const F (&)[kTileRows][2]) { return true; }  // looked for where they are quieted
inline F load(const float* p) { return each([&](int l) { return p[l]; }); }
inline F load(const BFloat16* p) { return each([&](int l) { return float_of(uint32_t{p[l].bits} << 16); }); }
inline F load(const Float16* p) {
  return each([&](int l) { return c10::detail::fp16_ieee_to_fp32_value(p[l].bits); });
}

inline void store(float* p, F a) {
  for (int l = 0; l < kLanes; ++l) p[l] = a.x[l];
}
inline void store(BFloat16* p, F a) {
  for (int l = 0; l < kLanes; ++l) {
    const uint32_t bits = bits_of(a.x[l]);
    p[l].bits = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}
inline void store(Float16* p, F a) {
  for (int l = 0; l < kLanes; ++l) p[l].bits = c10::detail::fp16_ieee_from_fp32_value(a.x[l]);
}
template <class T>
inline void store(T* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
template <class Words>
inline uint32_t sign_bits(Words x) {
  uint32_t mask = 0;
  for (int l = 0; l < kLanes; ++l) mask |= x[l] >> 31 << l;
  return mask;
}
inline void stream(void* to, const void* from) { std::memcpy(to, from, kLine); }
inline void drain() {}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#include "merge.h"
#include "tracked.h"

}  // namespace

const Kernels kGeneric{"generic", kPanel, merge, row_norms, track, write, untrack};

}  // namespace lora_merge::cpu
