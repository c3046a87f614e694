// lora_A and lora_B of the kernel for compute capability 9: to shared memory, to registers, through the matrix units.
#pragma once
#include "../adapters.cuh"
#include "ptx.cuh"

namespace lora_merge {
namespace hopper {

// A value that all lanes of a warp have: the compiler then keeps it where the matrix unit's arguments are.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// ---- lora_A in shared memory ----------------------------------------------------------------------------------------

// Of a box, for each chunk and plane: 32 ranks, in the order of `rank_at`, of 64 columns. A rank is 128 bytes, whose
// 16-byte vectors are swizzled as W's are: `kPartBytes` a plane.

// Place 16h + 8u + 2q + e of a chunk holds rank 8q + 4h + 2u + e: a lane reads eight adjacent ranks of lora_B.
__device__ __forceinline__ int rank_at(int place) {
  return place % 8 / 2 * 8 + place / 16 * 4 + place / 8 % 2 * 2 + place % 2;
}

// A chunk of float32 lora_A, 32 ranks of 64 columns in their own order, becomes three planes. By so many threads.
template <int Threads>
__device__ __forceinline__ void split_A(char* to, const char* from) {
  const int v = threadIdx.x % 8;
#pragma unroll 4
  for (int i = 0; i < 256 / Threads; ++i) {
    const int place = threadIdx.x % Threads / 8 + i * (Threads / 8);
    const float4* const rank = reinterpret_cast<const float4*>(from + rank_at(place) * 256) + 2 * v;
    const float4 x = rank[0], y = rank[1];
    uint32_t part[4][3];
    split3(x.x, x.y, part[0]);
    split3(x.z, x.w, part[1]);
    split3(y.x, y.y, part[2]);
    split3(y.z, y.w, part[3]);
#pragma unroll
    for (int p = 0; p < 3; ++p)
      *reinterpret_cast<uint4*>(to + p * kPartBytes + place * 128 + (v ^ (place % 8)) * 16) =
          make_uint4(part[0][p], part[1][p], part[2][p], part[3][p]);
  }
}

// lora_A of 64 columns in shared memory, as the matrix unit is told of it: chunk c, step h of 16 ranks, plane p. All
// values are those of the whole warpgroup; the compiler must know, or it moves them for each product.
template <typename Adapter>
struct MatrixA {
  uint32_t begin;  // in units of 16 bytes
  __device__ __forceinline__ explicit MatrixA(uint32_t address) : begin(address / 16) {}
  __device__ __forceinline__ uint32_t operator()(int c, int h, int p = 0) const {
    return begin + (2 * (c * kPlanes<Adapter> + p) + h) * (kPartBytes / 32);
  }
};

// ---- lora_B, from shared memory to registers ------------------------------------------------------------------------

// This lane's eight ranks of chunk `c` of a row of lora_B, `row` of the tile: operand words [plane][pair of ranks].
template <typename Adapter>
__device__ __forceinline__ void piece_of_B(uint32_t (&b)[kPlanes<Adapter>][4], const char* from, int c, int row) {
  const int quad = threadIdx.x % 4;
  const char* const chunk = from + c * chunk_bytes(kPlanes<Adapter>);
  Piece<Adapter> piece;
#pragma unroll
  for (int i = 0; i < kPieces<Adapter>; ++i) {
    const char* const at = kWide<Adapter> ? chunk + row * 128 + ((2 * quad + i) ^ (row % 8)) * 16
                                          : chunk + i * kPartBytes + row * 64 + quad * 16;
    const uint4 v = *reinterpret_cast<const uint4*>(at);
    piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
  }
  operand_B<Adapter>(b, piece);
}

// lora_B of a chunk, for rows `row` and `row + 8` of the tile.
template <typename Adapter>
struct Operand {
  uint32_t low[kPlanes<Adapter>][4], high[kPlanes<Adapter>][4];
  __device__ __forceinline__ void load(const char* from, int c, int row) {
    piece_of_B<Adapter>(low, from, c, row);
    piece_of_B<Adapter>(high, from, c, row + 8);
  }
  __device__ __forceinline__ void settle() {
    hopper::settle(low);
    hopper::settle(high);
  }
  __device__ __forceinline__ void multiply(float (&d)[32], int plane, int h, uint32_t a, int add) const {
    wgmma<Adapter>(d, low[plane][2 * h], high[plane][2 * h], low[plane][2 * h + 1], high[plane][2 * h + 1], a, add);
  }
  // Of parts, the small products of step h of chunk c.
  __device__ __forceinline__ void multiply_small(float (&d)[32], const MatrixA<Adapter>& a, int c, int h,
                                                 int add) const {
    bool first = true;
#pragma unroll
    for (int i = 0; i < kSmallProducts<Adapter>; ++i) {
      const SmallProduct p = small_product<Adapter>(i);
      if (!p.straight) continue;
      multiply(d, p.b, h, a(c, h, p.a), first ? add : 1);
      first = false;
    }
  }
};

// ---- products -------------------------------------------------------------------------------------------------------

// The matrix units multiply for one warpgroup at a time, while the others add, round and load: left alone, all would
// multiply together, and then leave the matrix units idle together. A group has a barrier of the hardware for its
// turns, and one for itself.
constexpr int kFirstTurn = 1, kFirstGroup = 4;
__device__ __forceinline__ int group_number() { return static_cast<int>(threadIdx.x) / 128; }
__device__ __forceinline__ void group_meets() {
  asm volatile("bar.sync %0, 128;" ::"r"(kFirstGroup + group_number()) : "memory");
}
// Turns: groups that have them; 0: none.
template <int Turns>
__device__ __forceinline__ void await_turn() {
  if constexpr (Turns > 0) asm volatile("bar.sync %0, 256;" ::"r"(kFirstTurn + group_number()) : "memory");
}
template <int Turns>
__device__ __forceinline__ void pass_turn() {
  if constexpr (Turns > 0)
    asm volatile("bar.arrive %0, 256;" ::"r"(kFirstTurn + (group_number() + 1) % Turns) : "memory");
}

// As there are registers for lora_B.
template <int Groups>
constexpr int kChunksOfTurn = Groups == 2 ? 8 : 2;

// A turn: of each product the next `count` chunks from c on, of Most of them at the most. They are added to its sum in
// the matrix unit; its chunk 0 begins it. A product has `chunks`, and those of the next one follow. `meanwhile()` is
// called while the matrix unit works.
template <int Turns, typename Adapter, int Most, int Products, typename Meanwhile>
__device__ __forceinline__ void multiply_narrow(float (&sum)[Products][32], const char* from_B, int row,
                                                const MatrixA<Adapter>& a, int chunks, int c, int count,
                                                const Meanwhile& meanwhile) {
  if constexpr (Most > 1)
    if (count < Most)
      return multiply_narrow<Turns, Adapter, Most - 1>(sum, from_B, row, a, chunks, c, count, meanwhile);
  Operand<Adapter> b[Products][Most];
#pragma unroll
  for (int p = 0; p < Products; ++p)
#pragma unroll
    for (int i = 0; i < Most; ++i) b[p][i].load(from_B, p * chunks + c + i, row);
  await_turn<Turns>();
#pragma unroll
  for (int p = 0; p < Products; ++p)
#pragma unroll
    for (int i = 0; i < Most; ++i) b[p][i].settle();
  wgmma_begin();
#pragma unroll
  for (int p = 0; p < Products; ++p)
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      b[p][i].multiply(sum[p], 0, 0, a(p * chunks + c + i, 0), c + i > 0);
      b[p][i].multiply(sum[p], 0, 1, a(p * chunks + c + i, 1), 1);
    }
  wgmma_commit();
  pass_turn<Turns>();
  meanwhile();
  wgmma_wait();
#pragma unroll
  for (int p = 0; p < Products; ++p) settle(sum[p]);
#pragma unroll
  for (int p = 0; p < Products; ++p)
#pragma unroll
    for (int i = 0; i < Most; ++i) b[p][i].settle();
}

// All turns of narrow products, each with a sum of its own.
template <int Groups, int Turns, typename Adapter, int Products, typename Meanwhile>
__device__ __forceinline__ void multiply_all_narrow(float (&sum)[Products][32], const char* from_B, int row,
                                                    const MatrixA<Adapter>& a, int chunks, const Meanwhile& meanwhile) {
  constexpr int kMost = kChunksOfTurn<Groups> / Products;
  multiply_narrow<Turns, Adapter, kMost>(sum, from_B, row, a, chunks, 0, chunks, meanwhile);
#pragma unroll 1
  for (int c = kMost; c < chunks; c += kMost)
    multiply_narrow<Turns, Adapter, kMost>(sum, from_B, row, a, chunks, c, chunks - c, [] {});
}

// Float32 adapters, in three parts: chunk `c`, which is all, in a turn. The small products on their own: the matrix
// unit cuts what it adds, and would cut the large sum for each. Steps: 1 where the second one has no rank.
template <int Turns, int Steps, typename Meanwhile>
__device__ __forceinline__ void multiply_steps(float (&sum)[32], Operand<float>& b, const MatrixA<float>& a, int c,
                                               const Meanwhile& meanwhile) {
  float small[32];
  await_turn<Turns>();
  b.settle();
  wgmma_begin();
#pragma unroll
  for (int h = 0; h < Steps; ++h) b.multiply_small(small, a, c, h, h > 0);
#pragma unroll
  for (int h = 0; h < Steps; ++h) b.multiply(sum, 0, h, a(c, h), h > 0);
  wgmma_commit();
  pass_turn<Turns>();
  meanwhile();
  wgmma_wait();
  settle(small);
  settle(sum);
  b.settle();
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] += small[i];
}

