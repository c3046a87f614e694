// Tracked merges on compute capability 9: the kernel of sm90/merge.cuh, which loads the journal's tiles with those of
// W.
//
// A unit of the journal is what a warp has of a box of 64 x 64: 16 rows. A half is what a lane has of a row. Boxes of
// a segment are numbered along the columns first, so that codes and records of a tile are a run in memory each, and
// come with its W.
#include "merge.cuh"
#include "../tracked.cuh"

namespace lora_merge {
namespace {

constexpr int kUnitsOfBox = kTileRows * kBoxCols / kUnitElements;
constexpr int kCodesOfBox = kUnitsOfBox * kCodeBytes, kRecordsOfBox = kUnitsOfBox * kRecordBytes;

// What a warp finds of a unit.
template <typename T>
struct Read {
  Coded<T> half[kHalves];
  int64_t unit, place;  // `place` of its escapes
  uint32_t checksum;
  Raw<T> early;  // escape number `lane`, asked for before it is known whether there is one
  bool work;
  bool changed;      // others wrote it
  uint32_t escapes;  // of this lane, and how many there are in the lanes before it
  int before;
};

// kTrackMerge, kTrackUnmerge, or both at once.
template <int Turn>
struct Track {
  static constexpr bool kThere = Turn != kTrackUnmerge, kBack = Turn != kTrackMerge;
  static constexpr int kExtraBox = kCodesOfBox + kRecordsOfBox, kProducts = kThere && kBack ? 2 : 1;
  static constexpr int kBoxesOut = 1;
  static constexpr bool kCopies = false, kMany = true, kAhead = true, kInPairs = false;
  TrackedJournal journal;

  // Of the tile's first box.
  __device__ __forceinline__ int64_t number(const Segment& s, int row, int col) const {
    const int across = (static_cast<int>(s.cols) + kBoxCols - 1) / kBoxCols;
    return static_cast<int64_t>(s.key) + static_cast<int64_t>(row / kTileRows) * across + col / kBoxCols;
  }
  __device__ __forceinline__ int bytes(int boxes) const { return boxes * (kBack ? kExtraBox : kRecordsOfBox); }
  // Records, and behind them codes.
  __device__ __forceinline__ void load(uint32_t to, int64_t box, int boxes, uint32_t barrier) const {
    hopper::load_run(to, journal.records + box * kUnitsOfBox, boxes * kRecordsOfBox, barrier);
    if (kBack)
      hopper::load_run(to + boxes * kRecordsOfBox, reinterpret_cast<const char*>(journal.codes) + box * kCodesOfBox,
                       boxes * kCodesOfBox, barrier);
  }

  template <typename T>
  struct ConsumerOps {
    const TrackedJournal& journal;
    Room room{journal};
    __device__ __forceinline__ explicit ConsumerOps(const Track& epilogue) : journal(epilogue.journal) {}
    __device__ __forceinline__ ~ConsumerOps() {
      if (kThere && threadIdx.x % 32 == 0 && room.missing > 0)
        atomicAdd(journal.counter + 1, static_cast<unsigned long long>(room.missing));
    }

    // Of a box without columns it is anything, and no work.
    __device__ __forceinline__ Read<T> read(const hopper::Box& box) const {
      const int lane = threadIdx.x % 32, place = box.number * kUnitsOfBox + threadIdx.x / 32 % kUnitsOfBox;
      const TrackedRecord& record = reinterpret_cast<const TrackedRecord*>(box.extra)[place];
      Read<T> read;
      read.unit = box.tile.number * kUnitsOfBox + place;
      read.checksum = static_cast<uint32_t>(record.checksum);
      read.work = box.number < box.tile.boxes && (kBack ? in_arena(journal.from, record.place) : record.place < 0);
      read.half[0].code = read.half[1].code = 0;
      if (kBack) {
        read.place = offset_in(journal.from, record.place);
        const char* const codes = box.extra + box.tile.boxes * kRecordsOfBox;
        const uint2 code = reinterpret_cast<const uint2*>(codes)[place * 32 + lane];
        read.half[0].code = code.x, read.half[1].code = code.y;
        read.early = {};
        if (read.work && read.place + (lane + 1) * static_cast<int>(sizeof(T)) <= journal.from.room)
          read.early = __ldcs(reinterpret_cast<const Raw<T>*>(journal.from.begin + read.place) + lane);
      }
      return read;
    }

    // The way back knows from the start what W' and the codes are.
    __device__ __forceinline__ void meanwhile(const hopper::Box& box, Read<T>& read) const {
      if (!kBack || !read.work) return;
      uint32_t checksum = 0;
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        Half<T> half;
#pragma unroll
        for (int e = 0; e < 2; ++e) box.load(2 * j + e, half.word[e]);
        add_to(checksum, half, j);
      }
      read.changed = checksum_of(checksum) != read.checksum;
      read.escapes = escapes_of(read.half[0].code, read.half[1].code);
      read.before = Escapes(read.escapes).before;
    }

