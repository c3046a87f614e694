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
// Columns and ranks are permuted as in merge.cuh, so that a lane ends up with eight adjacent columns and reads eight
// adjacent ranks of lora_B, and the sums are those of merge.cuh, bit for bit: which of the two kernels runs a segment is
// free, and odd starts, strides and dtypes are left to that one (lora_merge/kernels/cuda.py).
#pragma once
#ifndef X_ATONCE
#define X_ATONCE 4
#endif
#ifndef X_IN
#define X_IN evict_first
#endif
#ifndef X_OUT
#define X_OUT evict_first
#endif
#include "adapters.cuh"
#include "copies.cuh"
#include "hopper_device.cuh"
#include "tiles.cuh"

namespace lora_merge {
namespace hopper {

constexpr int kTileRows = 64, kBoxCols = 64, kBoxBytes = kTileRows * 128;
constexpr int kGroups = 2, kWarpsOfGroups = 4 * kGroups;  // warpgroups that multiply
constexpr int kBlock = 128 * (kGroups + 1);
static_assert(128 * kGroups == kThreads, "copies of raw bits take as many threads");
constexpr int kMaxStages = 8, kSlots = 16;  // slots of segments: more than units that tiles in flight can belong to
constexpr int kAhead = 3;                   // units that are handed out without the counter
constexpr int kStoreWarps = 2;

template <bool Wide>
__host__ __device__ constexpr int box_bytes_of_B() { return kTileRows * kChunk * (Wide ? 4 : 2); }

enum Kind : int { kMerge, kRaw, kStop };

// What the warp that asks tells the others about a tile.
struct Tile {
  const TensorMap* out;
  int row, col, boxes;  // of the segment; boxes that hold columns
  int slot;             // where the segment lies
  int first;            // of a unit: lora_A is to be brought
  int kind;             // Kind
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

// Shared memory: the stages, lora_A, Shared.
struct Layout {
  int cols, stage_bytes, stages, bytes_of_A;
  __host__ __device__ int total() const {
    return stages * stage_bytes + bytes_of_A + static_cast<int>(sizeof(Shared)) + 1024;  // the start is rounded up
  }
};

template <bool Wide>
Layout layout_of(int max_rank, int cols, int stages) {
  const int chunks = (max_rank + kChunk - 1) / kChunk;
  return {cols, cols / kBoxCols * kBoxBytes + chunks * box_bytes_of_B<Wide>(), stages,
          chunks * kChunk * cols * 2 * (Wide ? 3 : 1)};
}

struct Block {
  const HopperLaunch& launch;
  const Layout& layout;
  char* const memory;
  Shared& shared;
  __device__ __forceinline__ Block(const HopperLaunch& l, const Layout& y, char* m)
      : launch(l), layout(y), memory(m), shared(*reinterpret_cast<Shared*>(m + y.stages * y.stage_bytes + y.bytes_of_A)) {}
  __device__ __forceinline__ char* stage(int i) const { return memory + i * layout.stage_bytes; }
  __device__ __forceinline__ char* stage_B(int i) const { return stage(i) + layout.cols / kBoxCols * kBoxBytes; }
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

// ---- asking for tiles ------------------------------------------------------------------------------------------------

// The warp that asks. It also hands out units: which one, in which segment, and that segment's words are three loads
// that depend on each other, so each is made a unit earlier than the next.
template <bool Wide>
__device__ __forceinline__ void ask_for_tiles(const Block& b) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, total = launch.n_units + launch.n_raw_units, blocks = gridDim.x;
  const uint64_t once = X_IN(), often = evict_normal();
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
    const uint32_t local = static_cast<uint32_t>(slot.unit - s.unit_begin), across = static_cast<uint32_t>(s.units_across);
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
    for (int row = begin; row < (raw ? begin + 1 : end); row += kTileRows) {
      barrier_wait(b.empty(ring.stage), ring.parity ^ 1);
      if (lane == 0) {
        b.shared.tiles[ring.stage] =
            Tile{&maps.destination, row, col, boxes, n % kSlots, row == begin && chunks > 0, raw ? kRaw : kMerge};
        const uint32_t barrier = b.full(ring.stage);
        if (raw) {
          barrier_arrive(barrier);
        } else {
          barrier_arrive_expect(barrier, bytes);
          const uint32_t to = shared_address(b.stage(ring.stage)), to_B = shared_address(b.stage_B(ring.stage));
          for (int i = 0; i < boxes; ++i)
            load_box(to + i * kBoxBytes, &maps.source, col + i * kBoxCols, row, barrier, once);
          for (int i = 0; i < chunks; ++i)
            load_box(to_B + i * box_bytes_of_B<Wide>(), &maps.lora_B, i * kChunk, row, barrier, often);
        }
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

// ---- sending results out ---------------------------------------------------------------------------------------------

// Each of the warps that store takes every other tile: its boxes go out, and when they have left the stage, it is empty.
__device__ __forceinline__ void store_tiles(const Block& b, int which) {
  const uint64_t once = X_OUT();
  if (threadIdx.x % 32 != 0) return;
  Ring ring;
  for (int t = 0;; ++t, ring.advance(b.layout.stages)) {
    if (t % kStoreWarps != which) continue;
    barrier_wait(b.done(ring.stage), ring.parity);
    const Tile tile = b.shared.tiles[ring.stage];
    if (tile.kind == kStop) break;
    if (tile.kind == kMerge) {
      const uint32_t from = shared_address(b.stage(ring.stage));
      for (int i = 0; i < tile.boxes; ++i)
        store_box(tile.out, tile.col + i * kBoxCols, tile.row, from + i * kBoxBytes, once);
      commit_stores();
      wait_stores_read();
    }
    barrier_arrive(b.empty(ring.stage));
  }
  wait_stores();
}

// ---- multiplying -----------------------------------------------------------------------------------------------------

// A value that all lanes of a warp have: the compiler then keeps it where the matrix unit's arguments are.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

__device__ __forceinline__ void groups_meet() { asm volatile("bar.sync 1, %0;" ::"n"(128 * kGroups) : "memory"); }

// 16 adjacent columns of one rank of lora_A, as bf16 pairs, or as floats where Wide.
template <bool Wide>
struct Row16 {
  uint32_t word[Wide ? 16 : 8];
};

// Element by element: any strides, dtypes and edges. A call, as it is rare.
template <bool Wide>
__device__ __noinline__ Row16<Wide> fetch_A_elements(const Segment& s, int k, int col) {
  const int dtype = (s.dtypes >> 16) & 0xff;
  Row16<Wide> r{};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float value =
        col + i < s.cols
            ? load_as_float(s.lora_A, k * s.lora_A_stride[0] + (col + i) * s.lora_A_stride[1], dtype) : 0.0f;
    if constexpr (Wide) r.word[i] = __float_as_uint(value);
    else r.word[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(value))) << (i % 2 * 16);
  }
  return r;
}

template <bool Wide>
__device__ __forceinline__ Row16<Wide> fetch_A(const Segment& s, int k, int col, bool vector) {
  if (k >= s.rank) return Row16<Wide>{};
  if (!vector || col + 16 > s.cols) return fetch_A_elements<Wide>(s, k, col);
  Row16<Wide> r;
  const uint4* from = reinterpret_cast<const uint4*>(s.lora_A + (k * s.lora_A_stride[0] + col) * (Wide ? 4 : 2));
#pragma unroll
  for (int i = 0; i < (Wide ? 4 : 2); ++i) {
    const uint4 v = __ldg(from + i);
    r.word[4 * i] = v.x, r.word[4 * i + 1] = v.y, r.word[4 * i + 2] = v.z, r.word[4 * i + 3] = v.w;
  }
  return r;
}

// Columns [col, col + cols) of lora_A, all ranks (zeros up to a whole chunk). Block (rank / 8, column / 8) of the
// permuted matrix is 128 bytes; blocks follow each other along the columns.
template <bool Wide>
__device__ __noinline__ void stage_A(char* to, const Segment& s, int col, int cols) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool vector = ((s.dtypes >> 16) & 0xff) == (Wide ? kFloat32 : kBFloat16) && s.lora_A_stride[1] == 1 &&
                      ((s.lora_A | (s.lora_A_stride[0] * (Wide ? 4 : 2))) & 15) == 0;
  const int ranks = up_to_chunk(s.rank), groups = cols / 64, down = cols * 16, plane = ranks * cols * 2;
  const int row = lane % 8, quarter = lane / 8, items = ranks / 8 * groups;
  constexpr int kBatch = Wide ? 2 : 4;  // loads in flight before the first is used
#pragma unroll 1
  for (int item = warp; item < items; item += kBatch * kWarpsOfGroups) {
    Row16<Wide> r[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int it = item + i * kWarpsOfGroups, block = it / groups, group = it - block * groups;
      // Place 16h + 8u + 2q + e of a chunk holds rank 8q + 4h + 2u + e; a block is (h, u), its row (q, e).
      const int k = block / 4 * kChunk + 8 * (row / 2) + 2 * (block % 4) + row % 2;
      if (it < items) r[i] = fetch_A<Wide>(s, k, col + group * 64 + quarter * 16, vector);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int it = item + i * kWarpsOfGroups, block = it / groups, group = it - block * groups;
      if (it >= items) break;
      // Group `group` of 64 columns is blocks 8 group .. 8 group + 7: chunk m of 8 columns of this lane, word j of it.
      char* const at = to + block * down + group * 8 * 128 + row * 16 + quarter * 4;
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          char* const word = at + (m * 4 + j) * 128;
          if constexpr (Wide) {
            uint32_t part[3];
            split3(__uint_as_float(r[i].word[m * 8 + 2 * j]), __uint_as_float(r[i].word[m * 8 + 2 * j + 1]), part);
#pragma unroll
            for (int p = 0; p < 3; ++p) *reinterpret_cast<uint32_t*>(word + p * plane) = part[p];
          } else {
            *reinterpret_cast<uint32_t*>(word) = r[i].word[m * 4 + j];
          }
        }
    }
  }
}

// This lane's eight ranks of chunk `c` of a row of lora_B, `row` of the tile: operand words [plane][pair of ranks].
template <bool Wide>
__device__ __forceinline__ void piece_of_B(uint32_t (&b)[Wide ? 3 : 1][4], const char* from, int c, int row) {
  const int quad = threadIdx.x % 4;
  const char* const at = from + c * box_bytes_of_B<Wide>() + row * (Wide ? 128 : 64);
  Piece<Wide> piece;
#pragma unroll
  for (int i = 0; i < (Wide ? 2 : 1); ++i) {
    const uint4 v = *reinterpret_cast<const uint4*>(at + (Wide ? (2 * quad + i) ^ (row % 8) : quad) * 16);
    piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
  }
  operand_B<Wide>(b, piece);
}

// lora_B of a chunk, for rows `row` and `row + 8` of the tile.
template <bool Wide>
struct Operand {
  uint32_t low[Wide ? 3 : 1][4], high[Wide ? 3 : 1][4];
  __device__ __forceinline__ void load(const char* from, int c, int row) {
    piece_of_B<Wide>(low, from, c, row);
    piece_of_B<Wide>(high, from, c, row + 8);
  }
  __device__ __forceinline__ void multiply(float (&d)[32], int plane, int h, uint64_t a, int add) const {
    wgmma(d, low[plane][2 * h], high[plane][2 * h], low[plane][2 * h + 1], high[plane][2 * h + 1], a, add);
  }
};

// The matrix units multiply for one warpgroup at a time, while the other adds, rounds and loads: left alone, both would
// multiply together, and then leave the matrix units idle together.
__device__ __forceinline__ void await_turn() {
#ifndef X_NOTURN
  asm volatile("bar.sync %0, 256;" ::"r"(2 + static_cast<int>(threadIdx.x) / 128) : "memory");
#endif
}
__device__ __forceinline__ void pass_turn() {
#ifndef X_NOTURN
  asm volatile("bar.arrive %0, 256;" ::"r"(3 - static_cast<int>(threadIdx.x) / 128) : "memory");
#endif
}

// lora_A of 64 columns in shared memory, as the matrix unit is told of it: chunk c, step h of 16 ranks, plane p. All
// values are those of the whole warpgroup; the compiler must know, or it moves them for each product.
struct MatrixA {
  uint64_t begin;
  uint32_t step, plane;  // in units of 16 bytes, as addresses are in `begin`
  __device__ __forceinline__ MatrixA(uint32_t address, int cols, int rank)
      : begin(matrix_of(address, 128, cols * 16)), step(2 * cols), plane(up_to_chunk(rank) * cols / 8) {}
  __device__ __forceinline__ uint64_t operator()(int c, int h, int p = 0) const {
    return begin + ((2 * c + h) * step + p * plane);
  }
};

__device__ __forceinline__ void multiply_chunk(float (&d)[32], const Operand<false>& b, const MatrixA& a, int c) {
  b.multiply(d, 0, 0, a(c, 0), 0);
  b.multiply(d, 0, 1, a(c, 1), 1);
}
// A chunk is summed in the matrix unit, and then added to the rest.
__device__ __forceinline__ void take(float (&sum)[32], float (&d)[32], bool first) {
  settle(d);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = first ? d[i] : sum[i] + d[i];
}

template <int Count>
__device__ __forceinline__ void multiply_narrow(float (&sum)[32], const char* from_B, int row, const MatrixA& a, int c) {
  Operand<false> b0, b1, b2, b3;
  float d0[32], d1[32], d2[32], d3[32];
  b0.load(from_B, c, row);
  if constexpr (Count > 1) b1.load(from_B, c + 1, row);
  if constexpr (Count > 2) b2.load(from_B, c + 2, row);
  if constexpr (Count > 3) b3.load(from_B, c + 3, row);
  await_turn();
  wgmma_begin();
  multiply_chunk(d0, b0, a, c);
  if constexpr (Count > 1) multiply_chunk(d1, b1, a, c + 1);
  if constexpr (Count > 2) multiply_chunk(d2, b2, a, c + 2);
  if constexpr (Count > 3) multiply_chunk(d3, b3, a, c + 3);
  wgmma_commit();
  pass_turn();
  wgmma_wait<0>();
  take(sum, d0, c == 0);
  if constexpr (Count > 1) take(sum, d1, false);
  if constexpr (Count > 2) take(sum, d2, false);
  if constexpr (Count > 3) take(sum, d3, false);
}

__device__ __forceinline__ void multiply_wide(float (&sum)[32], const char* from_B, int row, const MatrixA& a, int c) {
  Operand<true> b;
  b.load(from_B, c, row);
  // The small products on their own: the matrix unit cuts what it adds, and would cut the large sum for each.
  constexpr int kA[5] = {2, 1, 0, 1, 0}, kB[5] = {0, 1, 2, 0, 1};
  float small[32], large[32];
  await_turn();
  wgmma_begin();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int p = 0; p < 5; ++p) b.multiply(small, kB[p], h, a(c, h, kA[p]), h + p > 0);
  }
  b.multiply(large, 0, 0, a(c, 0), 0);
  b.multiply(large, 0, 1, a(c, 1), 1);
  wgmma_commit();
  pass_turn();
  wgmma_wait<0>();
  settle(small);
  settle(large);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = c == 0 ? large[i] + small[i] : sum[i] + (large[i] + small[i]);
}

