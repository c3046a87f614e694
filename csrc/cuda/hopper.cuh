// The merge kernel for compute capability 9: tiles by tensor maps both ways, wgmma, warps with roles.
//
// A block owns a multiprocessor. One warp asks for tiles of W and lora_B, one for lora_A, warpgroups multiply, add and
// round, two warps send results out. A tile is 64 rows of a strip.
//
//   units   a strip of 256 (or 128) columns and some rows, handed out by a counter.
//   W       global -> a stage in shared memory, several stages ahead, across units: boxes of 64 rows x 128 bytes, whose
//           16-byte vectors are swizzled (vector v of row r at v ^ r % 8).
//   lora_B  64 rows, all ranks, beside W in the stage: a box a chunk of 32 ranks.
//   lora_A  the strip's columns, all ranks, once a unit, ahead of it as W is: boxes of 64 columns. float32 ones are
//           split into three bf16 parts when their unit begins; pairs (parts.h) come with their factors.
//   wgmma   64 rows x 64 columns x 16 ranks; lora_B from registers, lora_A from shared memory. All ranks are summed in
//           the matrix unit; of float32 adapters, also as pairs, 32 of them, which are then added to the rest (round to
//           nearest).
//   out     the result takes W's place in the stage and goes out box by box.
//
// What becomes of a box once its products are there is a way's, the kernel's last argument:
//
//   kCopies          whether raw bits may ride along
//   kMany            whether it waits for latencies more than for memory
//   kProducts        1; or 2, of adapters of one rank: the table then has its segments twice, and the adapters of those
//                    behind come first
//   kBesideBox       bytes of a stage for each box, beside W and lora_B
//   number(s, r, c)  what the way calls the tile at row r and column c of segment s
//   bytes(boxes)     that `load(to, number, boxes, barrier)` copies there
//   Hand<T>          of a lane that multiplies: `read(box)` before the products, `meanwhile(box, read)` while the
//                    first of them are under way, `finish(box, read, sum)` after them; of two products,
//                    `begin(box, read, sum)` after the first and `finish` after the second
//
// Ranks are permuted as in merge.cuh, so that a lane reads eight adjacent ranks of lora_B, and the sums are those of
// merge.cuh, bit for bit: which of the two kernels runs a segment is free. Odd starts, strides and dtypes are left to
// that one, and float32 adapters of turned segments (lora_merge/kernels/cuda_hopper.py). W and the result are read and
// written as the matrix unit's fragments.
#pragma once
#include <cstddef>

#include "copies.cuh"
#include "hopper_box.cuh"
#include "hopper_products.cuh"
#include "tiles.cuh"

namespace lora_merge {
namespace hopper {

constexpr int kSlots = 8;  // of units: more than tiles in flight can belong to, and the next one
constexpr int kStoreWarps = 2;

// Warpgroups that multiply: two, or three for a way that waits for latencies more than for memory. With three, a box
// must take one turn, or a group without a box at the end would keep its turn: up to kManyRank (of all products). And
// a strip has four: of two, lora_A would be left while another group still reads it.
constexpr int kManyRank = kChunksOfTurn<3> * kChunk;
template <int Groups>
constexpr int kWarpsOfGroups = 4 * Groups;
template <int Groups>
constexpr int kBlock = 128 * (Groups + 1);

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
  uint64_t given[kSlots];
  Tile tiles[kMaxStages];
  Slot slots[kSlots];
  Before before[kMaxStages];
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
  __device__ __forceinline__ char* stage_beside(int i) const { return stage_B(i) + layout.bytes_of_B; }
  __device__ __forceinline__ char* lora_A(int i) const {
    return memory + layout.stages * layout.stage_bytes + i * layout.bytes_of_A;
  }
  __device__ __forceinline__ char* parts_of_A(int box) const {
    return memory + layout.before_parts() + box * layout.bytes_of_parts;
  }
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
  __device__ __forceinline__ const Maps& maps_of(int segment) const {
    return launch.maps != nullptr ? launch.maps[segment] : launch.inline_maps[segment];
  }
};

// A position in a ring.
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int stages, int by = 1) {
    stage += by;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
};

