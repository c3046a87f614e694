// lora_B lora_A on a matrix unit that multiplies bf16 tiles and sums in float32; included after fused.h.
//
// An element of an adapter is the sum of a few bf16 parts, each the rounded rest of those before it: one for bf16, two
// for float16, three for float32, which is all of its bits. The product of two parts is exact in float32. Parts p of
// lora_B and q of lora_A are multiplied where p + q <= 2: a part is at most 2^-8 of the one before it, so what is left
// out is below 2^-22 of the product. Of each 32 ranks the smallest products are summed first.
//
// The unit takes denormals for zeros, and a part that is 0 makes NaN of the other factor's infinity, as does the rest
// of an infinity. So elements in a row of lora_B or a column of lora_A that holds anything but zeros and 2^-50 <= |x| <
// 2^50 are summed by fused multiply-adds. That, and the order of a sum, depends on the row and the column alone: also
// where a table holds a weight turned over, and lora_A and lora_B in each other's place.

// Eight tiles of 16 rows of 64 bytes. In memory from the start: to a compiler the instruction reads 8 bytes of it.
struct alignas(64) TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
const TileConfig kTileConfig{1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Of segments with adapters.
class Tiled {
 public:
  Tiled(const Unit& unit, Scratch& scratch)
      : fused_(unit, scratch),
        unit_(unit),
        m_(scratch),
        rank_(unit.segment->rank),
        steps_(round_up(rank_, kDeep) / kDeep),
        parts_a_(parts(unit.segment->dtypes >> 16 & 0xff)),
        parts_b_(parts(unit.segment->dtypes >> 24 & 0xff)),
        turned_(turned(*unit.segment)) {
    _tile_loadconfig(&kTileConfig);
  }
  ~Tiled() { _tile_release(); }
  Tiled(const Tiled&) = delete;
  Tiled& operator=(const Tiled&) = delete;

  // Whether it is, as measured. Each pair of parts costs as much as some ranks of Fused, where W is float32 and memory
  // binds longer as more; half an instruction's ranks are the least.
  static bool faster(const Segment& s) {
    const int64_t a = parts(s.dtypes >> 16 & 0xff), b = parts(s.dtypes >> 24 & 0xff);
    int64_t pairs = 0;
    for (int64_t p = 0; p < b; ++p) pairs += a < kMaxParts - p ? a : kMaxParts - p;
    return s.rank >= kDeep / 2 && s.rank >= pairs * ((s.dtypes & 0xff) == kFloat32 ? 8 : 5);
  }

  static int64_t chunk(const Segment& s) {
    const int64_t column = parts(s.dtypes >> 16 & 0xff) * round_up(s.rank, kDeep);
    const int64_t fit = kTiledA / column / kPanel * kPanel;
    return fit < kUnitCols ? fit : kUnitCols;
  }

  void pack_columns(int64_t j, int64_t n) {
    first_ = j, end_ = j + n;
    with_dtype(unit_.segment->dtypes >> 16, [&](auto x) { pack_columns_of<decltype(x)>(); });
  }

  void pack_rows(int64_t i) {
    row_ = i, rows_packed_ = false;
    with_dtype(unit_.segment->dtypes >> 24, [&](auto x) { pack_rows_of<decltype(x)>(); });
    multiply_tiles(0);
  }

  // The matrix unit works on two tiles at a time, while those before are made use of.
  void sum(int64_t j, float* sums) {
    const int64_t panel = (j - first_) / kPanel;
    if (panel % 2 == 0) {
      _tile_stored(0, sums, kPanel * sizeof(float));
      _tile_stored(1, sums + kLanes, kPanel * sizeof(float));
    } else {
      _tile_stored(2, sums, kPanel * sizeof(float));
      _tile_stored(3, sums + kLanes, kPanel * sizeof(float));
      if (j + kPanel < end_) multiply_tiles(panel + 1);
    }
    const uint32_t odd = odd_columns_[panel];
    if (__builtin_expect(odd | odd_rows_, 0)) sum_odd(j, odd, sums);
  }

  __attribute__((always_inline)) void sum(int64_t j, F (&t)[kTileRows][2]) {
    sum(j, m_.sums);
    const float* sums = m_.sums;
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i, sums += kPanel) t[i][0] = load(sums), t[i][1] = load(sums + kLanes);
  }

 private:
  static constexpr int64_t kTile = 512;  // bf16 elements
  static constexpr int64_t kRow = 64;    // bytes

  static int64_t parts(int64_t dtype) { return dtype == kBFloat16 ? 1 : dtype == kFloat16 ? 2 : kMaxParts; }

  // A panel into tiles 0 and 1, the next one into 2 and 3: an instruction waits 52 cycles for the one before it on the
  // same tile, and could begin after 16.
  void multiply_tiles(int64_t panel) const {
    const uint16_t* a = m_.tiles_a + panel * panel_size();
    const int64_t next = first_ + (panel + 1) * kPanel < end_ ? panel_size() : 0;  // none: the last one twice
    const int64_t part = steps_ * kTile, last = parts_a_ + parts_b_ - 2;
    const int64_t down = turned_ ? parts_a_ : parts_b_, side = turned_ ? parts_b_ : parts_a_;
    asm volatile("" ::: "memory");  // what was packed is in memory: compilers do not see that loads of tiles read it
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < steps_; ++s, a += 2 * kTile) {
      const uint16_t* b = m_.tiles_b + s * kTile;
      for (int64_t sum = last < kMaxParts ? last : kMaxParts - 1; sum >= 0; --sum) {
        for (int64_t x = sum < down ? sum : down - 1; x >= 0 && sum - x < side; --x) {
          const uint16_t* right = a + (turned_ ? x : sum - x) * 2 * part;
          _tile_loadd(4, b + (turned_ ? sum - x : x) * part, kRow);
          _tile_loadd(5, right, kRow);
          _tile_dpbf16ps(0, 4, 5);
          _tile_loadd(6, right + kTile, kRow);
          _tile_dpbf16ps(1, 4, 6);
          _tile_loadd(5, right + next, kRow);
          _tile_dpbf16ps(2, 4, 5);
          _tile_loadd(6, right + next + kTile, kRow);
          _tile_dpbf16ps(3, 4, 6);
        }
      }
    }
  }

  int64_t panel_size() const { return parts_a_ * steps_ * 2 * kTile; }

  // x, then y, rounded to bf16.
  static __m512i rounded(F x, F y) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)); }

  // [panel][part][step][half][pair of ranks][column][rank of the pair]
  template <class T>
  void pack_columns_of() {
    const Segment& s = *unit_.segment;
    const int64_t* step = s.lora_A_stride;
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i second = _mm512_add_epi32(lane, _mm512_set1_epi32(kLanes));
    const __m512i in_turns = _mm512_or_si512(lane, _mm512_slli_epi32(second, 16));
    uint16_t* to = m_.tiles_a;
    for (int64_t j = first_; j < end_; j += kPanel, to += panel_size()) {
      const int64_t width = end_ - j < kPanel ? end_ - j : kPanel;
      const T* from = reinterpret_cast<const T*>(s.lora_A) + (unit_.col + j) * step[1];
      float pair[2][kPanel] = {};
      uint32_t odds = 0;
      for (int64_t k = 0; k < steps_ * kDeep; k += 2) {
        for (int64_t e = 0; e < 2; ++e) {
          if (k + e < rank_) widen(from + (k + e) * step[0], step[1], width, pair[e]);
          else store(pair[e], set(0), set(0));
        }
        for (int64_t h = 0; h < 2; ++h) {
          F x = load(pair[0] + h * kLanes), y = load(pair[1] + h * kLanes);
          odds |= static_cast<uint32_t>(odd(x) | odd(y)) << h * kLanes;
          uint16_t* here = to + ((k / kDeep) * 2 + h) * kTile + k % kDeep * kLanes;
          for (int64_t p = 0; p < parts_a_; ++p, here += steps_ * 2 * kTile) {
            const __m512i both = _mm512_permutexvar_epi16(in_turns, rounded(x, y));
            _mm512_store_si512(here, both);
            x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)));
            y = _mm512_sub_ps(y, _mm512_castsi512_ps(_mm512_and_si512(both, upper)));
          }
        }
      }
      odd_columns_[(j - first_) / kPanel] = odds;
    }
  }

  // [part][step][row][rank]
  template <class T>
  void pack_rows_of() {
    const Segment& s = *unit_.segment;
    const int64_t* step = s.lora_B_stride;
    const T* from = reinterpret_cast<const T*>(s.lora_B) + (unit_.row + row_) * step[0];
    const int64_t depth = steps_ * kDeep;
    odd_rows_ = 0;
    for (int64_t i = 0; i < kTileRows; ++i) {
      alignas(64) float row[kMaxRank];
      const int64_t inside = row_ + i < unit_.rows ? rank_ : 0;
      if (inside > 0) widen(from + i * step[0], step[1], rank_, row);
      for (int64_t k = round_up(inside, kLanes); k < depth; k += kLanes) store(row + k, set(0));
      __mmask16 odds = 0;
      for (int64_t k = 0; k < depth; k += kDeep) {
        F x = load(row + k), y = load(row + k + kLanes);
        odds |= odd(x) | odd(y);
        uint16_t* here = m_.tiles_b + k / kDeep * kTile + i * kDeep;
        for (int64_t p = 0; p < parts_b_; ++p, here += steps_ * kTile) {
          const __m512i both = rounded(x, y);
          _mm512_store_si512(here, both);
          const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(both));
          const __m512i high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1));
          x = _mm512_sub_ps(x, _mm512_castsi512_ps(_mm512_slli_epi32(low, 16)));
          y = _mm512_sub_ps(y, _mm512_castsi512_ps(_mm512_slli_epi32(high, 16)));
        }
      }
      odd_rows_ |= static_cast<uint32_t>(odds != 0) << i;
    }
  }

  // Whole rows and columns of a tile once more.
  __attribute__((noinline)) void sum_odd(int64_t j, uint32_t columns, float* sums) {
    fused_.pack_columns(j, unit_.cols - j < kPanel ? unit_.cols - j : kPanel);
    if (!rows_packed_) fused_.pack_rows(row_);
    rows_packed_ = true;
    fused_.sum(j, m_.odd);
    for (int64_t i = 0; i < kTileRows; ++i) {
      const uint32_t which = odd_rows_ >> i & 1 ? ~0u : columns;
      for (int64_t h = 0; h < kPanel; h += kLanes) {
        _mm512_mask_storeu_ps(sums + i * kPanel + h, which >> h & 0xffff, load(m_.odd + i * kPanel + h));
      }
    }
  }

  Fused fused_;
  const Unit& unit_;
  Scratch& m_;
  int64_t rank_, steps_, parts_a_, parts_b_;
  bool turned_;
  int64_t first_ = 0, end_ = 0, row_ = 0;
  bool rows_packed_ = false;  // for the vectors
  uint32_t odd_rows_ = 0;
  uint32_t odd_columns_[kUnitCols / kPanel];
};
