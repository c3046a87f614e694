// Any machine: plain C++ over small arrays, which compilers turn into what vectors there are.
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

// fp16, by its bits: to nearest, ties to even.
inline float from_half(uint16_t h) {
  const uint32_t sign = uint32_t{h} >> 15 << 31, exponent = h >> 10 & 31, mantissa = h & 0x3ff;
  if (exponent == 0) return float_of(bits_of(static_cast<float>(mantissa) * 0x1p-24f) | sign);
  return float_of(sign | (exponent == 31 ? 0xffU : exponent + 112) << 23 | mantissa << 13);
}

inline uint16_t to_half(float x) {
  const uint32_t sign = bits_of(x) >> 31 << 15, size = bits_of(x) & 0x7fffffff;
  uint32_t half;
  if (size > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (size >= 0x477ff000) {
    half = 0x7c00;  // nearer to what would follow the largest number
  } else if (size >= 0x38800000) {
    half = (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13;
  } else {
    half = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);  // the sum is rounded to a multiple of 2^-24
  }
  return static_cast<uint16_t>(sign | half);
}

inline F set(float x) { return each([&](int) { return x; }); }
inline F add(F a, F b) { return each([&](int l) { return a.x[l] + b.x[l]; }); }
inline F mul(F a, F b) { return each([&](int l) { return a.x[l] * b.x[l]; }); }
inline F fma(F a, F b, F c) { return each([&](int l) { return std::fma(a.x[l], b.x[l], c.x[l]); }); }
inline F quiet(F a) { return each([&](int l) { return a.x[l] == a.x[l] ? a.x[l] : float_of(0x7fc00000); }); }

inline bool any_special(const F (&)[kTileRows][2]) { return true; }  // looked for where they are quieted
inline F load(const float* p) { return each([&](int l) { return p[l]; }); }
inline F load(const BFloat16* p) { return each([&](int l) { return float_of(uint32_t{p[l].bits} << 16); }); }
inline F load(const Float16* p) {
  return each([&](int l) { return from_half(p[l].bits); });
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
  for (int l = 0; l < kLanes; ++l) p[l].bits = to_half(a.x[l]);
}
template <class T>
inline void store(T* p, F a, F b) {
  store(p, a);
  store(p + kLanes, b);
}
constexpr bool kPlainDiffers = false;
inline F no_nan(F a) { return each([&](int l) { return a.x[l] == a.x[l] ? a.x[l] : 0; }); }

template <class Codes, class Words>
inline Codes narrow(Words a, Words b) {
  Codes x;
  for (int l = 0; l < kLanes; ++l) x[l] = a[l], x[kLanes + l] = b[l];
  return x;
}
template <class Codes, class Words>
inline void widen(Codes x, Words (&to)[2]) {
  for (int l = 0; l < kLanes; ++l) to[0][l] = x[l], to[1][l] = x[kLanes + l];
}
template <class V>
inline V at_most_3(V x) {
  return x < 3 ? x : V{} + 3;
}
template <class Codes>
inline void put_codes(Codes x, uint8_t* to) {
  to[0] = to[1] = 0;
  for (int l = 0; l < 2 * kLanes; ++l) to[0] |= (x[l] & 1) << l, to[1] |= x[l] >> 1 << l;
}
template <class Codes>
inline Codes plus_codes(Codes x, const uint8_t* from) {
  for (int l = 0; l < 2 * kLanes; ++l) x[l] += (from[0] >> l & 1) | (from[1] >> l & 1) << 1;
  return x;
}
struct Escapes {
  uint32_t bits;

  explicit Escapes(const uint8_t* codes) : bits(codes[0] & codes[1]) {}
  bool any() const { return bits != 0; }
  uint32_t all() const { return bits; }
};
template <class Longs>
inline Longs multiply_halves(Longs x) {
  return (x & 0xffffffff) * (x >> 32);
}
inline void stream(void* to, const void* from) { std::memcpy(to, from, kLine); }
inline void drain() {}
inline void prefetch(const void* p) { __builtin_prefetch(p); }

#include "broadcast.h"
#include "plain.h"

}  // namespace

const Kernels kGeneric{"generic", kPanel, merge, row_norms, track, write, checksum, untrack};

}  // namespace lora_merge::cpu
