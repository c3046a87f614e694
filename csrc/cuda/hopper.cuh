// The merge kernel for compute capability 9: tiles by tensor maps both ways, wgmma, warps with roles.
//
// A block owns a multiprocessor. One warp asks for tiles of W and lora_B, warpgroups multiply, add and round, two warps
// send results out. A tile is 64 rows of a strip.
//
//   units   a strip of 256 (or 128) columns and many rows, handed out by a counter, three units ahead of their use, so
//           that a unit's segment has long arrived when it starts.
//   W       global -> a stage in shared memory, several stages ahead, across units: boxes of 64 rows x 128 bytes, whose
//           16-byte vectors are swizzled (vector v of row r at v ^ r % 8).
//   lora_B  64 rows, all ranks, beside W in the stage: a box a chunk of 32 ranks.
//   lora_A  the strip's columns, all ranks, in the matrix unit's own order, once a unit, by those who multiply.
//   wgmma   64 rows x 64 columns x 16 ranks; lora_B from registers, lora_A from shared memory. 32 ranks are summed in
//           the matrix unit and then added to the rest (round to nearest), as everywhere in this package.
//   out     the result takes W's place in the stage and goes out box by box.
//
// What becomes of a box once its products are there is a way's, the kernel's last argument:
//
//   kCopies          whether raw bits may ride along
//   kBesideBox       bytes of a stage for each box, beside W and lora_B
//   number(s, r, c)  what the way calls the tile at row r and column c of segment s
//   bytes(boxes)     that `load(to, number, boxes, barrier)` copies there
//   Hand<T>          of a lane that multiplies: `read(box)` before the products, `finish(box, read, sum)` after them
//
// Columns and ranks are permuted as in merge.cuh, so that a lane ends up with eight adjacent columns and reads eight
// adjacent ranks of lora_B, and the sums are those of merge.cuh, bit for bit: which of the two kernels runs a segment
// is free, and odd starts, strides and dtypes are left to that one (lora_merge/kernels/cuda.py).
#pragma once
#include "copies.cuh"
#include "hopper_products.cuh"
#include "tiles.cuh"

