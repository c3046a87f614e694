// float32 adapters as pairs of fp16, for weights and results of 16 bits.
//
// Each column of lora_A and each row of lora_B is a vector over the ranks. Scaled by a power of two, so that its
// largest element is 2^6 to 2^14, an element x is high + low / 2^11, both fp16: within 2^-23 of it, if it is 2^-13 or
// more. The matrix unit then makes three products of each pair of elements, high * high, high * low and low * high
// (low * low is beneath 2^-22 of the whole), and the sum is multiplied by the two factors that undo the scaling. The
// powers are multiples of 2^8, so that most vectors of a matrix have the same one, and 64 that do say so: then a box of
// the result takes one factor, not 128.
//
// Smaller elements than 2^-13 have fewer bits: each lacks up to 2^-36, and the product of low parts that is left out is
// up to 2^-36 of what it meets. That matters only where it meets elements far above those that the vector's largest one
// meets. So each vector notes how far its elements lie apart, and how far those of another one may (`note_of`); vectors
// with numbers that are not finite, or largest ones at the ends of float32's range, note that no other one will do.
// Where a row and a column do not go together, their element of the product is summed rank by rank in double
// (`exact_product`). A vector has all ranks however a weight is cut, so the choice, and the bits, do not depend on the
// cut. Together: within 2^-21 + 2^-23 of sum |lora_B| |lora_A|, and what the matrix unit cuts off.
//
// In memory: the high parts, the low parts, the factors with their notes. lora_A: a row for each rank, as long as
// `pitch_of_A`; lora_B: a row for each of its rows, of all ranks. Ranks are filled up to eight with zeros.
#pragma once
#include "segments.h"

namespace lora_merge {

constexpr int kPartRanks = 8;
constexpr int kFactorsAtOnce = 64;  // that kernels read: as many are there
// Words of so many. Behind the factors the one that they have in common, or 0, and what goes together with all of them.
constexpr int kFactorWords = kFactorsAtOnce + 4, kCommon = kFactorsAtOnce, kNotesOfAll = kFactorsAtOnce + 1;

LORA_MERGE_HD int64_t ranks_of_parts(int64_t rank) { return (rank + kPartRanks - 1) & -int64_t{kPartRanks}; }
LORA_MERGE_HD int64_t pitch_of_A(int64_t cols) { return (cols + kFactorsAtOnce - 1) & -int64_t{kFactorsAtOnce}; }
// Elements from the high parts to the low ones.
LORA_MERGE_HD int64_t plane_of_A(int64_t cols, int64_t rank) { return ranks_of_parts(rank) * pitch_of_A(cols); }
LORA_MERGE_HD int64_t plane_of_B(int64_t rows, int64_t rank) { return ranks_of_parts(rank) * rows; }
// Where vector i has its factor, in words.
LORA_MERGE_HD int64_t factor_at(int64_t i) { return i / kFactorsAtOnce * kFactorWords + i % kFactorsAtOnce; }
// Addresses.
LORA_MERGE_HD int64_t factors_of_A(const Segment& s) { return s.parts_A + 4 * plane_of_A(s.cols, s.rank); }
LORA_MERGE_HD int64_t factors_of_B(const Segment& s) { return s.parts_B + 4 * plane_of_B(s.rows, s.rank); }

// A factor's word: a float32 that is a power of two, with notes where its fraction would be. `apart`: the vector's
// elements are 2^-apart of its largest one, or more; `lack`: it goes together with vectors that are up to kAnyApart -
// lack apart. All notes of several vectors: the largest of each.
constexpr uint32_t kExponent = 0x7f800000, kNote = 0x3ff, kLackAt = 10;
constexpr uint32_t kAllZeros = 1u << 22;  // of a vector: any factor does
constexpr uint32_t kAnyApart = 0x200;     // an element is zero, and others are not
constexpr uint32_t kAlone = 0x3ff;        // no vector goes together with this one

LORA_MERGE_HD uint32_t apart_of(uint32_t word) { return word & kNote; }
LORA_MERGE_HD uint32_t lack_of(uint32_t word) { return word >> kLackAt & kNote; }
LORA_MERGE_HD uint32_t note_of(uint32_t apart, uint32_t lack) { return apart | lack << kLackAt; }

// Of a vector whose largest element is 2^top to 2^(top + 1) when scaled, and which has so many elements beneath 2^-13.
// They lack `small` * 2^-35 of the largest element that they meet. It meets elements of 2^-apart of that or more, so
// that this is 2^-24 of the sum at the most where apart <= 11 + top - log2(small).
LORA_MERGE_HD uint32_t lack_for(int small, int top) {
  if (small == 0) return 0;
  int reach = 11 + top;
  while (small > 1) --reach, small = (small + 1) / 2;
  return kAnyApart - static_cast<uint32_t>(reach);
}

// Whether an element of the result has to be summed once more; or, of notes of several vectors, whether one may.
LORA_MERGE_HD bool needs_exact(uint32_t row, uint32_t col) {
  return apart_of(row) + lack_of(col) > kAnyApart || apart_of(col) + lack_of(row) > kAnyApart;
}

}  // namespace lora_merge
