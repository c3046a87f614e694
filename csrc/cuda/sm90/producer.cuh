// The two producers of the merge kernel for compute capability 9 (sm90/merge.cuh): one warp takes units and loads tiles
// of W and lora_B, another loads lora_A.
#pragma once
#include "../copies.cuh"
#include "block.cuh"

namespace lora_merge {
namespace hopper {

// racecheck reports what one warp hands to others: a lane's access, `__syncwarp` and another lane's arrival at a
// barrier are a chain that it does not follow. (With one lane that writes, tests/support/sanitize.py was clean.) Such writes
// stand between marks like these two; tests/support/racecheck.py passes over reports of them, and of nothing else.
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

// The warp that loads tiles of W and lora_B. It also takes units, as late as it can: blocks do not run at one pace, and
// those that share rows should be at the same ones.
template <typename Adapter, typename Epilogue>
__device__ __forceinline__ void produce_tiles(const Block& b, const Epilogue& epilogue) {
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
    constexpr int kProducts = Epilogue::kProducts, kChunkBytes = chunk_bytes(kPlanes<Adapter>);
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
        const int64_t number = epilogue.number(s, row, col);
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
          barrier_arrive_expect(barrier, bytes + epilogue.bytes(boxes));
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
          epilogue.load(shared_address(b.stage_extra(ring.stage)), number, boxes, barrier);
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

// float32 lora_A of a unit, from column `col` on, becomes parts ahead of the products: by a warp, chunk by chunk, while
// the next one is under way. `ring`: of boxes in parts; `next`: of chunks that come.
template <int Products>
__device__ __forceinline__ void split_unit(const Block& b, const TensorMap* const (&lora_A)[Products], int col,
                                           Ring& ring, Ring& next) {
  const int lane = threadIdx.x % 32, chunks = b.layout.cols / kBoxCols * Products;
  Ring coming = next;
  const auto load = [&](int n) {
    if (lane == 0 && n < chunks) {
      const uint32_t barrier = b.next_A(coming.stage);
      barrier_arrive_expect(barrier, chunk_bytes(3));
      load_box(shared_address(b.next_lora_A(coming.stage)), lora_A[n % Products], col + n / Products * kBoxCols, 0,
               barrier);
    }
    coming.advance(kNext);
  };
  load(0);
#pragma unroll 1
  for (int n = 0; n < chunks; ++n, next.advance(kNext)) {
    const int at = ring.stage, p = n % Products;
    load(n + 1);
    if (p == 0) barrier_wait(b.empty_A(at), ring.parity ^ 1);
    barrier_wait(b.next_A(next.stage), next.parity);
    split_A<32>(b.lora_A(at) + p * 3 * kPartBytes, b.next_lora_A(next.stage));
    fence_async();
    __syncwarp();
    if (p + 1 < Products) continue;
    if (lane == 0) barrier_arrive(b.full_A(at));
    ring.advance(b.layout.held);
  }
}

// Another warp loads lora_A, box by box, as soon as a unit is given and there is room. Boxes follow each other round
// the ring: a group that waits for one has had its turn after that box was used which lay there before, or it would
// take the one for the other. Where a strip is one box, groups have whole tiles, and perhaps none of a unit: there each
// group sees each box come and go. float32 ones that groups split in front of their turns have a ring for each group;
// split ahead they go round in parts. (tests/support/hopper_roles.py is a model of all this.)
template <int Groups, typename Adapter, typename Epilogue>
__device__ __forceinline__ void produce_A(const Block& b) {
  constexpr int Products = Epilogue::kProducts;
  constexpr bool kAhead = kSplitsAhead<Adapter, Epilogue>;
  const int lane = threadIdx.x % 32;
  if (!kAhead && lane != 0) return;
  Ring rings[Groups];
  int acquired = -1;
  [[maybe_unused]] Ring next;
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
    if (b.launch.maps != nullptr && slot.number != acquired && lane == 0) {
#pragma unroll
      for (int p = 0; p < Products; ++p) acquire_map(lora_A[p]);
      acquired = slot.number;
    }
    [[maybe_unused]] const int chunks = (static_cast<int>(s.rank) + kChunk - 1) / kChunk;
    constexpr int kChunkBytes = chunk_bytes(kPlanes<Adapter>);
    if constexpr (kGroupsSplit<Adapter, Epilogue>) {
      static_assert(Products == 1);
      const int own = b.layout.held / Groups;
      for (int i = 0; i < b.layout.cols / kBoxCols; i += Groups)
#pragma unroll
        for (int g = 0; g < Groups; ++g) {
          const int at = g * own + rings[g].stage;
          barrier_wait(b.empty_A(at), rings[g].parity ^ 1);
          barrier_arrive_expect(b.full_A(at), kChunkBytes);
          load_box(shared_address(b.lora_A(at)), lora_A[0], slot.col + (i + g) * kBoxCols, 0, b.full_A(at));
          rings[g].advance(own);
        }
    } else if constexpr (kAhead) {
      split_unit<Products>(b, lora_A, slot.col, rings[0], next);
    } else {
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
          if (there)
            load_run(shared_address(b.factors_of_A(at, p)), factors[p] + factor_at(col), kFactorBytes, barrier);
        }
      }
    }
  }
}

}  // namespace hopper
}  // namespace lora_merge