namespace lora_merge {
namespace hopper {

constexpr int kMaxStages = 8, kSlots = 16;  // slots of segments: more than units that tiles in flight can belong to
constexpr int kAhead = 3;                   // units that are handed out without the counter
constexpr int kStoreWarps = 2;
constexpr int kNear = 512;  // rows of a unit up to which blocks stay side by side

enum Kind : int { kMerge, kRaw, kStop };

// What the warp that asks tells the others about a tile.
struct Tile {
  const TensorMap* out;
  int row, col;    // of the segment
  int rows, cols;  // of the segment from there on
  int boxes;       // that hold columns
  int slot;        // where the segment lies
  int first;       // of a unit: lora_A is to be brought
  int kind;        // Kind
  int64_t number;  // the way's
};

struct Slot {
  Segment segment;
  int64_t unit;
};

struct Shared {
  uint64_t full[kMaxStages], done[kMaxStages], empty[kMaxStages];
  Tile tiles[kMaxStages];
  Slot slots[kSlots];
};

// Shared memory: the stages, lora_A, Shared. A stage: W, lora_B, what the way wants beside them.
struct Layout {
  int cols, stage_bytes, stages, bytes_of_A, bytes_of_B;
  __host__ __device__ int total() const {
    return stages * stage_bytes + bytes_of_A + static_cast<int>(sizeof(Shared)) + 1024;  // the start is rounded up
  }
};

// `beside`: bytes for each box.
template <bool Wide>
Layout layout_of(int max_rank, int cols, int stages, int beside) {
  const int chunks = (max_rank + kChunk - 1) / kChunk, boxes = cols / kBoxCols, of_B = chunks * box_bytes_of_B<Wide>();
  return {cols, (boxes * (kBoxBytes + beside) + of_B + 1023) & -1024, stages,
          chunks * kChunk * cols * 2 * (Wide ? 3 : 1), of_B};
}

struct Block {
  const HopperLaunch& launch;
  const Layout& layout;
  char* const memory;
  Shared& shared;
  __device__ __forceinline__ Block(const HopperLaunch& l, const Layout& y, char* m)
      : launch(l),
        layout(y),
        memory(m),
        shared(*reinterpret_cast<Shared*>(m + y.stages * y.stage_bytes + y.bytes_of_A)) {}
  __device__ __forceinline__ char* stage(int i) const { return memory + i * layout.stage_bytes; }
  __device__ __forceinline__ char* stage_B(int i) const { return stage(i) + layout.cols / kBoxCols * kBoxBytes; }
  __device__ __forceinline__ char* stage_beside(int i) const { return stage_B(i) + layout.bytes_of_B; }
  __device__ __forceinline__ char* lora_A() const { return memory + layout.stages * layout.stage_bytes; }
  __device__ __forceinline__ uint32_t full(int i) const { return shared_address(shared.full + i); }
  __device__ __forceinline__ uint32_t done(int i) const { return shared_address(shared.done + i); }
  __device__ __forceinline__ uint32_t empty(int i) const { return shared_address(shared.empty + i); }
};

// A position in the ring of stages.
struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// ---- asking for tiles ----------------------------------------------------------------------------------------------

// The warp that asks. It also hands out units: which one, in which segment, and that segment's words are three loads
// that depend on each other, so each is made a unit earlier than the next.
template <bool Wide, typename Way>
__device__ __forceinline__ void ask_for_tiles(const Block& b, const Way& way) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, total = launch.n_units + launch.n_raw_units, blocks = gridDim.x;
  const auto segment_number = [&](int unit) { return unit < total ? segment_of(launch, unit) : 0; };
  const auto word_of = [&](int segment) {
    return lane < 24 ? reinterpret_cast<const int64_t*>(segments_of(launch) + segment)[lane] : 0;
  };
  const auto put = [&](int n, int unit, int64_t word) {
    Slot& slot = b.shared.slots[n % kSlots];
    if (lane < 24) reinterpret_cast<int64_t*>(&slot.segment)[lane] = word;
    if (lane == 0) slot.unit = unit;
    __syncwarp();
  };
  int segment = segment_number(blockIdx.x), unit1 = blockIdx.x + blocks, unit2 = unit1 + blocks;  // of n, n + 1, n + 2
  int segment1 = segment_number(unit1);
  put(0, blockIdx.x, word_of(segment));
  Ring ring;
  for (int n = 0;; ++n) {
    const Slot& slot = b.shared.slots[n % kSlots];
    if (slot.unit >= total) break;
    const int64_t word1 = word_of(segment1);
    const int segment2 = segment_number(unit2);
    int unit3 = blockIdx.x + (n + kAhead) * blocks;
    if (launch.counter != nullptr && lane == 0) unit3 = kAhead * blocks + atomicAdd(launch.counter, 1);

    const Segment& s = slot.segment;
    const Maps& maps = launch.maps != nullptr ? launch.maps[segment] : launch.inline_maps[segment];
    const bool raw = slot.unit >= launch.n_units;
    const uint32_t local = static_cast<uint32_t>(slot.unit - s.unit_begin),
                   across = static_cast<uint32_t>(s.units_across);
    const int down = local / across, col = (local - down * across) * layout.cols;
    const int begin = down * launch.rows_per_unit, end = min(begin + launch.rows_per_unit, static_cast<int>(s.rows));
    const int boxes = (min(layout.cols, static_cast<int>(s.cols) - col) + kBoxCols - 1) / kBoxCols;
    const int chunks = (static_cast<int>(s.rank) + kChunk - 1) / kChunk;
    const int bytes = boxes * kBoxBytes + chunks * box_bytes_of_B<Wide>();
    if (lane == 0 && !raw && launch.maps != nullptr) {
      acquire_map(&maps.source);
      acquire_map(&maps.lora_B);
      acquire_map(&maps.destination);
    }
    // Whole rows come faster than strips of them: the blocks that share the next tile's rows each bring a run of these
    // to the L2 cache. Long units drift apart, and would bring what is not used yet.
    const int64_t row_bytes = s.cols * 2;
    const int share = col / layout.cols;
    const bool ahead = !raw && s.source_stride[0] == s.cols && s.cols % 8 == 0 && launch.rows_per_unit <= kNear;
    for (int row = begin; row < (raw ? begin + 1 : end); row += kTileRows) {
      barrier_wait(b.empty(ring.stage), ring.parity ^ 1);
      if (lane == 0) {
        const int64_t number = way.number(s, row, col);
        b.shared.tiles[ring.stage] = Tile{&maps.destination,
                                          row,
                                          col,
                                          static_cast<int>(s.rows) - row,
                                          static_cast<int>(s.cols) - col,
                                          boxes,
                                          n % kSlots,
                                          row == begin && chunks > 0,
                                          raw ? kRaw : kMerge,
                                          number};
        const uint32_t barrier = b.full(ring.stage);
        if (raw) {
          barrier_arrive(barrier);
        } else {
          barrier_arrive_expect(barrier, bytes + way.bytes(boxes));
          const uint32_t to = shared_address(b.stage(ring.stage)), to_B = shared_address(b.stage_B(ring.stage));
          for (int i = 0; i < boxes; ++i) load_box(to + i * kBoxBytes, &maps.source, col + i * kBoxCols, row, barrier);
          for (int i = 0; i < chunks; ++i)
            load_box(to_B + i * box_bytes_of_B<Wide>(), &maps.lora_B, i * kChunk, row, barrier);
          way.load(shared_address(b.stage_beside(ring.stage)), number, boxes, barrier);
        }
      }
      if (lane == 0 && ahead && row + kTileRows < end) {
        const int64_t band = row_bytes * min(kTileRows, end - row - kTileRows), begin_at = band * share / across & -128,
                      end_at = share + 1 == across ? band : band * (share + 1) / across & -128;
        prefetch_run(s.source + (row + kTileRows) * row_bytes + begin_at, static_cast<int>(end_at - begin_at));
      }
      __syncwarp();
      ring.advance(layout.stages);
    }
    unit3 = launch.counter != nullptr ? __shfl_sync(~0u, unit3, 0) : unit3;
    put(n + 1, unit1, word1);
    unit1 = unit2, segment = segment1, segment1 = segment2, unit2 = unit3;
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

// A box of a tile, as a lane that multiplies sees it: 16 elements of `row`, and as many of row + 8.
struct Box {
  const HopperLaunch& launch;
  const Segment& s;
  const Tile& tile;
  char *const W0, *const W1;  // in shared memory: this lane's two vectors of its row, 2 quad and 2 quad + 1
  const char* beside;         // of the tile
  int number, row;            // of the box in its strip; of the tile
  float scaling;
  bool special;  // rounded stochastically, or scaled by rows

  // The lane's first column, from the tile's on.
  __device__ __forceinline__ int col() const { return number * kBoxCols + threadIdx.x % 4 * 16; }
  // Vector i % 2 of row + 8 (i / 2).
  __device__ __forceinline__ uint4* vector_at(int i) const {
    return reinterpret_cast<uint4*>((i % 2 ? W1 : W0) + i / 2 * 1024);
  }
};

// The product of element k of vector i.
__device__ __forceinline__ float product_of(const float (&sum)[32], int i, int k) {
  return sum[4 * (4 * (i % 2) + k / 2) + 2 * (i / 2) + k % 2];
}

// The warpgroups that multiply, and finish their share of a tile's boxes in this way.
template <typename T, bool Wide, typename Way>
__device__ __forceinline__ void merge_tiles(const Block& b, const Way& way) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
  const int boxes = layout.cols / kBoxCols;
  int next = uniform(threadIdx.x / 128);  // box of this group: they go round the groups
  const int vector = lane % 4 * 2, place0 = row * 128 + (vector ^ (row % 8)) * 16,
            place1 = row * 128 + ((vector + 1) ^ (row % 8)) * 16;
  typename Way::template Hand<T> hand(way);
  if (threadIdx.x >= 128) asm volatile("bar.arrive 2, 256;" ::: "memory");  // the first turn is the first group's
  int stops = 0;
  for (Ring ring; stops < kStoreWarps; ring.advance(layout.stages)) {
    barrier_wait(b.full(ring.stage), ring.parity);
    const Tile& tile = b.shared.tiles[ring.stage];
    const int kind = tile.kind;
    if (kind == kMerge) {
      const Segment& s = b.shared.slots[tile.slot].segment;
      const int rank = uniform(s.rank);
      if (tile.first) {
        groups_meet();  // the last unit's lora_A is no longer read
        stage_A<Wide>(b.lora_A(), s, tile.col, layout.cols);
        fence_async();
        groups_meet();
      }
      const float scaling = static_cast<float>(s.scaling);
      const bool special = launch.stochastic || s.row_scale != 0;
#pragma unroll 1
      for (; next < boxes; next += kGroups) {  // those without columns too: turns go round
        char* const W = b.stage(ring.stage) + next * kBoxBytes;
        const Box box{launch, s, tile, W + place0, W + place1, b.stage_beside(ring.stage), next, row, scaling, special};
        auto read = hand.read(box);
        float sum[32];
        multiply<Wide>(sum, b.stage_B(ring.stage), row,
                       MatrixA(shared_address(b.lora_A()) + next * kBoxCols * 16, layout.cols, rank), rank);
        hand.finish(box, read, sum);
      }
      next -= boxes;
    } else if (Way::kCopies && kind == kRaw) {
      const Slot& slot = b.shared.slots[tile.slot];
      copy_unit(slot.segment, static_cast<int>(slot.unit));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(b.done(ring.stage));
    stops += kind == kStop;
  }
}

template <typename T, bool Wide, typename Way>
__global__ void __launch_bounds__(kBlock, 1)
    merge_kernel(const __grid_constant__ HopperLaunch launch, const __grid_constant__ Layout layout,
                 const __grid_constant__ Way way) {
#ifdef LORA_MERGE_HOPPER
  extern __shared__ char dynamic[];
  char* const memory = dynamic + (-shared_address(dynamic) & 1023);
  const Block b(launch, layout, memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < layout.stages; ++i) {
      barrier_init(b.full(i), 1);
      barrier_init(b.done(i), kWarpsOfGroups);
      barrier_init(b.empty(i), 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    fence_async();
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  // 168 registers a thread on average.
  if (warp < kWarpsOfGroups) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    merge_tiles<T, Wide>(b, way);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    if (warp == kWarpsOfGroups) ask_for_tiles<Wide>(b, way);
    else if (warp <= kWarpsOfGroups + kStoreWarps) store_tiles(b, warp - kWarpsOfGroups - 1);
  }
#else
  __trap();  // never launched: kernels/cuda.py asks for compute capability 9.0
#endif
}

template <typename T, bool Wide, typename Way>
int launch_in(const Way& way, const HopperLaunch& launch, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const Layout layout = layout_of<Wide>(launch.max_rank, launch.strip_cols, launch.deep, Way::kBesideBox);
  if (layout.stages < 2 || layout.stages > kMaxStages) return cudaErrorInvalidConfiguration;
  const auto kernel = merge_kernel<T, Wide, Way>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, layout.total());
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  kernel<<<static_cast<unsigned>(units < processors ? units : processors), kBlock, layout.total(), stream>>>(
      launch, layout, way);
  return cudaGetLastError();
}

// W is bf16 or fp16.
template <typename Way>
int launch_in(const Way& way, int dtype, bool wide, const HopperLaunch& launch, void* stream) {
  const auto to = static_cast<cudaStream_t>(stream);
  if (dtype == kBFloat16)
    return wide ? launch_in<bf16, true>(way, launch, to) : launch_in<bf16, false>(way, launch, to);
  return wide ? launch_in<__half, true>(way, launch, to) : launch_in<__half, false>(way, launch, to);
}

}  // namespace hopper
}  // namespace lora_merge
