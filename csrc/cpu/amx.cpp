// x86 with AVX-512 and AMX: tiles of 16 x 32, their products on the matrix unit.
#include "kernel.h"

// GCC alone has these headers and pragmas; what other compilers make does without AMX.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,avx512bf16,amx-tile,amx-bf16")

namespace lora_merge::cpu {
namespace {

constexpr int kTileRows = 16;

#include "avx512.h"
#include "broadcast.h"
#include "fused.h"
#include "rounding.h"
#include "tiled.h"

using Products = Tiled;

#include "merge.h"
#include "tracked.h"

// A segment is done in one way, whichever unit of it and in both directions.
const Kernels kAmx{
    "amx",
    kPanel,
    [](const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
      (Tiled::faster(*unit.segment) ? merge : kAvx512.merge)(unit, stochastic, seed, scratch);
    },
    [](const Unit& unit, double* out, Scratch& scratch) {
      (Tiled::faster(*unit.segment) ? row_norms : kAvx512.row_norms)(unit, out, scratch);
    },
    [](const Unit& unit, uint8_t* codes, TrackScratch& scratch) {
      return (Tiled::faster(*unit.segment) ? track : kAvx512.track)(unit, codes, scratch);
    },
    write,
    checksum,
    [](const Unit& unit, const uint8_t* codes, const uint8_t* escaped, TrackScratch& scratch) {
      (Tiled::faster(*unit.segment) ? untrack : kAvx512.untrack)(unit, codes, escaped, scratch);
    },
};

}  // namespace

#pragma GCC pop_options

bool has_amx() {
  constexpr unsigned kBFloat16Tiles = 1u << 22, kTiles = 1u << 24, kBFloat16Vectors = 1u << 5;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kBFloat16Tiles) || !(d & kTiles)) return false;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & kBFloat16Vectors;
}

const Kernels* amx() {
  // Linux says no where a thread has a signal stack too small for tiles; from here on none can get one (of 8 KiB, say).
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? &kAmx : nullptr;
}

}  // namespace lora_merge::cpu
#else
namespace lora_merge::cpu {
bool has_amx() { return false; }
const Kernels* amx() { return nullptr; }
}  // namespace lora_merge::cpu
#endif
