// The kernel itself, once for all instruction sets. A translation unit defines, in a namespace of its own,
//
//     F                              a vector of kLanes float32
//     kLanes, kTileRows              a register tile is kTileRows x (2 kLanes)
//     load(p), store(p, F)           for float, BFloat16 and Float16; store rounds to nearest even
//     set(float), mul, fma           fma(a, b, c) = a * b + c, rounded once
//     quiet(F)                       every NaN replaced by the one with bits 7fc00000
//
// and includes this file there. It has no #include, so that no inline function of a library is compiled for an
// instruction set that the machine may lack.
//
// The bits of an element depend on nothing but its own inputs: the rank is summed in order, by fused multiply-adds
// within blocks of kRankBlock, then block by block; edges go through the same vector operations on copies.

constexpr int64_t kPanel = 2 * kLanes;

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

// lora_B's rows of a unit as float32 [row group][rank block][kTileRows][kRankBlock]; missing rows are zeros.
template <class T>
void pack_b(const Unit& unit, float* to) {
  const Segment& s = *unit.segment;
  const int64_t* step = s.lora_B_stride;
  const T* from = reinterpret_cast<const T*>(s.lora_B) + unit.row * step[0];
  for (int64_t i0 = 0; i0 < unit.rows; i0 += kTileRows) {
    for (int64_t k = 0; k < s.rank; k += kRankBlock) {
      const int64_t depth = s.rank - k < kRankBlock ? s.rank - k : kRankBlock;
      for (int64_t i = i0; i < i0 + kTileRows; ++i, to += kRankBlock) {
        if (i < unit.rows) {
          widen(from + i * step[0] + k * step[1], step[1], depth, to);
        } else {
          for (int64_t l = 0; l < kRankBlock; ++l) to[l] = 0;
        }
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

void pack_b(const Unit& unit, float* to) {
  switch (unit.segment->dtypes >> 24 & 0xff) {
    case kBFloat16: return pack_b<BFloat16>(unit, to);
    case kFloat16: return pack_b<Float16>(unit, to);
    default: return pack_b<float>(unit, to);
  }
}

void pack_a(const Segment& s, int64_t col, int64_t n, float* to) {
  switch (s.dtypes >> 16 & 0xff) {
    case kBFloat16: return pack_a<BFloat16>(s, col, n, to);
    case kFloat16: return pack_a<Float16>(s, col, n, to);
    default: return pack_a<float>(s, col, n, to);
  }
}

// One rank block of a register tile: sums = B block x A panel, or sums += it.
template <bool kFirst>
inline void tile_block(const float* a, const float* b, int64_t depth, float* sums) {
  F total[kTileRows][2];
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) total[i][0] = total[i][1] = set(0);
  for (int64_t k = 0; k < depth; ++k) {
    const F a0 = load(a + k * kPanel), a1 = load(a + k * kPanel + kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const F x = set(b[i * kRankBlock + k]);
      total[i][0] = fma(x, a0, total[i][0]);
      total[i][1] = fma(x, a1, total[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) {
    float* to = sums + i * kMaxChunk;
    store(to, kFirst ? total[i][0] : add(load(to), total[i][0]));
    store(to + kLanes, kFirst ? total[i][1] : add(load(to + kLanes), total[i][1]));
  }
}

// sums[i][j] = sum_k B[i, k] A[k, j] for kTileRows rows and `n` columns. Rank 0 gives -0, which changes no addend.
void tile_sums(const float* a, const float* b, int64_t rank, int64_t n, float* sums) {
  for (int64_t j = 0; j < n; j += kPanel) {
    if (rank == 0) {
      for (int i = 0; i < kTileRows; ++i) {
        store(sums + i * kMaxChunk + j, set(-0.0f));
        store(sums + i * kMaxChunk + j + kLanes, set(-0.0f));
      }
      continue;
    }
    tile_block<true>(a + j * rank, b, rank < kRankBlock ? rank : kRankBlock, sums + j);
    for (int64_t k = kRankBlock; k < rank; k += kRankBlock) {
      const int64_t depth = rank - k < kRankBlock ? rank - k : kRankBlock;
      tile_block<false>(a + j * rank + k * kPanel, b + k * kTileRows, depth, sums + j);
    }
  }
}

// Goes over a unit: `sink.row(i, j, n, sums)` gets n columns of the sums of row i from column j on, counted from the
// unit's corner.
template <class Sink>
void sweep(const Unit& unit, Scratch& m, Sink& sink) {
  const Segment& s = *unit.segment;
  const int64_t fit = kPackedA / (s.rank < 1 ? 1 : s.rank) / kPanel * kPanel;
  const int64_t chunk = fit < kPanel ? kPanel : fit < kMaxChunk ? fit : kMaxChunk;
  if (s.rank > 0) pack_b(unit, m.b);
  for (int64_t j = 0; j < unit.cols; j += chunk) {
    const int64_t n = unit.cols - j < chunk ? unit.cols - j : chunk;
    if (s.rank > 0) pack_a(s, unit.col + j, n, m.a);
    for (int64_t i0 = 0; i0 < unit.rows; i0 += kTileRows) {
      tile_sums(m.a, m.b + i0 * round_up(s.rank, kRankBlock), s.rank, n, m.sums);
      for (int64_t i = i0; i < i0 + kTileRows && i < unit.rows; ++i) {
        sink.row(i, j, n, m.sums + (i - i0) * kMaxChunk);
      }
    }
  }
}

inline F unrounded(F w, F sum, F scaling) { return fma(scaling, sum, w); }

inline F finished(F w, F sum, F scaling, F scale) { return quiet(mul(unrounded(w, sum, scaling), scale)); }

// to = round(scale * (w + scaling * sums)) for one row.
template <class W, class Out>
void finish_nearest(const W* w, int64_t w_step, Out* to, int64_t step, const float* sums, int64_t n, F scaling,
                    F scale) {
  int64_t j = 0;
  if (w_step == 1 && step == 1) {
    for (; j + kLanes <= n; j += kLanes) store(to + j, finished(load(w + j), load(sums + j), scaling, scale));
  }
  for (; j < n; j += kLanes) {
    W some[kLanes] = {};
    Out done[kLanes];
    const int64_t left = n - j < kLanes ? n - j : kLanes;
    for (int64_t l = 0; l < left; ++l) some[l] = w[(j + l) * w_step];
    store(done, finished(load(some), load(sums + j), scaling, scale));
    for (int64_t l = 0; l < left; ++l) to[(j + l) * step] = done[l];
  }
}

// float32 bits, free of NaN payloads, to an output type: the dropped bits are compared with random ones by adding and
// cutting. The same function as round_stochastic in lora_merge/kernels/reference.py.
inline void round_stochastic(uint32_t word, uint32_t random, BFloat16* to) {
  to->bits = static_cast<uint16_t>((word + (random >> 16)) >> 16);
}

inline void round_stochastic(uint32_t word, uint32_t random, Float16* to) {
  const uint32_t exponent = word >> 23 & 0xff, fraction = word & 0x7fffff;
  // 13 bits fall off a normal number, more below 2^-14, where the step stays 2^-24.
  const uint32_t significand = exponent > 0 ? fraction | 0x800000 : fraction;
  const uint32_t deep = 126 - exponent > 31 ? 31 : 126 - exponent;
  const uint32_t shift = exponent >= 113 ? 13 : deep;
  const uint32_t kept = (significand + (random & ((1u << shift) - 1))) >> shift;
  const uint32_t half = exponent >= 113 ? kept + ((exponent - 113) << 10) : kept;
  const uint32_t finite = half > 0x7c00 ? 0x7c00 : half;
  const uint32_t magnitude = (word & 0x7fffffff) > 0x7f800000 ? 0x7e00 : finite;
  to->bits = static_cast<uint16_t>(magnitude | (word >> 31 << 15));
}

// The same with stochastic rounding; `index` and `pitch` place the row's elements in the whole weight.
template <class W, class Out>
void finish_stochastic(const W* w, int64_t w_step, Out* to, int64_t step, float* sums, int64_t n, F scaling, F scale,
                       uint64_t key, uint64_t index, uint64_t pitch) {
  finish_nearest(w, w_step, sums, 1, sums, n, scaling, scale);
  Out done[kMaxChunk];
  for (int64_t j = 0; j < n; ++j) {
    uint32_t word;
    __builtin_memcpy(&word, sums + j, sizeof word);
    round_stochastic(word, random_bits(key, index + static_cast<uint64_t>(j) * pitch), done + j);
  }
  for (int64_t j = 0; j < n; ++j) to[j * step] = done[j];
}

template <class W, class Out>
struct Merge {
  const Unit& unit;
  bool stochastic;
  uint64_t key;
  F scaling;

  void row(int64_t i, int64_t j, int64_t n, float* sums) const {
    const Segment& s = *unit.segment;
    const int64_t r = unit.row + i, c = unit.col + j;
    const W* w = reinterpret_cast<const W*>(s.source) + r * s.source_stride[0] + c * s.source_stride[1];
    Out* to = reinterpret_cast<Out*>(s.destination) + r * s.destination_stride[0] + c * s.destination_stride[1];
    const F scale = set(s.row_scale ? reinterpret_cast<const float*>(s.row_scale)[r] : 1);
    if constexpr (sizeof(Out) == 2) {  // a float32 output drops nothing
      if (stochastic) {
        const uint64_t index = static_cast<uint64_t>(s.first) + r * s.pitch[0] + c * s.pitch[1];
        return finish_stochastic(w, s.source_stride[1], to, s.destination_stride[1], sums, n, scaling, scale, key,
                                 index, s.pitch[1]);
      }
    }
    finish_nearest(w, s.source_stride[1], to, s.destination_stride[1], sums, n, scaling, scale);
  }
};

template <class W, class Out>
void merge_as(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  const Segment& s = *unit.segment;
  Merge<W, Out> sink{unit, stochastic, s.key ^ seed, set(s.rank > 0 ? static_cast<float>(s.scaling) : 1)};
  sweep(unit, scratch, sink);
}

template <class W>
void merge_from(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  switch (unit.segment->dtypes >> 8 & 0xff) {
    case kBFloat16: return merge_as<W, BFloat16>(unit, stochastic, seed, scratch);
    case kFloat16: return merge_as<W, Float16>(unit, stochastic, seed, scratch);
    default: return merge_as<W, float>(unit, stochastic, seed, scratch);
  }
}

void merge(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  switch (unit.segment->dtypes & 0xff) {
    case kBFloat16: return merge_from<BFloat16>(unit, stochastic, seed, scratch);
    case kFloat16: return merge_from<Float16>(unit, stochastic, seed, scratch);
    default: return merge_from<float>(unit, stochastic, seed, scratch);
  }
}

// Squared norms of rows: 16 float64 sums a row, of the columns that are equal mod 16, added in order at the end. The
// square of a float32 is exact in float64, so it makes no difference whether the compiler fuses it with the addition.
template <class W>
struct Norms {
  const Unit& unit;
  F scaling;
  double (*partial)[16];

  void row(int64_t i, int64_t j, int64_t n, float* sums) const {
    const Segment& s = *unit.segment;
    const W* w = reinterpret_cast<const W*>(s.source) + (unit.row + i) * s.source_stride[0] + j * s.source_stride[1];
    double* to = partial[i];
    float values[kMaxChunk];
    widen(w, s.source_stride[1], n, values);
    for (int64_t l = 0; l < n; l += kLanes) {
      store(values + l, unrounded(load(values + l), load(sums + l), scaling));
    }
    for (int64_t l = n; l < round_up(n, 16); ++l) values[l] = 0;
    for (int64_t l = 0; l < n; l += 16) {
      for (int64_t e = 0; e < 16; ++e) to[e] += static_cast<double>(values[l + e]) * values[l + e];
    }
  }
};

template <class W>
void row_norms_from(const Unit& unit, double* out, Scratch& scratch) {
  const Segment& s = *unit.segment;
  Norms<W> sink{unit, set(s.rank > 0 ? static_cast<float>(s.scaling) : 1), scratch.norms};
  for (int64_t i = 0; i < unit.rows; ++i) {
    for (double& x : scratch.norms[i]) x = 0;
  }
  sweep(unit, scratch, sink);
  for (int64_t i = 0; i < unit.rows; ++i) {
    out[i] = 0;
    for (const double x : scratch.norms[i]) out[i] += x;
  }
}

void row_norms(const Unit& unit, double* out, Scratch& scratch) {
  switch (unit.segment->dtypes & 0xff) {
    case kBFloat16: return row_norms_from<BFloat16>(unit, out, scratch);
    case kFloat16: return row_norms_from<Float16>(unit, out, scratch);
    default: return row_norms_from<float>(unit, out, scratch);
  }
}
