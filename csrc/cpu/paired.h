// lora_B lora_A by AVX-512's products of bf16 pairs, where both are bf16; by Fused, of fused.h, after which this is
// included, where they are not.
//
// One instruction does what two fused multiply-adds in float32 do, first of the upper halves, then of the lower ones,
// each rounded to nearest: so with the earlier of two ranks in the upper half the bits are those of Fused. But it takes
// denormals for zeros. So tiles with anything in their rows of lora_B or columns of lora_A that might make one are left
// to Fused (`odd` in avx512.h); nothing shows which ones.

// A word for each two ranks.
constexpr int64_t kPairBlock = kRankBlock / 2;

class Paired {
 public:
  // Whether this processor's instruction is that: sums that come out otherwise in another order, or rounded once.
  static bool in_order() {
    const float sums[] = {0x1p24f, 0x1p24f, 1, 1, 0x1p24f, 3}, uppers[] = {1, -0x1p24f, 0x1p24f, 0x1p30f, 1, 0x1.8p23f};
    const float lowers[] = {-0x1p24f, 1, -0x1p24f, -0x1p30f, 1, 0x1p-1f};
    for (int i = 0; i < 6; ++i) {
      const __m512i upper = _mm512_castps_si512(set(uppers[i])), lower = _mm512_castps_si512(set(lowers[i]));
      const __m512bh factors = words(_mm512_or_si512(upper, _mm512_srli_epi32(lower, 16)));
      const __m512bh ones = words(_mm512_set1_epi32(0x3f803f80));
      float got[kLanes], wanted[kLanes];
      store(got, _mm512_dpbf16_ps(set(sums[i]), factors, ones));
      store(wanted, fma(set(lowers[i]), set(1), fma(set(uppers[i]), set(1), set(sums[i]))));
      if (__builtin_memcmp(got, wanted, sizeof got) != 0) return false;
    }
    return true;
  }

  Paired(const Unit& unit, Scratch& scratch)
      : fused_(unit, scratch),
        unit_(unit),
        m_(scratch),
        rank_(unit.segment->rank),
        pairs_((rank_ + 1) / 2),
        paired_(serves(*unit.segment)),
        a_(reinterpret_cast<uint32_t*>(scratch.tiles_a)),
        b_(reinterpret_cast<uint32_t*>(scratch.tiles_b)) {}

  static bool serves(const Segment& s) {
    return s.rank > 1 && (s.dtypes >> 16 & 0xff) == kBFloat16 && (s.dtypes >> 24 & 0xff) == kBFloat16;
  }

  static int64_t chunk(const Segment& s) {
    if (!serves(s)) return Fused::chunk(s);
    const int64_t fit = 2 * kPackedA / ((s.rank + 1) / 2) / kPanel * kPanel;
    return fit < kUnitCols ? fit : kUnitCols;
  }

  void pack_columns(int64_t j, int64_t n) {
    first_ = j;
    if (!paired_) return fused_.pack_columns(j, n);
    const Segment& s = *unit_.segment;
    const int64_t* step = s.lora_A_stride;
    uint32_t* to = a_;
    for (int64_t c = 0; c < n; c += kPanel) {
      const int64_t width = n - c < kPanel ? n - c : kPanel;
      const BFloat16* from = reinterpret_cast<const BFloat16*>(s.lora_A) + (unit_.col + j + c) * step[1];
      alignas(64) float upper[kPanel] = {}, lower[kPanel] = {};
      bool odds = false;
      for (int64_t k = 0; k < rank_; k += 2, from += 2 * step[0], to += kPanel) {
        widen(from, step[1], width, upper);
        if (k + 1 < rank_) widen(from + step[0], step[1], width, lower);
        else store(lower, set(0), set(0));
        odds |= pair(upper, lower, to) | pair(upper + kLanes, lower + kLanes, to + kLanes);
      }
      odd_columns_[c / kPanel] = odds;
    }
  }

