// The CPU backend: runs segment tables with all of torch's threads.
#pragma once
#include <string>
#include <vector>

#include "../segments.h"

namespace lora_merge::cpu {

// Executes every segment; whether all results of float16 that were computed are finite. `seed` is xored with each
// segment's key; only stochastic rounding looks at it.
bool launch(const Segment* segments, int64_t count, bool stochastic, uint64_t seed);

// Writes the squared norm of each row of source + scaling * B A, segment after segment.
void row_norms(const Segment* segments, int64_t count, double* out);

// Of each unit: where its escaped elements begin in the arena, -1 if it is not merged; and a checksum of what was
// written.
struct Record {
  int64_t place;
  uint64_t checksum;
};

// What brings weights back that were merged in place; docs/restore.md.
struct Journal {
  uint8_t* codes;  // two bits an element
  Record* records;
  uint8_t* arena;    // raw bits of escaped elements
  int64_t room;      // bytes of the arena
  int64_t mark;      // 0 or kSecondArena: added to places in this arena
  int64_t* counter;  // bytes of the arena asked for, those that units lack, units found changed
};
constexpr int64_t kArenaStep = 4;  // bytes; a unit's escaped elements begin at a multiple

// Writes the number of each segment's first unit, and of all units, to `first_unit`, [count + 1]; returns the bytes of
// the codes.
int64_t tracked_sizes(const Segment* segments, int64_t count, int64_t* first_unit);

// Merges in place every unit that is not merged and finds room in the arena; the others stay as they are.
void track(const Segment* segments, int64_t count, const Journal& journal);

// Puts back every bit of the units that have a place in this arena; but one that does not hold what was written stays
// as it is.
void untrack(const Segment* segments, int64_t count, const Journal& journal);

// `untrack` of another table of the same weights, with its arena (the other one), and `track` of what it put back,
// while that is in the caches. The two share codes and records.
void retrack(const Segment* segments, int64_t count, const Journal& journal, const Segment* before,
             const uint8_t* arena_before);

// The instruction sets that this machine can run, of "amx", "avx512_bf16", "avx512", "avx2", "neon" and "generic". The
// first one is used, or the one that LORA_MERGE_CPU_ISA names (read at the first launch), and the next one where Linux
// lets a process not use "amx". All but "amx" compute the same bits.
std::vector<std::string> isas();

}  // namespace lora_merge::cpu