// Sums over the ranks for the tile's rows and 64 columns.
template <bool Wide>
__device__ __forceinline__ void multiply(float (&sum)[32], const char* from_B, int row, const MatrixA& a, int rank) {
  const int chunks = (rank + kChunk - 1) / kChunk;
  int c = 0;
  if constexpr (Wide) {
#pragma unroll 1
    for (; c < chunks; ++c) multiply_wide(sum, from_B, row, a, c);
  } else {
#pragma unroll 1
    for (; c + X_ATONCE <= chunks; c += X_ATONCE) multiply_narrow<X_ATONCE>(sum, from_B, row, a, c);
#pragma unroll 1
    for (; c < chunks; ++c) multiply_narrow<1>(sum, from_B, row, a, c);
  }
}

// The warpgroups that multiply, add and round: each takes its share of a tile's boxes.
template <typename T, bool Wide>
__device__ __forceinline__ void merge_tiles(const Block& b) {
  const HopperLaunch& launch = b.launch;
  const Layout& layout = b.layout;
  const int lane = threadIdx.x % 32, quad = lane % 4, row = threadIdx.x / 32 % 4 * 16 + lane / 4;  // and row + 8
  const int share = layout.cols / kBoxCols / kGroups, first_box = uniform(threadIdx.x / 128) * share;
#ifndef X_NOTURN
  if (threadIdx.x >= 128) asm volatile("bar.arrive 2, 256;" ::: "memory");  // the first turn is the first group's
#endif
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
      const char* const from_B = b.stage_B(ring.stage);
#pragma unroll 1
      for (int box = first_box; box < first_box + share; ++box) {  // those without columns too: turns go round
        char* const W = b.stage(ring.stage) + box * kBoxBytes + row * 128;
        const auto vector_at = [&](int i) {  // vector 2 quad + i % 2 of row + 8 (i / 2)
          return reinterpret_cast<uint4*>(W + i / 2 * 1024 + ((2 * quad + i % 2) ^ (row % 8)) * 16);
        };
        Packed<T> packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) packed[i].word[0] = *vector_at(i);
        float sum[32];
        multiply<Wide>(sum, from_B, row, MatrixA(shared_address(b.lora_A()) + box * kBoxCols * 16, layout.cols, rank),
                       rank);
        // Sums 4 (4 J + j) + 2 h + e are elements 2 j + e of vector J of row h.
        const auto added = [&](int i) {
          Eight x = unpack(packed[i]);
#pragma unroll
          for (int k = 0; k < 8; ++k)
            x.value[k] = fmaf(scaling, sum[4 * (4 * (i % 2) + k / 2) + 2 * (i / 2) + k % 2], x.value[k]);
          return x;
        };
        if (special) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            *vector_at(i) = round_special<T>(added(i), s, min(tile.row + row + i / 2 * 8, static_cast<int>(s.rows) - 1),
                                             tile.col + box * kBoxCols + 8 * (2 * quad + i % 2), launch.stochastic,
                                             launch.seed).word[0];
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Eight x = added(i);
            round_nearest8(reinterpret_cast<T(&)[8]>(packed[i]), x.value);
            *vector_at(i) = packed[i].word[0];
          }
        }
      }
      fence_async();
    } else if (kind == kRaw) {
      const Slot& slot = b.shared.slots[tile.slot];
      copy_unit(slot.segment, static_cast<int>(slot.unit));
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(b.done(ring.stage));
    stops += kind == kStop;
  }
}

template <typename T, bool Wide>
__global__ void __launch_bounds__(kBlock, 1)
    merge_kernel(const __grid_constant__ HopperLaunch launch, const __grid_constant__ Layout layout) {
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
    merge_tiles<T, Wide>(b);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 88;");
    if (warp == kWarpsOfGroups) ask_for_tiles<Wide>(b);
    else if (warp <= kWarpsOfGroups + kStoreWarps) store_tiles(b, warp - kWarpsOfGroups - 1);
  }
#else
  __trap();  // never launched: kernels/cuda.py asks for compute capability 9.0
#endif
}

}  // namespace hopper
}  // namespace lora_merge
