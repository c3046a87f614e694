// What a block of the merge kernel for compute capability 9 (sm90/merge.cuh) has in shared memory, and where it lies.
#pragma once
#include <cstddef>

#include "box.cuh"
#include "mma.cuh"
#include "../tiles.cuh"

namespace lora_merge {
namespace hopper {

constexpr int kSlots = 8;  // of units: more than tiles in flight can belong to, and the next one
constexpr int kStoreWarps = 2, kMostGroups = 4;

// Warpgroups that multiply: two, or three for an epilogue that waits for latencies more than for memory, or four. With
// three in turns, a box must take one turn, or a group without a box at the end would keep its turn: up to kManyRank
// (of all products). And a strip has four: of two, lora_A would be left while another group still reads it.
constexpr int kManyRank = kChunksOfTurn<3> * kChunk;
template <int Groups>
constexpr int kWarpsOfGroups = 4 * Groups;
template <int Groups>
constexpr int kBlock = 128 * (Groups + 1);
// Of lanes that multiply, and of the others: together what a block gets.
template <int Groups>
constexpr int kRegisters[2] = {Groups == 2 ? 208 : Groups == 3 ? 152 : 104, Groups == 2 ? 88 : Groups == 3 ? 56 : 64};

// Of a segment, what this kernel reads: all but what is of packed sources.
constexpr int kSlotWords = offsetof(Segment, place) / 8;

// A unit: where it lies in its segment.
struct Slot {
  int64_t word[kSlotWords];
  int64_t unit;
  int number;  // of the segment
  int row, row_end, col;
  __device__ __forceinline__ const Segment& segment() const { return *reinterpret_cast<const Segment*>(word); }
};

struct Shared {
  uint64_t full[kMaxStages], done[kMaxStages], empty[kMaxStages];
  uint64_t full_A[kMaxHeld], empty_A[kMaxHeld];
  uint64_t given[kSlots], next_A[kNext];
  Tile tiles[kMaxStages];
  Slot slots[kSlots];
  Before before[kMaxStages];
  uint32_t met[kMostGroups][2][4];  // largest magnitudes of a block, of each group's warps, in turns
};

static_assert(sizeof(Shared) <= kOwn);

struct Block {
  const HopperLaunch& launch;
  const Layout& layout;
  char* const memory;
  Shared& shared;
  __device__ __forceinline__ Block(const HopperLaunch& l, const Layout& y, char* m)
      : launch(l), layout(y), memory(m), shared(*reinterpret_cast<Shared*>(m + y.before_own())) {}
  __device__ __forceinline__ char* stage(int i) const { return memory + i * layout.stage_bytes; }
  __device__ __forceinline__ char* stage_B(int i) const { return stage(i) + layout.cols / kBoxCols * kBoxBytes; }
  __device__ __forceinline__ char* stage_extra(int i) const { return stage_B(i) + layout.bytes_of_B; }
  __device__ __forceinline__ char* lora_A(int i) const {
    return memory + layout.stages * layout.stage_bytes + i * layout.bytes_of_A;
  }
  __device__ __forceinline__ char* parts_of_A(int box) const {
    return memory + layout.before_parts() + box * layout.bytes_of_parts;
  }
  // Where chunks of float32 lora_A come that are split ahead.
  __device__ __forceinline__ char* next_lora_A(int i) const { return parts_of_A(0) + i * chunk_bytes(3); }
  // Of product p.
  __device__ __forceinline__ uint32_t* factors_of_A(int i, int p) const {
    return reinterpret_cast<uint32_t*>(memory + layout.before_factors() + i * layout.bytes_of_factors +
                                       p * kFactorBytes);
  }
  __device__ __forceinline__ uint32_t* factors_of_B(int i, int p) const {
    return reinterpret_cast<uint32_t*>(stage_B(i) + layout.bytes_of_B - layout.bytes_of_factors + p * kFactorBytes);
  }
  __device__ __forceinline__ uint32_t full(int i) const { return shared_address(shared.full + i); }
  __device__ __forceinline__ uint32_t done(int i) const { return shared_address(shared.done + i); }
  __device__ __forceinline__ uint32_t empty(int i) const { return shared_address(shared.empty + i); }
  __device__ __forceinline__ uint32_t full_A(int i) const { return shared_address(shared.full_A + i); }
  __device__ __forceinline__ uint32_t empty_A(int i) const { return shared_address(shared.empty_A + i); }
  __device__ __forceinline__ uint32_t given(int i) const { return shared_address(shared.given + i); }
  __device__ __forceinline__ uint32_t next_A(int i) const { return shared_address(shared.next_A + i); }
  __device__ __forceinline__ const Maps& maps_of(int segment) const {
    return launch.maps != nullptr ? launch.maps[segment] : launch.inline_maps[segment];
  }
};

// Who splits float32 lora_A into parts: the warp that loads it, or the groups, each the boxes that it always has.
template <typename Adapter, typename Epilogue>
constexpr bool kSplitsAhead = kWide<Adapter> && Epilogue::kAhead;
template <typename Adapter, typename Epilogue>
constexpr bool kGroupsSplit = kWide<Adapter> && !Epilogue::kAhead;
// Whether groups have no turns, and any group any box, so that each sees each box of lora_A come and go.
template <typename Adapter, typename Epilogue>
constexpr bool kAnyBox = Epilogue::kInPairs || kSplitsAhead<Adapter, Epilogue>;

// A position in a ring.
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int stages, int by = 1) {
    stage += by;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
};

}  // namespace hopper
}  // namespace lora_merge
