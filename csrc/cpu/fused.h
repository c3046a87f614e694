// lora_B lora_A by fused multiply-adds in float32; included by a translation unit before merge.h, which says what that
// must define, after `multiply` (broadcast.h has one). The rank is summed in order within blocks of kRankBlock, then
// block by block: the same bits with every instruction set.

constexpr int64_t kPanel = 2 * kLanes;

// `run` with a value of the type that the lowest dtype code of a word stands for.
template <class Run>
auto with_dtype(int64_t dtypes, const Run& run) {
  switch (dtypes & 0xff) {
    case kBFloat16: return run(BFloat16{});
    case kFloat16: return run(Float16{});
    default: return run(float{});
  }
}

// `n` elements to float32. Writes up to a multiple of kLanes, the surplus from zeros.
template <class T>
void widen(const T* from, int64_t stride, int64_t n, float* to) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  }
  for (; i < n; i += kLanes) {
    T some[kLanes] = {};
    for (int64_t l = 0; l < kLanes && i + l < n; ++l) some[l] = from[(i + l) * stride];
    store(to + i, load(some));
  }
}

// lora_B's rows of a tile, the first of them `row` of the unit, as float32 [rank block][kTileRows][kRankBlock]; missing
// rows are zeros.
template <class T>
void pack_b(const Unit& unit, int64_t row, float* to) {
  const Segment& s = *unit.segment;
  const int64_t* step = s.lora_B_stride;
  const T* from = reinterpret_cast<const T*>(s.lora_B) + unit.row * step[0];
  for (int64_t k = 0; k < s.rank; k += kRankBlock) {
    const int64_t depth = s.rank - k < kRankBlock ? s.rank - k : kRankBlock;
    for (int64_t i = row; i < row + kTileRows; ++i, to += kRankBlock) {
      if (i < unit.rows) {
        widen(from + i * step[0] + k * step[1], step[1], depth, to);
      } else {
        for (int64_t l = 0; l < depth; ++l) to[l] = 0;
      }
    }
  }
}

// `n` columns of lora_A as float32 [panel][rank][kPanel]; missing columns are zeros.
template <class T>
void pack_a(const Segment& s, int64_t col, int64_t n, float* to) {
  const int64_t* step = s.lora_A_stride;
  const T* from = reinterpret_cast<const T*>(s.lora_A) + col * step[1];
  for (int64_t j = 0; j < n; j += kPanel) {
    const int64_t width = n - j < kPanel ? n - j : kPanel;
    for (int64_t k = 0; k < s.rank; ++k, to += kPanel) {
      if (width <= kLanes) store(to + kLanes, set(0));
      widen(from + k * step[0] + j * step[1], step[1], width, to);
    }
  }
}

void pack_b(const Unit& unit, int64_t row, float* to) {
  with_dtype(unit.segment->dtypes >> 24, [&](auto x) { pack_b<decltype(x)>(unit, row, to); });
}

void pack_a(const Segment& s, int64_t col, int64_t n, float* to) {
  with_dtype(s.dtypes >> 16, [&](auto x) { pack_a<decltype(x)>(s, col, n, to); });
}

// And what earlier blocks summed.
__attribute__((always_inline)) inline void add_sums(const float* sums, F (&t)[kTileRows][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i, sums += kPanel) {
    t[i][0] = add(load(sums), t[i][0]);
    t[i][1] = add(load(sums + kLanes), t[i][1]);
  }
}

// The same in memory: sums = B block x A panel, or sums += it.
__attribute__((noinline)) void add_block(const float* a, const float* b, int64_t depth, bool first, float* sums) {
  F t[kTileRows][2];
  multiply(a, b, depth, 0, t);
  if (!first) add_sums(sums, t);
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i, sums += kPanel) store(sums, t[i][0], t[i][1]);
}

// The products of a unit, tile by tile. Every such class has what is public here. The tiles of a row are asked for in
// order, each once.
class Fused {
 public:
  Fused(const Unit& unit, Scratch& scratch) : unit_(unit), m_(scratch), rank_(unit.segment->rank) {}

  // Columns of lora_A that are packed at a time.
  static int64_t chunk(const Segment& s) {
    const int64_t fit = kPackedA / (s.rank < 1 ? 1 : s.rank) / kPanel * kPanel;
    return fit < kPanel ? kPanel : fit < kUnitCols ? fit : kUnitCols;
  }

  // `n` columns of lora_A from the unit's column `j` on; the rows of lora_B of the tiles from row `i` on.
  void pack_columns(int64_t j, int64_t n) {
    first_ = j;
    if (rank_ > 0) pack_a(*unit_.segment, unit_.col + j, n, m_.a);
  }
  void pack_rows(int64_t i) {
    if (rank_ > 0) pack_b(unit_, i, m_.b);
  }

  // sums[i][j] = sum_k B[i, k] A[k, j] of the tile that begins at the unit's column `j`. Rank 0 gives -0, which changes
  // no addend.
  void sum(int64_t j, float* sums) const {
    if (rank_ == 0) {
      for (int64_t l = 0; l < kTileRows * kPanel; ++l) sums[l] = -0.0f;
    } else {
      const Last last = sum_all_but_last(j, sums);
      add_block(last.a, last.b, last.depth, rank_ <= kRankBlock, sums);
    }
  }

  // The same in registers, which they are only where this is inlined.
  __attribute__((always_inline)) void sum(int64_t j, F (&t)[kTileRows][2]) const {
    const Last last = sum_all_but_last(j, m_.sums);
    multiply(last.a, last.b, last.depth, rank_ > 0 ? 0.0f : -0.0f, t);
    if (rank_ > kRankBlock) add_sums(m_.sums, t);
  }

 private:
  // The factors of the last rank block.
  struct Last {
    const float* a;
    const float* b;
    int64_t depth;
  };

  Last sum_all_but_last(int64_t j, float* sums) const {
    Last rest{m_.a + (j - first_) * rank_, m_.b, rank_};
    for (bool first = true; rest.depth > kRankBlock; first = false) {
      add_block(rest.a, rest.b, kRankBlock, first, sums);
      rest.a += kRankBlock * kPanel;
      rest.b += kRankBlock * kTileRows;
      rest.depth -= kRankBlock;
    }
    return rest;
  }

  const Unit& unit_;
  Scratch& m_;
  int64_t rank_, first_ = 0;
};
