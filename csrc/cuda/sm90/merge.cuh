// The merge kernel for compute capability 9: tiles by tensor maps both ways, wgmma, warps with roles.
//
// A block owns a multiprocessor. One warp loads tiles of W and lora_B, one loads lora_A (producer.cuh), warpgroups
// multiply, add and round, two warps store results. A tile is 64 rows of a strip.
//
//   units   a strip of 256 (or 128) columns and some rows, handed out by a counter.
//   W       global -> a stage in shared memory, several stages ahead, across units: boxes of 64 rows x 128 bytes, whose
//           16-byte vectors are swizzled (vector v of row r at v ^ r % 8).
//   lora_B  64 rows, all ranks, behind W in the stage: a box a chunk of 32 ranks.
//   lora_A  the strip's columns, all ranks, once a unit, ahead of it as W is: boxes of 64 columns. float32 ones are
//           split into three bf16 parts, ahead or when their unit begins; pairs (parts.h) come with their factors.
//   wgmma   64 rows x 64 columns x 16 ranks; lora_B from registers, lora_A from shared memory. All ranks are summed in
//           the matrix unit; of float32 adapters, also as pairs, 32 of them, which are then added to the rest (round to
//           nearest).
//   out     the result takes W's place in the stage and goes out box by box.
//
// The kernel's last argument, an epilogue, turns a box and its products into a result:
//
//   kCopies          whether raw bits may ride along
//   kMany            whether it waits for latencies more than for memory
//   kProducts        1; or 2, of adapters of one rank: the table then has its segments twice, and the adapters of those
//                    behind come first
//   kBoxesOut        boxes of W whose place a box of results takes, which has as many bytes as one; 0: nothing goes out
//   kAhead           whether lora_A of the next unit is brought as early as there is room for it, and float32 lora_A
//                    split ahead: for epilogues that take long for a box
//   kInPairs         whether a group has two boxes side by side (half of a strip of four), not every other one. Halves
//                    go round the groups, without turns: `ends_block(tile)` says whether the next tile's are for the
//                    next ones. `end_tile(block, stage, row, fragment, half)` follows the boxes, and says whether the
//                    stage stays with the group, which hands it on later
//   kExtraBox        bytes of a stage for each box, behind W and lora_B
//   number(s, r, c)  the epilogue's number of the tile at row r and column c of segment s
//   bytes(boxes)     that `load(to, number, boxes, barrier)` copies there
//   ConsumerOps<T>   of a lane that multiplies: `read(box)` before the products, `meanwhile(box, read)` while the
//                    first of them are under way, `finish(box, read, sum)` after them; of two products,
//                    `begin(box, read, sum)` after the first and `finish` after the second
//
// Ranks are permuted as in sm80/merge.cuh, so that a lane reads eight adjacent ranks of lora_B, and the sums are those
// of that file, bit for bit: which of the two kernels runs a segment is free. Odd starts, strides and dtypes are left to
// that one, and float32 adapters of turned segments (lora_merge/kernels/cuda/hopper.py). W and the result are read and
// written as the matrix unit's fragments.
#pragma once
#include "producer.cuh"

