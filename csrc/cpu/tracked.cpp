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

namespace {

// The work on one unit; threads share the counts.
class Tracker {
 public:
  Tracker(const Segment* segments, int64_t count, const Journal& journal)
      : begin_(code_begin(segments, count)),
        journal_(journal),
        taken_(journal.counter[0]),
        lacking_(journal.counter[1]) {}

  // Merges unit `at`, of segment i, where there is room for what escapes.
  void merge(int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    const int64_t bytes = kernels_.track(unit, codes(i, unit), scratch);
    const int64_t reserved = round_up(bytes, kArenaStep), place = taken_.fetch_add(reserved);
    if (place + reserved > journal_.room) {
      lacking_ += reserved;
      return;
    }
    std::memcpy(journal_.arena + place, scratch.escaped, bytes);
    journal_.records[at] = {place + journal_.mark, kernels_.write(unit, scratch)};
  }

  // Brings it back, if it has a place in this arena and holds what was written. Returns whether it did.
  bool unmerge(int64_t at, int64_t i, const Unit& unit, const uint8_t* arena, int64_t mark, TrackScratch& scratch) {
    Record& record = journal_.records[at];
    if (record.place < 0 || (record.place & kSecondArena) != mark) return false;
    if (kernels_.checksum(unit) != record.checksum) {
      ++changed_;
      return false;
    }
    kernels_.untrack(unit, codes(i, unit), arena + (record.place - mark), scratch);
    record.place = -1;
    return true;
  }

  // What was counted.
  void close() const {
    journal_.counter[0] = taken_;
    journal_.counter[1] = lacking_;
    journal_.counter[2] = changed_;
  }

 private:
  uint8_t* codes(int64_t i, const Unit& unit) const { return journal_.codes + begin_[i] + codes_before(unit); }

  const Kernels& kernels_ = kernels();
  const std::vector<int64_t> begin_;
  const Journal& journal_;
  std::atomic<int64_t> taken_, lacking_, changed_{0};
};

}  // namespace

void track(const Segment* segments, int64_t count, const Journal& journal) {
  Tracker tracker(segments, count, journal);
  const auto work = [&](int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    if (journal.records[at].place < 0) tracker.merge(at, i, unit, scratch);
  };
  for_units<TrackScratch>(segments, count, track_cut, work);
  tracker.close();
}

void untrack(const Segment* segments, int64_t count, const Journal& journal) {
  Tracker tracker(segments, count, journal);
  const auto work = [&](int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    tracker.unmerge(at, i, unit, journal.arena, journal.mark, scratch);
  };
  for_units<TrackScratch>(segments, count, track_cut, work);
  tracker.close();
}

void retrack(const Segment* segments, int64_t count, const Journal& journal, const Segment* before,
             const uint8_t* arena_before) {
  Tracker tracker(segments, count, journal);
  const auto work = [&](int64_t at, int64_t i, const Unit& unit, TrackScratch& scratch) {
    Unit old = unit;
    old.segment = before + i;
    if (tracker.unmerge(at, i, old, arena_before, kSecondArena - journal.mark, scratch))
      tracker.merge(at, i, unit, scratch);
  };
  for_units<TrackScratch>(segments, count, track_cut, work);
  tracker.close();
}

}  // namespace lora_merge::cpu