template <int Turns, typename Meanwhile>
__device__ __forceinline__ void multiply_wide(float (&sum)[32], Operand<float>& b, const MatrixA<float>& a, int c,
                                              int rank, const Meanwhile& meanwhile) {
  // The second step has no rank below 4, see `rank_at`.
  if (rank <= 4) multiply_steps<Turns, 1>(sum, b, a, c, meanwhile);
  else multiply_steps<Turns, 2>(sum, b, a, c, meanwhile);
}

// All turns of pairs: one, of all chunks, as each takes long. Large products of 32 ranks are summed in the matrix unit,
// and then added to the rest (round to nearest), while those of the next chunk are under way. The small ones are 2^-11
// of them: what the matrix unit cuts off those is lost in the rest, so they are summed there over all ranks. `takes`,
// `passes`: whether this one begins and ends the group's turn. Ahead: whether there are registers for chunks that
// overlap.
template <int Turns, bool Ahead, typename Adapter, typename Meanwhile>
__device__ __forceinline__ void multiply_pairs(float (&sum)[32], const char* from_B, int row, const MatrixA<Adapter>& a,
                                               int begin, int chunks, bool takes, bool passes,
                                               const Meanwhile& meanwhile) {
  constexpr int kUnderWay = Ahead ? 2 : 1;
  float small[32], large[kUnderWay][32];
  Operand<Adapter> b[kUnderWay];
  const auto issue = [&](Operand<Adapter>& of_B, float (&to)[32], int c, int add) {
    of_B.settle();
    wgmma_begin();
#pragma unroll
    for (int h = 0; h < 2; ++h) of_B.multiply_small(small, a, c, h, h + add);
#pragma unroll
    for (int h = 0; h < 2; ++h) of_B.multiply(to, 0, h, a(c, h), h > 0);
    wgmma_commit();
  };
  const auto fold = [&](Operand<Adapter>& of_B, float (&from)[32]) {
    settle(from);
    of_B.settle();
#pragma unroll
    for (int i = 0; i < 32; ++i) sum[i] += from[i];
  };
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = 0;
  const int end = begin + chunks;
  b[0].load(from_B, begin, row);
  if (takes) await_turn<Turns>();
  issue(b[0], large[0], begin, 0);
  int c = begin + 1;
  if constexpr (Ahead) {
    meanwhile();
#pragma unroll 1
    for (; c + 1 < end; c += 2) {
      b[1].load(from_B, c, row);
      issue(b[1], large[1], c, 1);
      wgmma_wait<1>();
      fold(b[0], large[0]);
      b[0].load(from_B, c + 1, row);
      issue(b[0], large[0], c + 1, 1);
      wgmma_wait<1>();
      fold(b[1], large[1]);
    }
    if (c < end) {
      b[1].load(from_B, c, row);
      issue(b[1], large[1], c, 1);
      if (passes) pass_turn<Turns>();
      wgmma_wait<1>();
      fold(b[0], large[0]);
      wgmma_wait<0>();
      fold(b[1], large[1]);
    } else {
      if (passes) pass_turn<Turns>();
      wgmma_wait<0>();
      fold(b[0], large[0]);
    }
  } else {
    if (c == end && passes) pass_turn<Turns>();
    meanwhile();
    wgmma_wait<0>();
    fold(b[0], large[0]);
#pragma unroll 1
    for (; c < end; ++c) {
      b[0].load(from_B, c, row);
      issue(b[0], large[0], c, 1);
      if (c + 1 == end && passes) pass_turn<Turns>();
      wgmma_wait<0>();
      fold(b[0], large[0]);
    }
  }
  settle(small);
#pragma unroll
  for (int i = 0; i < 32; ++i) sum[i] = whole_sum(sum[i], small[i]);
}

}  // namespace hopper
}  // namespace lora_merge
