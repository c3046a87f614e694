// lora_A and lora_B: into shared memory, into registers, through the matrix unit.
#pragma once
#include "../parts.h"
#include "units.cuh"

namespace lora_merge {

// Eight values of B, row `row`, ranks k .. k+7 (zeros outside): of 16 bits, or float32 words where kWide, or high parts
// and then low ones where kPaired.
template <typename Adapter>
struct Piece {
  uint32_t word[4 * kPieces<Adapter>];
};

__device__ __forceinline__ Piece<Pair> pairs_of_B(const Segment& s, int row, int k) {
  Piece<Pair> piece{};
  const int ranks = ranks_of_parts(s.rank);
  if (row >= s.rows || k >= ranks) return piece;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(s.parts_B) + static_cast<int64_t>(row) * ranks + k;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + i * plane_of_B(s.rows, s.rank)));
    piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
  }
  return piece;
}

// A piece straight from memory: any strides, dtypes and edges. A call, as it is rare: inlined, it would take registers
// from the usual path.
template <typename Adapter>
__device__ __noinline__ Piece<Adapter> fetch_B(const Segment& s, int row, int k) {
  if constexpr (kPaired<Adapter>) {
    return pairs_of_B(s, row, k);
  } else {
    const int dtype = (s.dtypes >> 24) & 0xff;
    const int64_t at = row * s.lora_B_stride[0] + k * s.lora_B_stride[1];
    float value[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      value[i] = row < s.rows && k + i < s.rank ? load_as_float(s.lora_B, at + i * s.lora_B_stride[1], dtype) : 0.0f;
    Piece<Adapter> piece;
#pragma unroll
    for (int i = 0; i < (kWide<Adapter> ? 8 : 4); ++i) {
      if constexpr (kWide<Adapter>) piece.word[i] = __float_as_uint(value[i]);
      else piece.word[i] = pack2<Adapter>(value[2 * i], value[2 * i + 1]);
    }
    return piece;
  }
}

// A piece from this lane's slot.
template <typename Adapter>
__device__ __forceinline__ Piece<Adapter> staged_piece(const char* stage) {
  Piece<Adapter> piece;
#pragma unroll
  for (int i = 0; i < kPieces<Adapter>; ++i) {
    const uint4 v = *reinterpret_cast<const uint4*>(stage + i * kVector);
    piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
  }
  return piece;
}

// Whether all ranks of a row of B can be copied 16 bytes at a time.
template <typename Adapter>
__device__ __forceinline__ bool vector_B(const Segment& s) {
  if constexpr (kPaired<Adapter>) return true;
  const bool dtype_fits = ((s.dtypes >> 24) & 0xff) == kCodeOf<Adapter>;
  return dtype_fits && s.rank % 8 == 0 && aligned16(s.lora_B, s.lora_B_stride, kWide<Adapter> ? 4 : 2);
}

// The planes of a piece: operand words of the matrix unit, [plane][pair of ranks].
template <typename Adapter>
__device__ __forceinline__ void operand_B(uint32_t (&b)[kPlanes<Adapter>][4], const Piece<Adapter>& piece) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWide<Adapter>) {
      uint32_t part[3];
      split3(__uint_as_float(piece.word[2 * i]), __uint_as_float(piece.word[2 * i + 1]), part);
#pragma unroll
      for (int p = 0; p < 3; ++p) b[p][i] = part[p];
    } else {
#pragma unroll
      for (int p = 0; p < kPlanes<Adapter>; ++p) b[p][i] = piece.word[4 * p + i];
    }
  }
}

// Eight columns of a rank of lora_A, pairs of elements: words [pair of columns][plane]; zeros outside.
template <typename Adapter>
__device__ __forceinline__ void eight_of_A(uint32_t (&word)[4][kPlanes<Adapter>], const Segment& s, int k, int j,
                                           bool vector) {
  if constexpr (kPaired<Adapter>) {
    const int64_t pitch = pitch_of_A(s.cols);
    const bool there = k < ranks_of_parts(s.rank) && j < pitch;
    const uint16_t* const from = reinterpret_cast<const uint16_t*>(s.parts_A) + k * pitch + j;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      uint4 v{};
      if (there) v = __ldg(reinterpret_cast<const uint4*>(from + p * plane_of_A(s.cols, s.rank)));
      word[0][p] = v.x, word[1][p] = v.y, word[2][p] = v.z, word[3][p] = v.w;
    }
    return;
  }
  const int dtype = (s.dtypes >> 16) & 0xff;
  const int64_t at = k * s.lora_A_stride[0] + j * s.lora_A_stride[1];
  float value[8];
  if (vector && k < s.rank && j + 8 <= s.cols) {
    if (dtype == kFloat32) {
      const float4* from = reinterpret_cast<const float4*>(s.lora_A + at * 4);
      const float4 low = __ldg(from), high = __ldg(from + 1);
      value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
      value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
    } else {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(s.lora_A + at * 2));
      const uint32_t raw[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) value[e] = half_as_float(raw[e / 2] >> (16 * (e % 2)), dtype);
    }
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      value[e] = k < s.rank && j + e < s.cols ? load_as_float(s.lora_A, at + e * s.lora_A_stride[1], dtype) : 0.0f;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kWide<Adapter>) split3(value[2 * i], value[2 * i + 1], word[i]);
    else word[i][0] = pack2<Adapter>(value[2 * i], value[2 * i + 1]);
  }
}

