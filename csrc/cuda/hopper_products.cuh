// lora_A and lora_B of the kernel for compute capability 9: to shared memory, to registers, through the matrix units.
#pragma once
#include "adapters.cuh"
#include "hopper_device.cuh"

namespace lora_merge {
namespace hopper {

constexpr int kTileRows = 64, kBoxCols = 64, kBoxBytes = kTileRows * 128;
constexpr int kGroups = 2, kWarpsOfGroups = 4 * kGroups;  // warpgroups that multiply
constexpr int kBlock = 128 * (kGroups + 1);
static_assert(128 * kGroups == kThreads, "copies of raw bits take as many threads");

template <bool Wide>
__host__ __device__ constexpr int box_bytes_of_B() {
  return kTileRows * kChunk * (Wide ? 4 : 2);
}

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
    const float value = col + i < s.cols
                            ? load_as_float(s.lora_A, k * s.lora_A_stride[0] + (col + i) * s.lora_A_stride[1], dtype)
                            : 0.0f;
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
  asm volatile("bar.sync %0, 256;" ::"r"(2 + static_cast<int>(threadIdx.x) / 128) : "memory");
}
__device__ __forceinline__ void pass_turn() {
  asm volatile("bar.arrive %0, 256;" ::"r"(3 - static_cast<int>(threadIdx.x) / 128) : "memory");
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
template <bool First>
__device__ __forceinline__ void take(float (&sum)[32], float (&d)[32]) {
  settle(d);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = First ? d[i] : sum[i] + d[i];
}

// sum += the products of chunk c, or of Count = 2 from c on. The First chunk begins the sum.
template <int Count, bool First>
__device__ __forceinline__ void multiply_narrow(float (&sum)[32], const char* from_B, int row, const MatrixA& a,
                                                int c) {
  constexpr bool kAlone = First && Count == 1;
  Operand<false> b0, b1;
  float d0[32], d1[32];
  b0.load(from_B, c, row);
  if constexpr (Count == 2) b1.load(from_B, c + 1, row);
  await_turn();
  wgmma_begin();
  multiply_chunk(kAlone ? sum : d0, b0, a, c);
  if constexpr (Count == 2) multiply_chunk(d1, b1, a, c + 1);
  wgmma_commit();
  pass_turn();
  wgmma_wait();
  if constexpr (kAlone) settle(sum);
  else take<First>(sum, d0);
  if constexpr (Count == 2) take<false>(sum, d1);
}

template <bool First>
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
  wgmma_wait();
  settle(small);
  settle(large);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = First ? large[i] + small[i] : sum[i] + (large[i] + small[i]);
}

// Sums over the ranks for the tile's rows and 64 columns.
template <bool Wide>
__device__ __forceinline__ void multiply(float (&sum)[32], const char* from_B, int row, const MatrixA& a, int rank) {
  const int chunks = (rank + kChunk - 1) / kChunk;
  if constexpr (Wide) {
    multiply_wide<true>(sum, from_B, row, a, 0);
#pragma unroll 1
    for (int c = 1; c < chunks; ++c) multiply_wide<false>(sum, from_B, row, a, c);
  } else if (chunks == 1) {
    multiply_narrow<1, true>(sum, from_B, row, a, 0);
  } else {
    multiply_narrow<2, true>(sum, from_B, row, a, 0);
    int c = 2;
#pragma unroll 1
    for (; c + 2 <= chunks; c += 2) multiply_narrow<2, false>(sum, from_B, row, a, c);
    if (c < chunks) multiply_narrow<1, false>(sum, from_B, row, a, c);
  }
}

}  // namespace hopper
}  // namespace lora_merge
