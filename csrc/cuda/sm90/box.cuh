// Tiles and boxes of the kernel for compute capability 9, and what becomes of a box's scaled sums.
#pragma once
#include "../adapters.cuh"
#include "ptx.cuh"

namespace lora_merge {
namespace hopper {

enum Kind : int { kMerge, kRaw, kStop };

// What the producer tells the others about a tile.
struct Tile {
  const TensorMap* out;
  int row, col;     // of the segment
  int rows, cols;   // of the segment from there on
  int boxes;        // that hold columns
  int slot;         // where the segment lies
  int first, last;  // of a unit
  int kind;         // Kind
  float scaling;
  int64_t number;  // the epilogue's
};

// And where it has two products, of the first one.
struct Before {
  const Segment* segment;
  float scaling;
};

// A box of a tile, as a lane that multiplies sees it: 16 elements of `row`, and as many of row + 8, in four runs of
// four pairs. Pairs lie eight columns apart.
struct Box {
  const HopperLaunch& launch;
  const Segment& s;
  const Tile& tile;
  const Before& before;
  char* const W;       // in shared memory
  const char* extra;   // of the tile
  int number, row;     // of the box in its strip; of the tile
  int fragment;        // bytes to the row of 16 bytes that this lane names in run 0
  bool special;        // rounded stochastically, or scaled by rows
  float scaling;       // of the products

  // The first column of run i, from the tile's on.
  __device__ __forceinline__ int col(int i) const { return number * kBoxCols + i % 2 * 32 + threadIdx.x % 4 * 2; }

  // Words of run i: of row + 8 (i / 2). All lanes of a warp together.
  __device__ __forceinline__ void load(int i, uint32_t (&word)[4]) const { ldmatrix4(word, address(i)); }
  __device__ __forceinline__ void store(int i, const uint32_t (&word)[4]) const { stmatrix4(address(i), word); }
  // What they hold, for one lane: from its first pair of row + 8 j to pair `pair` of both runs, the first or second
  // element. `first_pair` is that of row.
  __device__ __forceinline__ int first_pair() const { return row * 128 + row % 8 * 16 + threadIdx.x % 4 * 4; }
  __device__ __forceinline__ char* element(int first_pair, int j, int pair, int second) const {
    return W + (first_pair ^ pair * 16) + j * 1024 + second * 2;
  }

 private:
  // Of run i. Vectors are swizzled, so that those four further on are so by a bit.
  __device__ __forceinline__ uint32_t address(int i) const {
    return ((shared_address(W) + fragment) ^ i % 2 * 64) + i / 2 * 1024;
  }
};

// The product of element k of run i.
__device__ __forceinline__ float product_of(const float (&sum)[32], int i, int k) {
  return sum[4 * (4 * (i % 2) + k / 2) + 2 * (i / 2) + k % 2];
}

// What the scaling of a box of pairs is to be multiplied by, if it is one factor that leaves the bits as they are: a
// power of two, far from the ends of float32's range. Else 0.
__device__ __forceinline__ float common_factor(const uint32_t* rows, const uint32_t* cols, float scaling) {
  const float row = __uint_as_float(rows[kCommon]), col = __uint_as_float(cols[kCommon]), factor = row * col;
  if (factor < 0x1p-80f || factor > 0x1p80f || needs_exact(rows[kNotesOfAll], cols[kNotesOfAll])) return 0;
  const float size = fabsf(scaling) * factor;
  return size > 0x1p-100f && size < 0x1p100f ? factor : 0;
}

// From scaled sums of a box of pairs to products.
__device__ __forceinline__ void unscale(float (&sum)[32], const Box& box, const Segment& s, const uint32_t* rows,
                                        const uint32_t* cols) {
  const uint32_t low = rows[box.row], high = rows[box.row + 8];
  const uint2* const col_words = reinterpret_cast<const uint2*>(cols) + threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const uint2 word = col_words[4 * j];
    const float x = factor_of(word.x), y = factor_of(word.y);
    sum[4 * j] = sum[4 * j] * x * factor_of(low);
    sum[4 * j + 1] = sum[4 * j + 1] * y * factor_of(low);
    sum[4 * j + 2] = sum[4 * j + 2] * x * factor_of(high);
    sum[4 * j + 3] = sum[4 * j + 3] * y * factor_of(high);
  }
  if (!needs_exact(low, cols[kNotesOfAll]) && !needs_exact(high, cols[kNotesOfAll])) return;
  const int row = box.tile.row + box.row, col = box.tile.col + box.col(0);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int r = row + i / 2 % 2 * 8, c = col + i / 4 * 8 + i % 2;
    const uint2 word = col_words[i / 4 * 4];
    if (r < s.rows && c < s.cols && needs_exact(i / 2 % 2 ? high : low, i % 2 ? word.y : word.x))
      sum[i] = exact_product(s, r, c);
  }
}

}  // namespace hopper
}  // namespace lora_merge