// ---- asking for tiles ----------------------------------------------------------------------------------------------

// racecheck reports what one warp hands to others: a lane's access, `__syncwarp` and another lane's arrival at a
// barrier are a chain that it does not follow. (With one lane that writes, tests/sanitize.py was clean.) Such writes
// stand between marks like these two; tests/racecheck.py passes over reports of them, and of nothing else.
// racecheck: begin words of a segment
// By a warp, a word a lane: tiles are asked for as late as this takes, and through one lane it takes some percent of a
// merge.
__device__ __forceinline__ void copy_words(Slot& to, const Segment& from) {
  static_assert(kSlotWords <= 32);
  const int lane = threadIdx.x % 32;
  if (lane < kSlotWords) to.word[lane] = reinterpret_cast<const int64_t*>(&from)[lane];
  __syncwarp();
}
// racecheck: end

// Whole rows come faster than strips of them: the blocks that share the rows of the next tiles each bring a run of
// these to the L2 cache.
__device__ __forceinline__ void bring_near(const Slot& slot, int row, int strip_cols) {
  const Segment& s = slot.segment();
  if (s.source_stride[0] != s.cols || s.cols % 8 != 0) return;
  const int rows = min(kTileRows, static_cast<int>(s.rows) - row), cols = static_cast<int>(s.cols);
  static_assert(static_cast<int64_t>(kTileRows) * kHopperCols <= int64_t{1} << 31, "`begin` is an int");
  const int begin = rows * slot.col, size = rows * min(strip_cols, cols - slot.col);  // as many elements as are its own
  prefetch_run(s.source + (static_cast<int64_t>(row) * cols + begin) * 2, size * 2);
}