  void pack_rows(int64_t i) {
    row_ = i, rows_packed_ = false, odd_rows_ = false;
    if (!paired_) return fused_.pack_rows(i);
    const Segment& s = *unit_.segment;
    const int64_t* step = s.lora_B_stride;
    for (int64_t l = 0; l < kTileRows; ++l) {
      alignas(64) float row[kMaxRank + kLanes];
      if (i + l < unit_.rows) {
        widen(reinterpret_cast<const BFloat16*>(s.lora_B) + (unit_.row + i + l) * step[0], step[1], rank_, row);
      } else {
        for (int64_t k = 0; k < rank_; k += kLanes) store(row + k, set(0));
      }
      __mmask16 odds = 0;
      for (int64_t k = 0; k < rank_; k += kLanes) odds |= odd(load(row + k));
      odd_rows_ |= odds != 0;
      for (int64_t k = 0; k < pairs_; ++k) {
        uint32_t upper, lower;
        __builtin_memcpy(&upper, row + 2 * k, sizeof upper);
        __builtin_memcpy(&lower, row + 2 * k + 1, sizeof lower);
        b_[(k / kPairBlock * kTileRows + l) * kPairBlock + k % kPairBlock] = upper | lower >> 16;
      }
    }
  }

  void sum(int64_t j, float* sums) {
    if (!paired_) return fused_.sum(j, sums);
    if (odd_rows_ || odd_columns_[(j - first_) / kPanel]) return sum_odd(j, sums);
    add_all(j, pairs_, sums);
  }

  __attribute__((always_inline)) void sum(int64_t j, F (&t)[kTileRows][2]) {
    if (!paired_) return fused_.sum(j, t);
    if (__builtin_expect(odd_rows_ || odd_columns_[(j - first_) / kPanel], 0)) {
      sum_odd(j, m_.sums);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        t[i][0] = load(m_.sums + i * kPanel), t[i][1] = load(m_.sums + i * kPanel + kLanes);
      }
      return;
    }
    const int64_t before = (pairs_ - 1) / kPairBlock * kPairBlock;
    if (before > 0) add_all(j, before, m_.sums);
    multiply_pairs(a_ + (j - first_) * pairs_ + before * kPanel, b_ + before * kTileRows, pairs_ - before, t);
    if (before > 0) add_sums(m_.sums, t);
  }

 private:
  // kLanes words; whether something is odd.
  static bool pair(const float* upper, const float* lower, uint32_t* to) {
    const F x = load(upper), y = load(lower);
    _mm512_storeu_si512(to, _mm512_or_si512(_mm512_castps_si512(x), _mm512_srli_epi32(_mm512_castps_si512(y), 16)));
    return (odd(x) | odd(y)) != 0;
  }

  static __m512bh words(__m512i x) { return reinterpret_cast<__m512bh>(x); }

  __attribute__((always_inline)) static void multiply_pairs(const uint32_t* a, const uint32_t* b, int64_t pairs,
                                                            F (&t)[kTileRows][2]) {
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) t[i][0] = t[i][1] = set(0);
#pragma GCC unroll 2
    for (int64_t k = 0; k < pairs; ++k) {
      const __m512bh a0 = words(_mm512_loadu_si512(a + k * kPanel));
      const __m512bh a1 = words(_mm512_loadu_si512(a + k * kPanel + kLanes));
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        const __m512bh x = words(_mm512_set1_epi32(static_cast<int>(b[i * kPairBlock + k])));
        t[i][0] = _mm512_dpbf16_ps(t[i][0], x, a0);
        t[i][1] = _mm512_dpbf16_ps(t[i][1], x, a1);
      }
    }
  }

  // The first pairs, block by block, in memory.
  __attribute__((noinline)) void add_all(int64_t j, int64_t pairs, float* sums) const {
    const uint32_t* a = a_ + (j - first_) * pairs_;
    for (int64_t k = 0; k < pairs; k += kPairBlock) {
      F t[kTileRows][2];
      multiply_pairs(a + k * kPanel, b_ + k * kTileRows, pairs - k < kPairBlock ? pairs - k : kPairBlock, t);
      if (k > 0) add_sums(sums, t);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) store(sums + i * kPanel, t[i][0], t[i][1]);
    }
  }

  __attribute__((noinline)) void sum_odd(int64_t j, float* sums) {
    fused_.pack_columns(j, unit_.cols - j < kPanel ? unit_.cols - j : kPanel);
    if (!rows_packed_) fused_.pack_rows(row_);
    rows_packed_ = true;
    fused_.sum(j, sums);
  }

  Fused fused_;
  const Unit& unit_;
  Scratch& m_;
  int64_t rank_, pairs_;
  bool paired_;
  uint32_t* a_;  // [panel][pair][kPanel]
  uint32_t* b_;  // [block of pairs][kTileRows][kPairBlock]
  int64_t first_ = 0, row_ = 0;
  bool rows_packed_ = false;  // for Fused
  bool odd_rows_ = false;
  bool odd_columns_[kUnitCols / kPanel] = {};
};