    // Of two products the first: the way back.
    __device__ __forceinline__ void begin(const hopper::Box& box, Read<T>& read, const float (&sum)[32]) const {
      back(box, read, sum, *box.before.segment);
      read.work = read.work && !read.changed;
      read.half[0].code = read.half[1].code = 0;
      __syncwarp();  // what the other lanes repaired
    }

    __device__ __forceinline__ void finish(const hopper::Box& box, Read<T>& read, const float (&sum)[32]) {
      if constexpr (kThere) there(box, read, sum);
      else back(box, read, sum, box.s);
    }

   private:
    // W' or W and what becomes of it.
    template <bool Undo>
    __device__ __forceinline__ void convert_half(const hopper::Box& box, Coded<T>& x, int j, const float (&sum)[32],
                                                 const Segment& s) const {
#pragma unroll
      for (int e = 0; e < 2; ++e) box.load(2 * j + e, x.half.word[e]);
      const int row = box.row + 8 * j;
      convert<T, Undo>(
          x, [&](int e, int k) { return hopper::product_of(sum, 2 * j + e, k); }, box.scaling, true, box.special,
          [&](int) {
            const float* const scale = reinterpret_cast<const float*>(s.row_scale);
            return row < box.tile.rows ? __ldg(scale + box.tile.row + row) : 1.0f;
          });
    }

    __device__ __forceinline__ void write(const hopper::Box& box, const Read<T>& read) const {
      __syncwarp();  // fragments are written by other lanes than those that hold them
#pragma unroll
      for (int i = 0; i < 4; ++i) box.store(i, read.half[i / 2].half.word[i % 2]);
      __syncwarp();
    }

    // Brings a unit back; nothing, if it stays as it is: then what was read is written.
    __device__ __forceinline__ void back(const hopper::Box& box, Read<T>& read, const float (&sum)[32],
                                         const Segment& s) const {
      if (!read.work) return;
      const int lane = threadIdx.x % 32;
#pragma unroll
      for (int j = 0; j < kHalves; ++j) convert_half<true>(box, read.half[j], j, sum, s);
      if (read.changed) {
        if (lane == 0) atomicAdd(journal.counter + 2, 1ull);
        return;
      }
      const int first_pair = box.first_pair();
      write(box, read);
      const Raw<T>* const escaped = reinterpret_cast<const Raw<T>*>(journal.from.begin + read.place);
      Raw<T> raw{};
      const auto fetch = [&](int place) {
        raw = static_cast<Raw<T>>(__shfl_sync(~0u, static_cast<uint32_t>(read.early), place & 31));
      };
      for_escapes(read.escapes, read.before, fetch, [&](int j, int at, int number) {
        repair<T>(box.element(first_pair, j, at % 8, at / 8), at < 8, number < 32 ? raw : __ldcs(escaped + number));
      });
      if (lane == 0) journal.records[read.unit].place = -1;
    }

    // Merges one; the same where there is no room for what escapes.
    __device__ __forceinline__ void there(const hopper::Box& box, Read<T>& read, const float (&sum)[32]) {
      if (!read.work) return;
      const int lane = threadIdx.x % 32;
      const bool whole = box.tile.rows >= kTileRows && box.tile.cols >= (box.number + 1) * kBoxCols;
      uint32_t checksum = 0;
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        Coded<T>& x = read.half[j];
        convert_half<false>(box, x, j, sum, box.s);
        if (!whole) {
          const int there = box.row + 8 * j < box.tile.rows ? box.tile.cols - box.col(2 * j) : 0;
          x = cut(x, there, there - 32, 8);
        }
        add_to(checksum, x.half, j);
      }
      const int first_pair = box.first_pair();
      checksum = checksum_of(checksum);
      const uint32_t escapes = escapes_of(read.half[0].code, read.half[1].code);
      const Escapes found(escapes);
      const int64_t place = room.take(found.count * static_cast<int>(sizeof(T)));
      if (place < 0) return;
      Raw<T>* const escaped = reinterpret_cast<Raw<T>*>(journal.to.begin + place);
      const auto keep = [&](int j, int at, int number) {
        escaped[number] = *reinterpret_cast<const Raw<T>*>(box.element(first_pair, j, at % 8, at / 8));
      };
      for_escapes(escapes, found.before, [](int) {}, keep);
      write(box, read);
      __stcs(reinterpret_cast<uint2*>(journal.codes) + read.unit * 32 + lane,
             make_uint2(read.half[0].code, read.half[1].code));
      if (lane == 0) store_record(journal.records + read.unit, {place + journal.to.mark, checksum});
    }
  };
};

}  // namespace

int launch_hopper_tracked(int dtype, int adapters, int way, const HopperLaunch& launch, const TrackedJournal& journal,
                          void* stream) {
  const auto run = [&](auto track) { return hopper::launch_in(track, dtype, adapters, launch, stream); };
  switch (way) {
    case kTrackMerge: return run(Track<kTrackMerge>{journal});
    case kTrackUnmerge: return run(Track<kTrackUnmerge>{journal});
    default: return run(Track<kTrackRemerge>{journal});
  }
}

}  // namespace lora_merge