// The warp that asks. It also takes units, as late as it can: blocks do not run at one pace, and those that share rows
// should be at the same ones.
template <typename Adapter, typename Way>
__device__ __forceinline__ void ask_for_tiles(const Block& b, const Way& way) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, total = launch.n_units + launch.n_raw_units, blocks = gridDim.x;
  int segment = -1, segment_end = 0;  // of the last unit taken; its segment's units end there
  // Unit number n of this block goes to its slot.
  const auto take = [&](int n, int unit) {
    Slot& slot = b.shared.slots[n % kSlots];
    if (unit < segment_end) {
      copy_words(slot, b.shared.slots[(n - 1) % kSlots].segment());
    } else {
      segment = unit < total ? segment_of(launch, unit) : 0;
      copy_words(slot, segments_of(launch)[segment]);
    }
    const Segment& s = slot.segment();
    const uint32_t local = static_cast<uint32_t>(unit - s.unit_begin), across = static_cast<uint32_t>(s.units_across);
    const int rows = static_cast<int>(s.rows), down = local / across, row = down * launch.rows_per_unit;
    const bool raw = unit >= launch.n_units;
    if (!raw && unit >= segment_end)
      segment_end = static_cast<int>(s.unit_begin + s.units_across * ((rows - 1) / launch.rows_per_unit + 1));
    if (lane == 0) {
      // racecheck: begin a unit
      slot.unit = unit;
      slot.number = segment;
      slot.row = raw ? 0 : row;
      slot.row_end = raw ? 1 : min(row + launch.rows_per_unit, rows);
      slot.col = (local - down * across) * layout.cols;
      // racecheck: end
      barrier_arrive(b.given(n % kSlots));
    }
    __syncwarp();
  };
  int unit = blockIdx.x, handed = 0, acquired = -1;
  take(0, unit);
  Ring ring;
  for (int n = 0; unit < total; ++n) {
    const Slot& slot = b.shared.slots[n % kSlots];
    const Slot& next = b.shared.slots[(n + 1) % kSlots];
    const Segment& s = slot.segment();
    const Maps& maps = b.maps_of(slot.number);
    const bool raw = unit >= launch.n_units;
    const int col = slot.col, row_end = slot.row_end;
    const int boxes = (min(layout.cols, static_cast<int>(s.cols) - col) + kBoxCols - 1) / kBoxCols;
    constexpr int kProducts = Way::kProducts, kChunkBytes = chunk_bytes(kPlanes<Adapter>);
    const int chunks = (static_cast<int>(s.rank) + kChunk - 1) / kChunk;
    const int bytes = boxes * kBoxBytes + kProducts * (chunks * kChunkBytes + (kPaired<Adapter> ? kFactorBytes : 0));
    const TensorMap* lora_B[kProducts];
    [[maybe_unused]] const uint32_t* factors[kProducts];
    Before before{};
#pragma unroll
    for (int p = 0; p < kProducts; ++p) {
      const int at = row_of<kProducts>(launch, slot.number, p);
      const Segment* const of = p + 1 == kProducts ? &s : segments_of(launch) + at;
      lora_B[p] = &b.maps_of(at).lora_B;
      if constexpr (kPaired<Adapter>) factors[p] = reinterpret_cast<const uint32_t*>(lora_merge::factors_of_B(*of));
      if (p + 1 < kProducts) before = {of, static_cast<float>(of->scaling)};
    }
    if (lane == 0 && !raw && launch.maps != nullptr && slot.number != acquired) {
      acquire_map(&maps.source);
#pragma unroll
      for (int p = 0; p < kProducts; ++p) acquire_map(lora_B[p]);
      acquire_map(&maps.destination);
      acquired = slot.number;
    }
    for (int row = slot.row; row < row_end; row += kTileRows) {
      const bool first = row == slot.row, last = row + kTileRows >= row_end;
      // The counter is asked a tile before the answer is needed.
      if (launch.counter != nullptr && lane == 0 && (row + 2 * kTileRows >= row_end && !last || first && last))
        handed = blocks + atomicAdd(launch.counter, 1);
      if (last) {
        unit = launch.counter != nullptr ? __shfl_sync(~0u, handed, 0) : unit + blocks;
        take(n + 1, unit);
      }
      barrier_wait(b.empty(ring.stage), ring.parity ^ 1);
      if (lane == 0) {
        const int64_t number = way.number(s, row, col);
        // racecheck: begin what is said of a tile
        b.shared.tiles[ring.stage] = Tile{&maps.destination,
                                          row,
                                          col,
                                          static_cast<int>(s.rows) - row,
                                          static_cast<int>(s.cols) - col,
                                          boxes,
                                          n % kSlots,
                                          first,
                                          last,
                                          raw ? kRaw : kMerge,
                                          static_cast<float>(s.scaling),
                                          number};
        if constexpr (kProducts == 2) b.shared.before[ring.stage] = before;
        // racecheck: end
        const uint32_t barrier = b.full(ring.stage);
        if (raw) {
          barrier_arrive(barrier);
        } else {
          barrier_arrive_expect(barrier, bytes + way.bytes(boxes));
          const uint32_t to = shared_address(b.stage(ring.stage)), to_B = shared_address(b.stage_B(ring.stage));
          for (int i = 0; i < boxes; ++i) load_box(to + i * kBoxBytes, &maps.source, col + i * kBoxCols, row, barrier);
#pragma unroll
          for (int p = 0; p < kProducts; ++p) {
            for (int i = 0; i < chunks; ++i) {
              const uint32_t at = to_B + (p * chunks + i) * kChunkBytes;
              if constexpr (kPaired<Adapter>) load_pairs(at, lora_B[p], i * kChunk, row, barrier);
              else load_box(at, lora_B[p], i * kChunk, row, barrier);
            }
            if constexpr (kPaired<Adapter>)
              load_run(shared_address(b.factors_of_B(ring.stage, p)), factors[p] + factor_at(row), kFactorBytes,
                       barrier);
          }
          way.load(shared_address(b.stage_beside(ring.stage)), number, boxes, barrier);
        }
        if (!last) bring_near(slot, row + kTileRows, layout.cols);
        else if (unit < launch.n_units) bring_near(next, next.row, layout.cols);
      }
      __syncwarp();
      ring.advance(layout.stages);
    }
  }
  // Both warps that store learn that there is no more.
  for (int i = 0; i < kStoreWarps; ++i) {
    barrier_wait(b.empty(ring.stage), ring.parity ^ 1);
    if (lane == 0) {
      b.shared.tiles[ring.stage].kind = kStop;
      barrier_arrive(b.full(ring.stage));
    }
    __syncwarp();
    ring.advance(layout.stages);
  }
  // The last block to finish leaves the counters as it found them.
  if (launch.counter != nullptr && lane == 0) {
    __threadfence();
    if (atomicAdd(launch.counter + 1, 1) == blocks - 1) launch.counter[0] = launch.counter[1] = 0;
  }
}

