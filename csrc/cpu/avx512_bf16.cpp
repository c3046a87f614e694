// x86 with AVX-512 and its bf16 instructions: tiles of 12 x 32, the same bits as without.
#include "kernel.h"

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>

LORA_MERGE_BEGIN_TARGET("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512bf16")

namespace lora_merge::cpu {
namespace {

constexpr int kTileRows = 12;

#include "avx512.h"
#include "broadcast.h"
#include "fused.h"
#include "paired.h"
#include "rounding.h"

using Products = Paired;

#include "merge.h"
#include "tracked.h"

const Kernels kAvx512Bf16{"avx512_bf16", kPanel, merge, row_norms, track, write, checksum, untrack};

}  // namespace

const Kernels* avx512_bf16() { return Paired::in_order() ? &kAvx512Bf16 : nullptr; }

}  // namespace lora_merge::cpu

LORA_MERGE_END_TARGET
#elif defined(__x86_64__)
namespace lora_merge::cpu {
const Kernels* avx512_bf16() { return nullptr; }
}  // namespace lora_merge::cpu
#endif
