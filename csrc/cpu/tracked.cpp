// Tracked merges: units of work, and room in the arena for what escapes.
#include <atomic>
#include <cstring>

#include "launch.h"
#include "units.h"

namespace lora_merge::cpu {
namespace {

Cut track_cut(const Segment& s) {
  return {kTrackRows, kTrackBytes / ((s.dtypes & 0xff) == kFloat32 ? int64_t{sizeof(float)} : 2)};
}

int64_t code_bytes(const Segment& s) { return s.rows * round_up(s.cols, kernels().panel) / 4; }

// First byte of each segment's codes.
std::vector<int64_t> code_begin(const Segment* segments, int64_t count) {
  std::vector<int64_t> begin(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) begin[i + 1] = begin[i] + code_bytes(segments[i]);
  return begin;
}

// And of a unit's in its segment: units lie row by row of units.
int64_t codes_before(const Unit& unit) {
  return (unit.row * round_up(unit.segment->cols, kernels().panel) + unit.rows * unit.col) / 4;
}

}  // namespace

int64_t tracked_sizes(const Segment* segments, int64_t count, int64_t* first_unit) {
  first_unit[0] = 0;
  for (int64_t i = 0; i < count; ++i) first_unit[i + 1] = first_unit[i] + track_cut(segments[i]).units(segments[i]);
  return code_begin(segments, count)[count];
}

void track(const Segment* segments, int64_t count, const Journal& journal) {
  const Kernels& k = kernels();
  const std::vector<int64_t> begin = code_begin(segments, count);
  std::atomic<int64_t> taken(journal.counter[0]), lacking(journal.counter[1]);
  for_units<TrackScratch>(segments, count, track_cut, [&](int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    Record& record = journal.records[at];
    if (record.place >= 0) return;
    const int64_t bytes = k.track(unit, journal.codes + begin[i] + codes_before(unit), scratch);
    const int64_t reserved = round_up(bytes, kArenaStep), place = taken.fetch_add(reserved);
    if (place + reserved > journal.room) {
      lacking += reserved;
      return;
    }
    std::memcpy(journal.arena + place, scratch.escaped, bytes);
    record = {place, k.write(unit, scratch)};
  });
  journal.counter[0] = taken;
  journal.counter[1] = lacking;
}

void untrack(const Segment* segments, int64_t count, const Journal& journal) {
  const Kernels& k = kernels();
  const std::vector<int64_t> begin = code_begin(segments, count);
  std::atomic<int64_t> changed(0);
  for_units<TrackScratch>(segments, count, track_cut, [&](int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    Record& record = journal.records[at];
    if (record.place < 0) return;
    if (k.checksum(unit) != record.checksum) {
      ++changed;
      return;
    }
    k.untrack(unit, journal.codes + begin[i] + codes_before(unit), journal.arena + record.place, scratch);
    record.place = -1;
  });
  journal.counter[2] = changed;
}

}  // namespace lora_merge::cpu
