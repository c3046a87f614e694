// What one thread does at a time, and the choice of instruction sets that can do it.
#pragma once
#include "../segments.h"

// What lies between is compiled for these instructions of a processor.
#define LORA_MERGE_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define LORA_MERGE_BEGIN_TARGET(names) \
  LORA_MERGE_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define LORA_MERGE_END_TARGET LORA_MERGE_PRAGMA(clang attribute pop)
#else
#define LORA_MERGE_BEGIN_TARGET(names) LORA_MERGE_PRAGMA(GCC push_options) LORA_MERGE_PRAGMA(GCC target names)
#define LORA_MERGE_END_TARGET LORA_MERGE_PRAGMA(GCC pop_options)
#endif

namespace lora_merge::cpu {

// Storage types; the arithmetic is float32.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// A rectangle of a segment that one thread works on.
struct Unit {
  const Segment* segment;
  int64_t row, rows, col, cols;
  bool streamed = false;  // the result goes past the caches, where its rows are aligned
};

constexpr int64_t kRankBlock = 128;  // products are summed in blocks of so many ranks
constexpr int64_t kUnitRows = 384;           // many: lora_A is packed once for all of them
constexpr int64_t kUnitCols = 1024;          // a page of float32
constexpr int64_t kMaxTileRows = 16;         // of a register tile, over all instruction sets
constexpr int64_t kMaxPanel = 64;            // columns of a register tile, over all instruction sets
constexpr int64_t kStripe = kUnitCols + 32;  // elements between rows of a result on its way past the caches
constexpr int64_t kLine = 64;                // bytes of a cache line
constexpr int64_t kNormLanes = 16;           // float64 sums of one row norm
constexpr int64_t kPackedA = 32768;          // floats: 128 KiB, a part of a small L2 cache
constexpr int64_t kMaxParts = 3;             // bf16 numbers that a float32 is a sum of
constexpr int64_t kDeep = 32;                // ranks of a tile that a matrix unit takes in one instruction
constexpr int64_t kTiledA = 2 * kMaxParts * kDeep * kUnitCols;  // bf16 elements: 384 KiB, where L2 caches are large

inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// One thread's working memory, about 850 KiB; what an instruction set does not touch has no pages.
struct alignas(64) Scratch {
  bool beyond = false;  // whether a result of float16 was infinite or NaN
  float a[kPackedA + kMaxRank * kMaxPanel];
  float b[kMaxTileRows * kMaxRank];
  float sums[kMaxTileRows * kMaxPanel];
  float stripe[kMaxTileRows * kStripe];
  double norms[kUnitRows][kNormLanes];
  alignas(64) uint16_t tiles_a[kTiledA];
  alignas(64) uint16_t tiles_b[kMaxParts * kMaxTileRows * kMaxRank];
  alignas(64) float odd[kMaxTileRows * kMaxPanel];
  alignas(64) float decoded[kMaxTileRows * kMaxPanel];
};

// Rows of a unit that is tracked (tracked.h) and bytes of one: few, so that its result can wait in the L2 cache until
// its way back has room; and from one such row to the next.
constexpr int64_t kTrackRows = 192, kTrackBytes = 1024, kTrackPitch = kTrackBytes + kLine;

struct TrackScratch : Scratch {
  alignas(64) uint8_t merged[kTrackRows * kTrackPitch];
  alignas(64) uint8_t escaped[kTrackRows * kTrackBytes];
};

struct Kernels {
  const char* name;
  int64_t panel;  // columns of a register tile
  void (*merge)(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch);
  void (*row_norms)(const Unit& unit, double* out, Scratch& scratch);  // a unit of whole rows

  // Merges a unit into `scratch.merged`, not yet into its weight; writes its codes, leaves the raw bits of escaped
  // elements in `scratch.escaped`, and returns how many bytes they are.
  int64_t (*track)(const Unit& unit, uint8_t* codes, TrackScratch& scratch);
  uint64_t (*write)(const Unit& unit, const TrackScratch& scratch);  // the weight: what `track` left; its checksum
  uint64_t (*checksum)(const Unit& unit);                            // of the bits of the weight
  void (*untrack)(const Unit& unit, const uint8_t* codes, const uint8_t* escaped, TrackScratch& scratch);
};

const Kernels& kernels();  // the chosen ones

extern const Kernels kGeneric;
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
// Beside AVX-512, where the processor has bf16: null where its products are not those of the others, bit by bit.
const Kernels* avx512_bf16();
#endif
#if defined(__aarch64__)
extern const Kernels kNeon;
#endif
// Beside AVX-512: whether the processor has it; and the kernels, where this process may use it, which it asks for, else
// null.
bool has_amx();
const Kernels* amx();

}  // namespace lora_merge::cpu