namespace lora_merge {
namespace hopper {

// ---- sending results out -------------------------------------------------------------------------------------------

// Each of the warps that store takes every other tile: its boxes go out, and when they have left the stage, it is
// empty.
template <int BoxesOut>
__device__ __forceinline__ void store_tiles(const Block& b, int which) {
  if (threadIdx.x % 32 != 0) return;
  Ring ring;
  for (int t = 0;; ++t, ring.advance(b.layout.stages)) {
    if (t % kStoreWarps != which) continue;
    barrier_wait(b.done(ring.stage), ring.parity);
    const Tile tile = b.shared.tiles[ring.stage];
    if (tile.kind == kStop) break;
    if (BoxesOut > 0 && tile.kind == kMerge) {
      fence_async();  // of what the warps wrote there before they arrived
      const uint32_t from = shared_address(b.stage(ring.stage));
      for (int i = 0; i < tile.boxes; i += BoxesOut)
        store_box(tile.out, tile.col + i * kBoxCols, tile.row, from + i * kBoxBytes);
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
__device__ __forceinline__ void split_box(const Block& b, Ring& ring, int box) {
  const int own = b.layout.held / Groups, at = group_number() * own + ring.stage;
  group_meets();  // the last unit's are no longer read
  barrier_wait(b.full_A(at), ring.parity);
  split_A<128>(b.parts_of_A(box), b.lora_A(at));
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(b.empty_A(at));
  ring.advance(own);
  fence_async();
  group_meets();
}

// The warpgroups that multiply, and finish their share of a tile's boxes.
template <typename T, int Groups, typename Adapter, typename Epilogue>
__device__ __forceinline__ void merge_tiles(const Block& b, const Epilogue& epilogue) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
  int fragment = (row - lane / 4 + lane % 8) * 128 + (lane / 8 ^ lane % 8) * 16;
  asm volatile("" : "+r"(fragment));  // or the compiler makes it anew for each box
  const int boxes = layout.cols / kBoxCols, group = uniform(threadIdx.x / 128);
  constexpr bool kAny = kAnyBox<Adapter, Epilogue>, kSplits = kGroupsSplit<Adapter, Epilogue>;
  // Halves of tiles take so little time that a look at each box's barrier shows (2.1 copies where it is 2.0).
  constexpr bool kAtOnce = Epilogue::kInPairs;
  constexpr int kStep = Epilogue::kInPairs ? 1 : Groups, kTurns = kAny ? 0 : Groups;
  int next = group;  // box of this group
  int end = boxes;
  [[maybe_unused]] int half = group;  // in pairs: which half of the tile's columns this group has; none from 2 on
  const bool alone = boxes == 1;
  typename Epilogue::template ConsumerOps<T> ops(epilogue);
  if (group == Groups - 1) pass_turn<kTurns>();  // the first turn is the first group's
  int stops = 0;
  bool keeps = false;  // a stage
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
      if constexpr (Epilogue::kInPairs) next = half < 2 ? 2 * half : boxes, end = half < 2 ? next + 2 : boxes;
      if (kAtOnce && tile.first) {
        Ring at = ring_A;
        for (int i = 0; i < boxes; ++i, at.advance(layout.held)) barrier_wait(b.full_A(at.stage), at.parity);
      }
      [[maybe_unused]] Operand<Adapter> first_B;
      if constexpr (kWide<Adapter>)
        if (next < end) first_B.load(b.stage_B(ring.stage), 0, row);
#pragma unroll 1
      for (; next < end; next += kStep) {  // those without columns too: turns go round
        Ring at = ring_A;
        const char* lora_A = nullptr;
        if constexpr (kSplits) {
          if (tile.first) split_box<Groups>(b, ring_A, next);
          lora_A = b.parts_of_A(next);
        } else {
          at.advance(layout.held, next);
          if (!kAtOnce && (kAny || tile.first)) barrier_wait(b.full_A(at.stage), at.parity);
          lora_A = b.lora_A(at.stage);
        }
        char* const W = b.stage(ring.stage) + next * kBoxBytes;
        Box box{launch,   s,       tile,        b.shared.before[ring.stage], W, b.stage_extra(ring.stage), next, row,
                fragment, special, tile.scaling};
        auto read = ops.read(box);
        const auto meanwhile = [&] { ops.meanwhile(box, read); };
        const MatrixA<Adapter> a(shared_address(lora_A));
        const char* const from_B = b.stage_B(ring.stage);
        const auto leave_A = [&] {
          if (kAny || kSplits || !tile.last) return;
          __syncwarp();
          if (lane == 0) barrier_arrive(b.empty_A(at.stage));
        };
        if constexpr (kPlanes<Adapter> > 1) {
          float sum[32];
          // Of product p; the box's scaling is then that of its sums.
          const auto multiply = [&](int p, Operand<Adapter>& first, const Segment& of, float scaling,
                                    const auto& work) {
            if constexpr (kPaired<Adapter>)
              // A group of those that take whole tiles in turn may have one less: a tile is one turn, or the other
              // group would wait for its second one for ever.
              multiply_pairs<kTurns, Epilogue::kProducts == 1 && Groups == 2>(
                  sum, from_B, row, a, p * chunks, chunks, !alone || p == 0, !alone || p + 1 == Epilogue::kProducts,
                  work);
            else multiply_wide<kTurns>(sum, first, a, p, rank, work);
            box.scaling = scaling;
            if constexpr (kPaired<Adapter>) {
              const uint32_t *const rows = b.factors_of_B(ring.stage, p), *const cols = b.factors_of_A(at.stage, p);
              const float factor = common_factor(rows, cols, scaling);
              if (factor == 0) unscale(sum, box, of, rows, cols);
              else box.scaling = scaling * factor;
            }
          };
          if constexpr (Epilogue::kProducts == 2) {
            multiply(0, first_B, *box.before.segment, box.before.scaling, meanwhile);
            ops.begin(box, read, sum);
            Operand<Adapter> second_B;
            if constexpr (kWide<Adapter>) second_B.load(from_B, 1, row);
            multiply(1, second_B, s, tile.scaling, [] {});
          } else {
            multiply(0, first_B, s, tile.scaling, meanwhile);
          }
          leave_A();
          ops.finish(box, read, sum);
        } else {
          float sum[Epilogue::kProducts][32];
          multiply_all_narrow<Groups, kTurns, Adapter>(sum, from_B, row, a, chunks, meanwhile);
          leave_A();
          if constexpr (Epilogue::kProducts == 2) {
            box.scaling = box.before.scaling;
            ops.begin(box, read, sum[0]);
            box.scaling = tile.scaling;
          }
          ops.finish(box, read, sum[Epilogue::kProducts - 1]);
        }
      }
      if constexpr (Epilogue::kInPairs) {
        const bool over = ops.ends_block(tile);
        keeps = half < 2 && ops.end_tile(b, ring.stage, row, fragment, half);
        if (over) half = half < 2 ? half + Groups - 2 : half - 2;
      } else {
        next -= boxes;
      }
      if (kAny && tile.last) {
        __syncwarp();
        Ring at = ring_A;
        for (int i = 0; lane == 0 && i < boxes; ++i, at.advance(layout.held)) {
          if (!kAtOnce) barrier_wait(b.full_A(at.stage), at.parity);
          barrier_arrive(b.empty_A(at.stage));
        }
      }
      if (!kSplits && tile.last) ring_A.advance(layout.held, boxes);
    } else if (Epilogue::kCopies && kind == kRaw) {
      const Slot& slot = b.shared.slots[tile.slot];
      if (threadIdx.x < kThreads) copy_unit(slot.segment(), static_cast<int>(slot.unit));
    }
    __syncwarp();
    if (lane == 0 && !keeps) barrier_arrive(b.done(ring.stage));
    stops += kind == kStop;
  }
}

template <typename T, int Groups, typename Adapter, typename Epilogue>
__global__ void __launch_bounds__(kBlock<Groups>, 1)
    merge_kernel(const __grid_constant__ HopperLaunch launch, const __grid_constant__ Layout layout,
                 const __grid_constant__ Epilogue epilogue) {
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
      // Of all groups, or of the one that read it last.
      const bool all = layout.cols == kBoxCols || kAnyBox<Adapter, Epilogue>;
      barrier_init(b.empty_A(i), all ? kWarps : 4);
    }
    for (int i = 0; i < kSlots; ++i) barrier_init(b.given(i), 1);
    for (int i = 0; i < kNext; ++i) barrier_init(b.next_A(i), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kWarps) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters<Groups>[0]));
    merge_tiles<T, Groups, Adapter>(b, epilogue);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters<Groups>[1]));
    if (warp == kWarps) produce_tiles<Adapter>(b, epilogue);
    else if (warp <= kWarps + kStoreWarps) store_tiles<Epilogue::kBoxesOut>(b, warp - kWarps - 1);
    else produce_A<Groups, Adapter, Epilogue>(b);
  }
