// Which vectors this processor has and the system keeps. Compilers' own answer (`__builtin_cpu_supports`) is one of
// their library, which the module may be linked against another one of.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>

namespace lora_merge::cpu {

struct Features {
  bool avx2 = false, avx512 = false, bf16 = false;
};

inline Features features() {
  constexpr unsigned kFma = 1u << 12, kSaved = 1u << 27, kHalf = 1u << 29;                            // 1, c
  constexpr unsigned kAvx2 = 1u << 5, kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;  // 7, b
  constexpr unsigned kBf16 = 1u << 5;                                                                 // 7.1, a
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;  // registers that the system saves when threads change
  const auto all = [](unsigned word, unsigned wanted) { return (word & wanted) == wanted; };
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !all(c, kFma | kSaved | kHalf)) return {};
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return {};
  unsigned saved, high;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const bool avx2 = all(b, kAvx2) && all(saved, kYmm);
  const bool avx512 = avx2 && all(b, kF | kDq | kBw | kVl) && all(saved, kZmm);
  const bool bf16 = avx512 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && all(a, kBf16);
  return {avx2, avx512, bf16};
}

}  // namespace lora_merge::cpu
#endif
