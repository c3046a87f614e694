// Entry point of the tracked merge: in place, with a way back in two bits an element, and that way.
#pragma once
#include "launch.h"

namespace lora_merge {

// Of each unit, 1024 elements of a warp: where its escaped elements begin in the arena, -1 if it is not merged; and a
// checksum of what was written.
struct TrackedRecord {
  int64_t place;
  unsigned long long checksum;
};
static_assert(sizeof(TrackedRecord) == kRecordBytes);

// Raw bits of escaped elements.
struct TrackedArena {
  char* begin;
  int64_t room;  // bytes
  int64_t mark;  // 0 or kSecondArena: added to places in it
};

// What brings weights back that were merged in place; docs/restore.md. A tile is a unit of each warp of a block, side
// by side as their strips are. Segments hold the number of their first tile as their `key`; tiles go along the columns
// first.
struct TrackedJournal {
  uint32_t* codes;  // of each unit, two words a lane, one a half
  TrackedRecord* records;
  TrackedArena from, to;        // where escapes are read (way back) and written (way there)
  unsigned long long* counter;  // bytes of the arena asked for, those that units lack, units found changed
  int32_t chunk;                // bytes of the arena that a warp asks for at a time; 0: what a unit needs
};

// kTrackMerge merges every unit that has no place and finds room, kTrackUnmerge brings back every unit that has one in
// this arena; but one that does not hold what was written stays as it is, and keeps its place. kTrackRemerge is both:
// the table then has its segments twice, as they are merged, and behind them all as they were; a unit that finds no
// room stays what it was brought back to. Segments of one dtype, in place. Returns a cudaError_t; `stream` is a
// cudaStream_t of the current device. `launch_hopper_tracked`: by the kernel for compute capability 9; a segment's
// `key` is then the number of its first box of 64 x 64, of which each is four units.
int launch_tracked(int dtype, int adapters, int way, const Launch& launch, const TrackedJournal& journal, void* stream);
int launch_hopper_tracked(int dtype, int adapters, int way, const HopperLaunch& launch, const TrackedJournal& journal,
                          void* stream);

}  // namespace lora_merge