#else
  __trap();  // never launched: kernels/cuda/backend.py asks for compute capability 9.0
#endif
}

template <typename T, int Groups, typename Adapter, typename Epilogue>
int launch_groups(const Epilogue& epilogue, const HopperLaunch& launch, cudaStream_t stream) {
  static_assert(!kGroupsSplit<Adapter, Epilogue> || Groups == 2,
                "`accepts` shares out held boxes of float32 lora_A to two");
  int device = 0, processors = 0, per_block = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const Tiles tiles{launch.strip_cols, launch.held, launch.stages};
  if (!accepts(tiles, launch.max_rank, kPlanes<Adapter>, Epilogue::kExtraBox, Epilogue::kAhead, per_block) ||
      (kWide<Adapter> && launch.max_rank > Epilogue::kProducts * kChunk))
    return cudaErrorInvalidConfiguration;
  const Layout layout = layout_of(tiles, launch.max_rank, kPlanes<Adapter>, Epilogue::kExtraBox, Epilogue::kAhead);
  const auto kernel = merge_kernel<T, Groups, Adapter, Epilogue>;
  error = allow_shared(kernel, layout.total());
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  kernel<<<static_cast<unsigned>(units < processors ? units : processors), kBlock<Groups>, layout.total(), stream>>>(
      launch, layout, epilogue);
  return cudaGetLastError();
}

template <typename T, typename Adapter, typename Epilogue>
int launch_adapters(const Epilogue& epilogue, const HopperLaunch& launch, cudaStream_t stream) {
  if constexpr (kAnyBox<Adapter,
                        Epilogue>) {  // as many as there are registers for: products of parts have several sums
    return launch_groups<T, kPlanes<Adapter> == 1 ? 4 : 3, Adapter>(epilogue, launch, stream);
  } else {
    if constexpr (Epilogue::kMany && kPlanes<Adapter> == 1)
      if (launch.max_rank <= kManyRank && launch.strip_cols == 4 * kBoxCols)
        return launch_groups<T, 3, Adapter>(epilogue, launch, stream);
    return launch_groups<T, 2, Adapter>(epilogue, launch, stream);
  }
}

// W is bf16 or fp16; products are of fp16 where W is.
template <typename Epilogue>
int launch_in(const Epilogue& epilogue, int dtype, int adapters, const HopperLaunch& launch, void* stream) {
  const auto run = [&](auto w) {
    using T = decltype(w);
    return with_adapters<T, T>(adapters, [&](auto adapter) {
      return launch_adapters<T, decltype(adapter)>(epilogue, launch, static_cast<cudaStream_t>(stream));
    });
  };
  return dtype == kBFloat16 ? run(bf16{}) : run(__half{});
}

}  // namespace hopper
}  // namespace lora_merge