// Columns [col, col + width) of A, all ranks (zeros up to a whole chunk), to shared memory in the permuted order.
template <typename Adapter>
__device__ __forceinline__ void load_A(bf16* shared, const Segment& s, int col, int width, int pitch) {
  const int size = ((s.dtypes >> 16) & 0xff) == kFloat32 ? 4 : 2, ranks = up_to_chunk(s.rank), pieces = width / 8;
  const bool vector = s.lora_A_stride[1] == 1 && ((s.lora_A | (s.lora_A_stride[0] * size)) & 15) == 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < ranks * pieces; i += kThreads) {
    const int k = i / pieces, piece = i - k * pieces;
    uint32_t word[4][kPlanes<Adapter>];
    eight_of_A<Adapter>(word, s, k, col + piece * 8, vector);
    const int place = (k & -kChunk) + 16 * ((k >> 2) & 1) + 8 * ((k >> 1) & 1) + 2 * ((k >> 3) & 3) + (k & 1);
    bf16* to = shared + place * pitch + (piece / 8) * 64 + piece % 8;
#pragma unroll
    for (int e = 0; e < 8; e += 2) {
#pragma unroll
      for (int p = 0; p < kPlanes<Adapter>; ++p) {
        to[p * ranks * pitch + 8 * e] = __ushort_as_bfloat16(static_cast<unsigned short>(word[e / 2][p]));
        to[p * ranks * pitch + 8 * e + 8] = __ushort_as_bfloat16(static_cast<unsigned short>(word[e / 2][p] >> 16));
      }
    }
  }
}

// Address of this lane's row of the first 16 x 16 block of A for its warp's 64 columns.
__device__ __forceinline__ uint32_t operand_A_address(const bf16* shared, int warp_col, int pitch) {
  const int lane = threadIdx.x % 32;
  return shared_address(shared + ((lane / 16) * 8 + lane % 8) * pitch + warp_col * 64 + (lane / 8 % 2) * 8);
}

// The small products of float32 adapters, in the order in which they are summed: parts of lora_A and lora_B. Where a
// segment is turned, lora_A and lora_B change places in that order.
struct SmallProduct {
  int a, b;
  bool straight, turned;  // whether it is taken here
};
template <typename Adapter>
constexpr int kSmallProducts = kPaired<Adapter> ? 3 : 8;
template <typename Adapter>
__device__ constexpr SmallProduct small_product(int i) {
  if constexpr (kPaired<Adapter>) {
    constexpr SmallProduct order[] = {{1, 0, true, false}, {0, 1, true, true}, {1, 0, false, true}};
    return order[i];
  } else {
    constexpr SmallProduct order[] = {{2, 0, true, false}, {0, 2, false, true}, {1, 1, true, true},
                                      {2, 0, false, true}, {0, 2, true, false}, {0, 1, false, true},
                                      {1, 0, true, true},  {0, 1, true, false}};
    return order[i];
  }
}
// Of a lane's sums of a step, four rows of registers. Of pairs as many more: the small products, which are 2^11 times
// what they stand for. What the matrix unit cuts off those is lost in the rest, so it sums them over all ranks.
template <typename Adapter>
constexpr int kSums = kPaired<Adapter> ? 8 : 4;
__device__ __forceinline__ float whole_sum(float large, float small) { return fmaf(small, 0x1p-11f, large); }

// Whether sums of 32 ranks are added to each other with rounding, and not in the matrix unit, see merge.cuh.
template <typename Source, typename Destination, typename Adapter>
constexpr bool kRoundedSums = kPlanes<Adapter> > 1 || sizeof(Source) == 4 || sizeof(Destination) == 4;

