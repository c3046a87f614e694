// Entry point of the tracked merge: in place, with a way back in two bits an element, and that way.
#pragma once
#include "launch.h"

namespace lora_merge {

constexpr int kTileElements = 4096;  // of a tile: a step of all warps of a block; one place and 1 KiB of codes

// What brings weights back that were merged in place; docs/restore.md. Segments hold the number of their first tile as
// their `key`; tiles go along the columns first.
struct TrackedJournal {
  uint32_t* codes;              // of each tile, one word a thread: 8 codes of one row, then 8 of the next
  int64_t* places;              // of each tile: where its escaped elements begin in the arena; -1: it is not merged
  unsigned long long* sums;     // of each tile: a checksum of what was written
  char* arena;                  // raw bits of escaped elements
  int64_t room;                 // bytes of the arena
  unsigned long long* counter;  // bytes of the arena asked for, those that it had no room for, tiles found changed
};

// Merges every tile that has no place and finds room, or (undo) brings back every tile that has one; but a tile that does
// not hold what was written stays as it is, and keeps its place. Segments of one dtype, in place. Returns a cudaError_t; `stream` is a cudaStream_t of the current device.
int launch_tracked(int dtype, bool wide, bool undo, const Launch& launch, const TrackedJournal& journal, void* stream);

}  // namespace lora_merge