// Another warp asks for lora_A, box by box, as soon as a unit is given and there is room. Boxes follow each other round
// the ring: a group that waits for one has had its turn after that box was used which lay there before, or it would
// take the one for the other. Where a strip is one box, groups have whole tiles, and perhaps none of a unit: there each
// group sees each box come and go. float32 ones are split in front of the turns, so there each group has a ring of its
// own. (tests/hopper_roles.py is a model of all this.)
template <int Groups, typename Adapter, int Products>
__device__ __forceinline__ void ask_for_A(const Block& b) {
  if (threadIdx.x % 32 != 0) return;
  Ring rings[Groups];
  int acquired = -1;
  for (int n = 0;; ++n) {
    barrier_wait(b.given(n % kSlots), n / kSlots % 2);
    const Slot& slot = b.shared.slots[n % kSlots];
    if (slot.unit >= b.launch.n_units) break;  // copies come last
    const Segment& s = slot.segment();
    const TensorMap* lora_A[Products];
    [[maybe_unused]] const uint32_t* factors[Products];
#pragma unroll
    for (int p = 0; p < Products; ++p) {
      const int at = row_of<Products>(b.launch, slot.number, p);
      const Segment* const of = p + 1 == Products ? &s : segments_of(b.launch) + at;
      lora_A[p] = &b.maps_of(at).lora_A;
      if constexpr (kPaired<Adapter>) factors[p] = reinterpret_cast<const uint32_t*>(lora_merge::factors_of_A(*of));
    }
    if (b.launch.maps != nullptr && slot.number != acquired) {
#pragma unroll
      for (int p = 0; p < Products; ++p) acquire_map(lora_A[p]);
      acquired = slot.number;
    }
    const int chunks = (static_cast<int>(s.rank) + kChunk - 1) / kChunk;
    constexpr int kChunkBytes = chunk_bytes(kPlanes<Adapter>);
    if constexpr (kWide<Adapter>) {
      const int own = b.layout.held / Groups;
      for (int i = 0; i < b.layout.cols / kBoxCols; i += Groups)
#pragma unroll
        for (int g = 0; g < Groups; ++g) {
          if (i + g >= b.layout.cols / kBoxCols) break;
          const int col = slot.col + (i + g) * kBoxCols;
#pragma unroll
          for (int p = 0; p < Products; ++p)
            for (int c = 0; c < chunks; ++c, rings[g].advance(own)) {
              const int at = g * own + rings[g].stage;
              barrier_wait(b.empty_A(at), rings[g].parity ^ 1);
              barrier_arrive_expect(b.full_A(at), kChunkBytes);
              load_box(shared_address(b.lora_A(at)), lora_A[p], col, c * kChunk, b.full_A(at));
            }
        }
      continue;
    }
    Ring& ring = rings[0];
    for (int i = 0; i < b.layout.cols / kBoxCols; ++i, ring.advance(b.layout.held)) {
      const int col = slot.col + i * kBoxCols, at = ring.stage;
      const bool there = kPaired<Adapter> && col < s.cols;  // factors of these columns
      const uint32_t to = shared_address(b.lora_A(at)), barrier = b.full_A(at);
      barrier_wait(b.empty_A(at), ring.parity ^ 1);
      barrier_arrive_expect(barrier, Products * (chunks * kChunkBytes + (there ? kFactorBytes : 0)));
#pragma unroll
      for (int p = 0; p < Products; ++p) {
        for (int c = 0; c < chunks; ++c)
          load_ranks(to + (p * chunks + c) * kChunkBytes, lora_A[p], col, c * kChunk, barrier);
        if (there) load_run(shared_address(b.factors_of_A(at, p)), factors[p] + factor_at(col), kFactorBytes, barrier);
      }
    }
  }
}