// 32 ranks for 64 columns and `Steps` times eight rows: sum += A^T B^T, in the matrix unit; or, Rounded, a sum of these
// ranks is added to it. Small products of parts go to a sum of their own: the matrix unit cuts what it adds, and would
// cut the large sum once for each of them. Of Rounded sums the First chunk does not add to one, but begins it.
template <typename Adapter, bool Rounded, int Steps, bool First = false>
__device__ __forceinline__ void multiply_chunk(float (&sum)[Steps][kSums<Adapter>][4], uint32_t a_address, int pitch,
                                               int plane_bytes, const uint32_t (&b)[Steps][kPlanes<Adapter>][4],
                                               bool turned) {
  static_assert(Rounded || kPlanes<Adapter> == 1);
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    float large[Steps][4] = {}, small_chunk[Steps][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t a[kPlanes<Adapter>][4];
#pragma unroll
      for (int p = 0; p < kPlanes<Adapter>; ++p)
        ldmatrix4_trans(a[p], a_address + p * plane_bytes + (h * 16 * pitch + t * 16) * 2);
#pragma unroll
      for (int j = 0; j < Steps; ++j) {
        if constexpr (kPlanes<Adapter> > 1) {
#pragma unroll
          for (int i = 0; i < kSmallProducts<Adapter>; ++i) {
            const SmallProduct p = small_product<Adapter>(i);
            float (&small)[4] = kPaired<Adapter> ? sum[j][kSums<Adapter> - 4 + t] : small_chunk[j];
            if (turned ? p.turned : p.straight) mma<Adapter>(small, a[p.a], b[j][p.b][2 * h], b[j][p.b][2 * h + 1]);
          }
        }
        mma<Adapter>(Rounded ? large[j] : sum[j][t], a[0], b[j][0][2 * h], b[j][0][2 * h + 1]);
      }
    }
    if constexpr (Rounded) {
#pragma unroll
      for (int j = 0; j < Steps; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float chunk = kWide<Adapter> ? large[j][e] + small_chunk[j][e] : large[j][e];
          sum[j][t][e] = First ? chunk : sum[j][t][e] + chunk;
        }
    }
  }
}

// ---- pairs: from scaled products to products -----------------------------------------------------------------------

__device__ __forceinline__ float factor_of(uint32_t word) { return __uint_as_float(word & kExponent); }

// An element of lora_B lora_A, rank by rank.
static __device__ __noinline__ float exact_product(const Segment& s, int row, int col) {
  double sum = 0;
#pragma unroll 4
  for (int k = 0; k < s.rank; ++k) {
    const int64_t a = k * s.lora_A_stride[0] + col * s.lora_A_stride[1];
    const int64_t b = row * s.lora_B_stride[0] + k * s.lora_B_stride[1];
    sum += static_cast<double>(load_as_float(s.lora_A, a, (s.dtypes >> 16) & 0xff)) *
           static_cast<double>(load_as_float(s.lora_B, b, (s.dtypes >> 24) & 0xff));
  }
  return static_cast<float>(sum);
}

// The words of the factors of this lane's eight columns, and what goes together with them; zeros outside.
struct ColumnFactors {
  uint32_t word[8];
  uint32_t notes;
};
__device__ __forceinline__ ColumnFactors column_factors(const Segment& s, int col) {
  ColumnFactors factors{{0, 0, 0, 0, 0, 0, 0, 0}, 0};
  if (s.rank == 0 || col >= s.cols) return factors;
  const uint32_t* const from = reinterpret_cast<const uint32_t*>(factors_of_A(s));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(from + factor_at(col)) + i);
    factors.word[4 * i] = v.x, factors.word[4 * i + 1] = v.y, factors.word[4 * i + 2] = v.z;
    factors.word[4 * i + 3] = v.w;
  }
  factors.notes = __ldg(from + factor_at(col & -kFactorsAtOnce) + kNotesOfAll);
  return factors;
}

// Two rows (2 quad and the next one) of eight columns, as `multiply_chunk` leaves their sums: to products, in the first
// four.
__device__ __forceinline__ void unscale(float (&sum)[kSums<Pair>][4], const Segment& s, const ColumnFactors& columns,
                                        int row, int col) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (row + e >= s.rows) return;
    const uint32_t word = __ldg(reinterpret_cast<const uint32_t*>(factors_of_B(s)) + factor_at(row + e));
    const float factor = factor_of(word);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = sum[i / 2][i % 2 * 2 + e];
      x = whole_sum(x, sum[4 + i / 2][i % 2 * 2 + e]) * factor_of(columns.word[i]) * factor;
    }
    if (needs_exact(word, columns.notes)) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (col + i < s.cols && needs_exact(word, columns.word[i]))
          sum[i / 2][i % 2 * 2 + e] = exact_product(s, row + e, col + i);
    }
  }
}

}  // namespace lora_merge
