// x86 with AVX-512: tiles of 12 x 32.
#if defined(__x86_64__)
#include <immintrin.h>

#include "kernel.h"

LORA_MERGE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")

namespace lora_merge::cpu {
namespace {

constexpr int kTileRows = 12;

#include "avx512.h"

inline bool any_special(const F (&t)[kTileRows][2]) {
  __mmask16 any = 0;
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) any |= _mm512_cmp_ps_mask(t[i][0], t[i][1], _CMP_UNORD_Q);
  return any != 0;
}

constexpr bool kPlainDiffers = false;

#include "broadcast.h"
#include "plain.h"

}  // namespace

const Kernels kAvx512{"avx512", kPanel, merge, row_norms, track, write, checksum, untrack};

}  // namespace lora_merge::cpu

LORA_MERGE_END_TARGET
#endif