// ---- sending results out -------------------------------------------------------------------------------------------

// Each of the warps that store takes every other tile: its boxes go out, and when they have left the stage, it is
// empty.
__device__ __forceinline__ void store_tiles(const Block& b, int which) {
  if (threadIdx.x % 32 != 0) return;
  Ring ring;
  for (int t = 0;; ++t, ring.advance(b.layout.stages)) {
    if (t % kStoreWarps != which) continue;
    barrier_wait(b.done(ring.stage), ring.parity);
    const Tile tile = b.shared.tiles[ring.stage];
    if (tile.kind == kStop) break;
    if (tile.kind == kMerge) {
      fence_async();  // of what the warps wrote there before they arrived
      const uint32_t from = shared_address(b.stage(ring.stage));
      for (int i = 0; i < tile.boxes; ++i) store_box(tile.out, tile.col + i * kBoxCols, tile.row, from + i * kBoxBytes);
      commit_stores();
      wait_stores_read();
    }
    barrier_arrive(b.empty(ring.stage));
  }
  wait_stores();
}

// ---- multiplying ---------------------------------------------------------------------------------------------------

// The parts of a box of float32 lora_A, by the group that has this box.
template <int Groups>
__device__ __forceinline__ void split_box(const Block& b, Ring& ring, int box, int chunks) {
  const int own = b.layout.held / Groups;
  group_meets();  // the last unit's are no longer read
#pragma unroll 1
  for (int c = 0; c < chunks; ++c, ring.advance(own)) {
    const int at = group_number() * own + ring.stage;
    barrier_wait(b.full_A(at), ring.parity);
    split_A(b.parts_of_A(box) + c * 3 * kPartBytes, b.lora_A(at));
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(b.empty_A(at));
  }
  fence_async();
  group_meets();
}

