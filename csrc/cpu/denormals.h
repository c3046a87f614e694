// How a thread computes with denormal numbers.
#pragma once
#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace lora_merge::cpu {

// While it lives, this thread keeps denormals, as IEEE 754 has them, and rounds to nearest. torch.set_flush_denormal
// sets one thread alone, and bits must not depend on which thread came to them: the way back from a tracked merge
// computes what the merge computed.
class KeepDenormals {
 public:
#if defined(__SSE2__)
  KeepDenormals() : before_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // what a process starts with: every exception masked
  ~KeepDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#elif defined(__aarch64__)
  KeepDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{0}));
  }
  ~KeepDenormals() { asm volatile("msr fpcr, %0" ::"r"(before_)); }

 private:
  uint64_t before_;
#else
  KeepDenormals() {}  // not a trivial one, which would be an unused variable
#endif

 public:
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;
};

}  // namespace lora_merge::cpu
