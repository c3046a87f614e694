// What shape a launch may have, and which one is best: by the shared memory that it takes. Plain C++, for the host:
// Python asks for a shape, by which it cuts the table; the launch checks and uses the one it is given by the same
// functions. So each shape that is chosen is one that a launch accepts, which a CPU can test for any GPU.
#pragma once
#include <initializer_list>
#include <optional>

#include "../parts.h"

namespace lora_merge {

LORA_MERGE_HD constexpr int chunks_of(int rank) { return (rank + kChunk - 1) / kChunk; }

// ---- the kernel for any GPU ---------------------------------------------------------------------------------------

constexpr int kThreads = kWarps * 32;
constexpr uint32_t kVector = kThreads * 16;  // shared memory of 16 bytes for each lane
constexpr int kNarrow32Stages = 4;           // steps in flight where the compiler knows their number
constexpr int kReserved = 1024;              // shared memory that the system takes of every block
constexpr int kStatic = 128;                 // and the kernels' own variables

struct Shape {
  int col_warps, stages, staged_B, pad;  // see Launch
};

// `planes`: parts of which products are made, each of 16 bits; 2 or 3 of float32 adapters, see `Adapter` in device.cuh.

// Whether adapters of 16 bits take the kernel for ranks up to 32.
constexpr bool one_chunk(int max_rank, int stages) { return max_rank <= kChunk && stages == kNarrow32Stages; }

// Bytes of one stage: elements of W, whose place the result takes, and pieces of B.
LORA_MERGE_HD constexpr uint32_t slot_bytes(int element_bytes, int planes, bool staged_B, int max_rank) {
  return (element_bytes + (staged_B ? chunks_of(max_rank) * (planes > 1 ? 2 : 1) : 0)) * kVector;
}

// `element_bytes`: of the larger one of W and the result.
constexpr int64_t shared_bytes(const Shape& shape, int max_rank, int planes, int element_bytes) {
  const int64_t lora_A = int64_t{chunks_of(max_rank)} * kChunk * (kWarpCols * shape.col_warps + shape.pad) * 2;
  return int64_t{shape.stages} * slot_bytes(element_bytes, planes, shape.staged_B, max_rank) + lora_A * planes;
}

// Whether a launch takes it, where a block may have `per_block` bytes of shared memory.
constexpr bool accepts(const Shape& s, int max_rank, int planes, int element_bytes, int per_block) {
  const bool known = (s.col_warps == 1 || s.col_warps == 2 || s.col_warps == 4) && (s.stages == 2 || s.stages == 4) &&
                     (s.pad == 0 || s.pad == 8) && max_rank >= 0 && max_rank <= kMaxRank && planes >= 1 && planes <= 3;
  return known && shared_bytes(s, max_rank, planes, element_bytes) + kStatic <= per_block;
}

// Whether two blocks share a multiprocessor of `per_processor` bytes.
constexpr bool two_share(const Shape& s, int max_rank, int planes, int element_bytes, int per_processor) {
  return 2 * (shared_bytes(s, max_rank, planes, element_bytes) + kStatic + kReserved) <= per_processor;
}

// The wider the strip (up to `widest` warps), the more warps share rows of B; the more stages, the more of memory's
// latency is hidden; and two blocks on a multiprocessor hide each other's pauses. Tried in this order of merit; none
// where the rank leaves no room (for `narrowest` warps).
inline std::optional<Shape> choose_shape(int max_rank, int planes, int element_bytes, int narrowest, int widest,
                                         int per_block, int per_processor) {
  const auto fits = [&](const Shape& s) { return accepts(s, max_rank, planes, element_bytes, per_block); };
  for (const bool shared : {true, false})
    for (const int stages : {4, 2})
      for (const int col_warps : {4, 2, 1}) {
        const Shape s{col_warps, stages, true, 8};
        if (col_warps < narrowest || col_warps > widest || !fits(s)) continue;
        if (!shared || two_share(s, max_rank, planes, element_bytes, per_processor)) return s;
      }
  for (const int pad : {8, 0})
    if (const Shape s{1, 2, false, pad}; narrowest == 1 && fits(s)) return s;
  return std::nullopt;
}

// ---- the kernel for compute capability 9 --------------------------------------------------------------------------

namespace hopper {

constexpr int kBoxBytes = kTileRows * kBoxCols * 2;
constexpr int kMaxStages = 6, kMaxHeld = 12;
constexpr int kNext = 2;    // chunks of a box of float32 lora_A that are under way to be split ahead
constexpr int kOwn = 3072;  // shared memory of barriers, tiles and segments

struct Tiles {
  int strip_cols, held, stages;  // see HopperLaunch
};

// Of 32 ranks, a plane as the matrix unit reads it: rows of lora_B, columns of a box of lora_A.
constexpr int kPartBytes = 64 * kChunk * 2;
static_assert(kTileRows == 64 && kBoxCols == 64);
// Of 32 ranks, as they come from memory: 16 bits, pairs of them, or float32.
LORA_MERGE_HD constexpr int chunk_bytes(int planes) { return kPartBytes * (planes > 1 ? 2 : 1); }
// Factors of 64 rows, or columns, of pairs. There is room for those of two products.
constexpr int kFactorBytes = 4 * kFactorWords;
static_assert(kFactorsAtOnce == 64);

// Shared memory: the stages, boxes of lora_A, those of the strip split into parts, or where they are split ahead what
// comes next, the factors of boxes of pairs, the kernel's own. A stage: W, lora_B with its factors, what the
// epilogue adds.
struct Layout {
  int cols, stage_bytes, stages, bytes_of_A, held, bytes_of_parts, bytes_of_next, bytes_of_factors, bytes_of_B;
  LORA_MERGE_HD constexpr int before_parts() const { return stages * stage_bytes + held * bytes_of_A; }
  LORA_MERGE_HD constexpr int before_factors() const {
    return before_parts() + cols / kBoxCols * bytes_of_parts + bytes_of_next;
  }
  LORA_MERGE_HD constexpr int before_own() const { return before_factors() + held * bytes_of_factors; }
  LORA_MERGE_HD constexpr int total() const { return before_own() + kOwn; }
};

// `extra`: bytes of the epilogue for each box of W. `ahead`: lora_A of the next unit is brought as early as there is
// room for it, and float32 lora_A (three planes) then split ahead of the products: else a box of it is held as it
// comes, and split by those who multiply.
constexpr Layout layout_of(const Tiles& tiles, int max_rank, int planes, int extra, bool ahead) {
  const int chunks = chunks_of(max_rank), factors = planes == 2 ? 2 * kFactorBytes : 0;
  const int of_A = chunks * chunk_bytes(planes), of_parts = planes == 3 ? 3 * chunks * kPartBytes : 0;
  const int of_B = chunks * chunk_bytes(planes) + factors;
  return {tiles.strip_cols,
          (tiles.strip_cols / kBoxCols * (kBoxBytes + extra) + of_B + 1023) & -1024,
          tiles.stages,
          planes == 3 && ahead ? of_parts : of_A,
          tiles.held,
          ahead ? 0 : of_parts,
          planes == 3 && ahead ? kNext * chunk_bytes(planes) : 0,
          factors,
          of_B};
}

// Whether a launch takes them, where a block may have `per_block` bytes of shared memory. Held boxes of float32 lora_A
// that are not split ahead are shared out to two groups; of others a strip's are there at once. In parts there is a
// chunk of each of two products (kernels/cuda/table.py has pairs for more).
constexpr bool accepts(const Tiles& t, int max_rank, int planes, int extra, bool ahead, int per_block) {
  const bool known = (t.strip_cols == 256 || t.strip_cols == 128 || (t.strip_cols == 64 && planes == 2)) &&
                     t.stages >= 2 && t.stages <= kMaxStages && t.held > 0 && t.held <= kMaxHeld && max_rank >= 0 &&
                     max_rank <= (planes == 3 ? 2 * kChunk : kMaxRank) && planes >= 1 && planes <= 3;
  const bool held = planes == 3 && !ahead ? t.held % 2 == 0 : t.held >= t.strip_cols / kBoxCols;
  return known && held && layout_of(t, max_rank, planes, extra, ahead).total() <= per_block;
}

// Wide strips read lora_B less often; stages hide the latency of memory. None where the rank leaves no room.
inline std::optional<Tiles> choose_tiles(int max_rank, int planes, int extra, int per_block, bool ahead) {
  const auto most_stages = [&](int strip_cols, int held) {
    int stages = kMaxStages;
    while (stages > 0 && !accepts({strip_cols, held, stages}, max_rank, planes, extra, ahead, per_block)) --stages;
    return stages;
  };
  struct Try {
    int strip_cols, held, planes;  // of adapters that try it; 0: all do
  };
  // Split ahead, half of the next unit's is there while this one's is read.
  const int held = planes == 3 && ahead ? 6 : 4;
  for (const Try& t : {Try{256, held, 0}, Try{128, 4, 3}, Try{128, 2, 0}, Try{64, 1, 2}}) {
    if (t.planes != 0 && t.planes != planes) continue;
    Tiles tiles{t.strip_cols, t.held, most_stages(t.strip_cols, t.held)};
    if (tiles.stages == 0) continue;
    // What is left is for the next unit's lora_A where that takes long to bring; else blocks that wait for it stay side
    // by side.
    const bool more = ahead || (planes != 3 && max_rank * planes > 96);
    while (more && most_stages(tiles.strip_cols, tiles.held + 1) == tiles.stages)
      ++tiles.held;
    return tiles;
  }
  return std::nullopt;
}

}  // namespace hopper
}  // namespace lora_merge