// The warpgroups that multiply, and finish their share of a tile's boxes in this way.
template <typename T, int Groups, typename Adapter, typename Way>
__device__ __forceinline__ void merge_tiles(const Block& b, const Way& way) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
  int fragment = (row - lane / 4 + lane % 8) * 128 + (lane / 8 ^ lane % 8) * 16;
  asm volatile("" : "+r"(fragment));  // or the compiler makes it anew for each box
  const int boxes = layout.cols / kBoxCols, group = uniform(threadIdx.x / 128);
  int next = group;  // box of this group: they go round the groups
  const bool alone = boxes == 1;
  typename Way::template Hand<T> hand(way);
  if (group == Groups - 1) pass_turn<Groups>();  // the first turn is the first group's
  int stops = 0;
  Ring ring_A;  // at the unit's first box
  for (Ring ring; stops < kStoreWarps; ring.advance(layout.stages)) {
    barrier_wait(b.full(ring.stage), ring.parity);
    const Tile& tile = b.shared.tiles[ring.stage];
    const int kind = tile.kind;
    if (kind == kMerge) {
      const Segment& s = b.shared.slots[tile.slot].segment();
      const int rank = uniform(s.rank), chunks = up_to_chunk(rank) / kChunk;
      const bool special = launch.stochastic || s.row_scale != 0;
      if (kPaired<Adapter> && alone && next > 0) {
        if (tile.first) barrier_wait(b.full_A(ring_A.stage), ring_A.parity);
        if (tile.last && lane == 0) barrier_arrive(b.empty_A(ring_A.stage));
      }
      [[maybe_unused]] Operand<Adapter> first_B;
      if constexpr (kWide<Adapter>) first_B.load(b.stage_B(ring.stage), 0, row);
#pragma unroll 1
      for (; next < boxes; next += Groups) {  // those without columns too: turns go round
        Ring at = ring_A;
        const char* lora_A = nullptr;
        if constexpr (kWide<Adapter>) {
          if (tile.first) split_box<Groups>(b, ring_A, next, Way::kProducts * chunks);
          lora_A = b.parts_of_A(next);
        } else {
          at.advance(layout.held, next);
          if (tile.first) barrier_wait(b.full_A(at.stage), at.parity);
          lora_A = b.lora_A(at.stage);
        }
        char* const W = b.stage(ring.stage) + next * kBoxBytes;
        Box box{launch,   s,       tile,        b.shared.before[ring.stage], W, b.stage_beside(ring.stage), next, row,
                fragment, special, tile.scaling};
        auto read = hand.read(box);
        const auto meanwhile = [&] { hand.meanwhile(box, read); };
        const MatrixA<Adapter> a(shared_address(lora_A));
        const char* const from_B = b.stage_B(ring.stage);
        const auto leave_A = [&] {
          if (kWide<Adapter> || !tile.last) return;
          __syncwarp();
          if (lane == 0) barrier_arrive(b.empty_A(at.stage));
        };
        if constexpr (kPlanes<Adapter> > 1) {
          float sum[32];
          // Of product p; the box's scaling is then that of its sums.
          const auto multiply = [&](int p, Operand<Adapter>& first, const Segment& of, float scaling,
                                    const auto& work) {
            if constexpr (kPaired<Adapter>)
              // A group of those that take whole tiles in turn may have one less: a tile is one turn, or the other group
              // would wait for its second one for ever.
              multiply_pairs<Groups, Way::kProducts == 1>(sum, from_B, row, a, p * chunks, chunks, !alone || p == 0,
                                     !alone || p + 1 == Way::kProducts, work);
            else multiply_all_wide<Groups>(sum, first, from_B, row, a, p * chunks, rank, work);
            box.scaling = scaling;
            if constexpr (kPaired<Adapter>) {
              const uint32_t *const rows = b.factors_of_B(ring.stage, p), *const cols = b.factors_of_A(at.stage, p);
              const float factor = common_factor(rows, cols, scaling);
              if (factor == 0) unscale(sum, box, of, rows, cols);
              else box.scaling = scaling * factor;
            }
          };
          if constexpr (Way::kProducts == 2) {
            multiply(0, first_B, *box.before.segment, box.before.scaling, meanwhile);
            hand.begin(box, read, sum);
            Operand<Adapter> second_B;
            if constexpr (kWide<Adapter>) second_B.load(from_B, chunks, row);
            multiply(1, second_B, s, tile.scaling, [] {});
          } else {
            multiply(0, first_B, s, tile.scaling, meanwhile);
          }
          leave_A();
          hand.finish(box, read, sum);
        } else {
          float sum[Way::kProducts][32];
          multiply_all_narrow<Groups, Adapter>(sum, from_B, row, a, chunks, meanwhile);
          leave_A();
          if constexpr (Way::kProducts == 2) {
            box.scaling = box.before.scaling;
            hand.begin(box, read, sum[0]);
            box.scaling = tile.scaling;
          }
          hand.finish(box, read, sum[Way::kProducts - 1]);
        }
      }
      next -= boxes;
      if (!kWide<Adapter> && tile.last) ring_A.advance(layout.held, boxes);
    } else if (Way::kCopies && kind == kRaw) {
      const Slot& slot = b.shared.slots[tile.slot];
      if (threadIdx.x < kThreads) copy_unit(slot.segment(), static_cast<int>(slot.unit));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(b.done(ring.stage));
    stops += kind == kStop;
  }
}

template <typename T, int Groups, typename Adapter, typename Way>
__global__ void __launch_bounds__(kBlock<Groups>, 1)
    merge_kernel(const __grid_constant__ HopperLaunch launch, const __grid_constant__ Layout layout,
                 const __grid_constant__ Way way) {
#ifdef LORA_MERGE_HOPPER
  constexpr int kWarps = kWarpsOfGroups<Groups>;
  extern __shared__ __align__(1024) char memory[];
  const Block b(launch, layout, memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < layout.stages; ++i) {
      barrier_init(b.full(i), 1);
      barrier_init(b.done(i), kWarps);
      barrier_init(b.empty(i), 1);
    }
    for (int i = 0; i < layout.held; ++i) {
      barrier_init(b.full_A(i), 1);
      barrier_init(b.empty_A(i), layout.cols == kBoxCols ? kWarps : 4);  // else of the group that read it last
    }
    for (int i = 0; i < kSlots; ++i) barrier_init(b.given(i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Groups == 2 ? 208 : 152));
    merge_tiles<T, Groups, Adapter>(b, way);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Groups == 2 ? 88 : 56));
    if (warp == kWarps) ask_for_tiles<Adapter>(b, way);
    else if (warp <= kWarps + kStoreWarps) store_tiles(b, warp - kWarps - 1);
    else ask_for_A<Groups, Adapter, Way::kProducts>(b);
  }
#else
  __trap();  // never launched: kernels/cuda.py asks for compute capability 9.0
#endif
}

template <typename T, int Groups, typename Adapter, typename Way>
int launch_groups(const Way& way, const HopperLaunch& launch, cudaStream_t stream) {
  static_assert(!kWide<Adapter> || Groups == 2, "`accepts` shares out held boxes of float32 lora_A to two groups");
  int device = 0, processors = 0, per_block = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const Tiles tiles{launch.strip_cols, launch.held, launch.stages};
  if (!accepts(tiles, launch.max_rank, kPlanes<Adapter>, Way::kBesideBox, per_block))
    return cudaErrorInvalidConfiguration;
  const Layout layout = layout_of(tiles, launch.max_rank, kPlanes<Adapter>, Way::kBesideBox);
  const auto kernel = merge_kernel<T, Groups, Adapter, Way>;
  error = allow_shared(kernel, layout.total());
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  kernel<<<static_cast<unsigned>(units < processors ? units : processors), kBlock<Groups>, layout.total(), stream>>>(
      launch, layout, way);
  return cudaGetLastError();
}

template <typename T, typename Adapter, typename Way>
int launch_adapters(const Way& way, const HopperLaunch& launch, cudaStream_t stream) {
  if constexpr (Way::kMany && kPlanes<Adapter> == 1)
    if (launch.max_rank <= kManyRank && launch.strip_cols == 4 * kBoxCols) return launch_groups<T, 3, Adapter>(way, launch, stream);
  return launch_groups<T, 2, Adapter>(way, launch, stream);
}

template <typename T, typename Way>
int launch_dtype(const Way& way, int adapters, const HopperLaunch& launch, cudaStream_t stream) {
  if (adapters == kPairs) return launch_adapters<T, Pair>(way, launch, stream);
  if (adapters == kFloat32) return launch_adapters<T, float>(way, launch, stream);
  if (adapters == kBFloat16) return launch_adapters<T, bf16>(way, launch, stream);
  if constexpr (std::is_same_v<T, __half>) return launch_adapters<T, __half>(way, launch, stream);
  return cudaErrorInvalidConfiguration;
}

// W is bf16 or fp16; products are of fp16 where W is.
template <typename Way>
int launch_in(const Way& way, int dtype, int adapters, const HopperLaunch& launch, void* stream) {
  const auto to = static_cast<cudaStream_t>(stream);
  return dtype == kBFloat16 ? launch_dtype<bf16>(way, adapters, launch, to)
                            : launch_dtype<__half>(way, adapters, launch, to);
}

}  // namespace hopper
}  // namespace lora_merge
