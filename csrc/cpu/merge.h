// The kernel itself, once for all instruction sets. A translation unit defines, in a namespace of its own,
//
//     F                              a vector of kLanes float32
//     kLanes, kTileRows              a register tile is kTileRows x (2 kLanes)
//     load(p)                        kLanes elements of type float, BFloat16 or Float16
//     store(p, F), store(p, F, F)    kLanes or 2 kLanes elements, rounded to nearest even
//     stream(to, from)               a cache line past the caches; drain() waits for all of them
//     set(float), add, mul, fma      fma(a, b, c) = a * b + c, rounded once
//     prefetch(p)                    asks for the cache line of p
//     narrow(a, b)                   kLanes words each, below 2^16, to 2 kLanes halves
//     widen(x, to)                   2 kLanes halves to kLanes words each, to[0] and to[1]
//     at_most_3(x)                   the lesser of 3 and each of kLanes words or 2 kLanes halves
//     put_codes(x, to)               2 kLanes halves below 4 to kLanes / 2 bytes
//     plus_codes(x, from)            x plus these
//     Escapes                        what of these bytes tells which codes are 3: any() of them, or all(), the first lowest
//     no_nan(F)                      every NaN replaced by one value that is no NaN
//     multiply_halves(x)             of each 64-bit word, the product of its halves
//     quiet(F)                       every NaN replaced by the one with bits 7fc00000
//     any_special(t)                 whether a tile F t[kTileRows][2] holds a NaN, or what else store_plain stores wrongly
//     kPlainDiffers                  whether there is a store_plain(p, F, F): as store, of what is not special
//     multiply(a, b, n, start, t)    what Fused sums n <= kRankBlock ranks of a tile by: that of broadcast.h, or another
//     Products                       what sums lora_B lora_A: Fused of fused.h, or Tiled of tiled.h
//
// and includes this file there. It has no #include, so that no inline function of a library is compiled for an
// instruction set that the machine may lack.
//
// The bits of an element depend on nothing but its own inputs: the rank is summed in the order of `Products`; edges go
// through the same vector operations on copies.

template <class T>
inline void store_plain(T* p, F a, F b) {
  store(p, a, b);
}

// A unit's part of a matrix.
template <class T>
struct View {
  T* corner;
  int64_t step[2];

  View(int64_t address, const int64_t* stride, const Unit& unit)
      : corner(reinterpret_cast<T*>(address) + unit.row * stride[0] + unit.col * stride[1]),
        step{stride[0], stride[1]} {}

  T* at(int64_t i, int64_t j) const { return corner + i * step[0] + j * step[1]; }
};

#include "packed.h"

// Goes over a unit: `sink.take(i, j, rows, cols, products)` gets the tile at (i, j), counted from the unit's corner, of
// which rows x cols are inside; `sink.end(i, j, rows, cols)` follows a row of tiles. The source, `sink.w`, is asked for
// one row of tiles ahead.
template <class Sink>
void sweep(const Unit& unit, Scratch& m, const Sink& sink) {
  const int64_t chunk = Products::chunk(*unit.segment);
  Products products(unit, m);
  for (int64_t j0 = 0; j0 < unit.cols; j0 += chunk) {
    const int64_t end = unit.cols - j0 < chunk ? unit.cols : j0 + chunk;
    products.pack_columns(j0, end - j0);
    for (int64_t i = 0; i < unit.rows; i += kTileRows) {
      const int64_t rows = unit.rows - i < kTileRows ? unit.rows - i : kTileRows;
      products.pack_rows(i);
      for (int64_t j = j0; j < end; j += kPanel) {
        const auto* next = sink.w.at(i + kTileRows, j);
#pragma GCC unroll 16
        for (int l = 0; l < kTileRows; ++l) prefetch(next + l * sink.w.step[0]);
        sink.take(i, j, rows, end - j < kPanel ? end - j : kPanel, products);
      }
      sink.end(i, j0, rows, end - j0);
    }
  }
}

// A row of a tile from memory, the elements outside as zeros.
template <class T>
inline void gather(const T* from, int64_t stride, int64_t n, T* to) {
  if (stride == 1 && n == kPanel) {
    __builtin_memcpy(to, from, kPanel * sizeof(T));
  } else {
    for (int64_t l = 0; l < kPanel; ++l) to[l] = l < n ? from[l * stride] : T{};
  }
}

template <class T>
inline void scatter(const T* from, T* to, int64_t stride, int64_t n) {
  if (stride == 1 && n == kPanel) {
    __builtin_memcpy(to, from, kPanel * sizeof(T));
  } else {
    for (int64_t l = 0; l < n; ++l) to[l * stride] = from[l];
  }
}

// Stochastic rounding works on vectors of words, the vector extension that GCC and Clang share.
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// float32 bits, free of NaN payloads, to an output type: the dropped bits are compared with random ones by adding and
// cutting. The same function as round_stochastic in lora_merge/kernels/reference.py.
// Chance gives no infinity: above the largest number, it goes where nearest rounding goes.
inline Words round_stochastic(Words word, Words random, const BFloat16*) {
  const Words magnitude = word & 0x7fffffff, kept = (magnitude + (random >> 16)) >> 16;
  const Words half = magnitude - 0x7f7f0000 < 0x8000 ? Words{} + 0x7f7f : kept;
  return (magnitude - 0x7f7f8000 < 0x8000 ? Words{} + 0x7f80 : half) | (word >> 31 << 15);
}

inline Words round_stochastic(Words word, Words random, const Float16*) {
  const Words exponent = word >> 23 & 0xff, fraction = word & 0x7fffff;
  // 13 bits fall off a normal number, more below 2^-14, where the step stays 2^-24. Where more than 31 do, the first of
  // them are cut: below 2^-31 the probability is a multiple of 2^-31.
  const Words significand = exponent > 0 ? fraction | 0x800000 : fraction;
  const Words cut = exponent < 64 ? Words{} + 31 : 95 - exponent;
  const Words known = exponent < 95 ? significand >> cut : significand;
  const Words deep = exponent < 95 ? Words{} + 31 : 126 - exponent;
  const Words shift = exponent >= 113 ? Words{} + 13 : deep;
  const Words kept = (known + (random & (((Words{} + 1) << shift) - 1))) >> shift;
  const Words half = exponent >= 113 ? kept + ((exponent - 113) << 10) : kept;
  const Words size = word & 0x7fffffff;
  const Words largest = half > 0x7bff ? Words{} + 0x7bff : half;
  const Words finite = size >= 0x477ff000 ? Words{} + 0x7c00 : largest;
  const Words magnitude = size > 0x7f800000 ? Words{} + 0x7e00 : finite;
  return magnitude | (word >> 31 << 15);
}

// Where the elements of a tile's row lie in the whole weight, against the first of them.
struct Offsets {
  Words low[2], high[2];

  explicit Offsets(uint64_t pitch) {
    for (uint64_t e = 0; e < kPanel; ++e) {
      low[e / kLanes][e % kLanes] = static_cast<uint32_t>(e * pitch);
      high[e / kLanes][e % kLanes] = static_cast<uint32_t>(e * pitch >> 32);
    }
  }
};

// random_bits of segments.h for kLanes elements.
inline Words avalanches(Words x) {
  x ^= x >> 16;
  x *= 0x7feb352dU;
  x ^= x >> 15;
  x *= 0x846ca68bU;
  x ^= x >> 16;
  return x;
}

inline Words random_words(uint64_t key, uint64_t index, Words low_offset, Words high_offset) {
  const Words low = static_cast<uint32_t>(index) + low_offset;
  const Words carry = low < low_offset ? Words{} + 1 : Words{};
  const Words high = static_cast<uint32_t>(index >> 32) + high_offset + carry;
  return avalanches(avalanches(low ^ static_cast<uint32_t>(key)) ^ high ^ static_cast<uint32_t>(key >> 32));
}

template <class Out>
inline void store_rounded(Out* to, F x, Words random) {
  Words word;
  __builtin_memcpy(&word, &x, sizeof word);
  const Halves half = __builtin_convertvector(round_stochastic(word, random, to), Halves);
  __builtin_memcpy(to, &half, sizeof half);
}

// Whether some of these are infinite or NaN: without the sign, their bits reach 7c00, and with 400 more the highest one.
inline bool any_beyond(const Float16* from, int64_t n, int64_t step) {
  Halves all{};
  uint16_t rest = 0;
  int64_t j = 0;
  for (; step == 1 && j + kLanes <= n; j += kLanes) {
    Halves some;
    __builtin_memcpy(&some, from + j, sizeof some);
    all |= (some & 0x7fff) + 0x400;
  }
  for (; j < n; ++j) rest |= (from[j * step].bits & 0x7fff) + 0x400;
  for (int l = 0; l < kLanes; ++l) rest |= all[l];
  return rest >> 15 != 0;
}
inline bool any_beyond(const void*, int64_t, int64_t) { return false; }  // other types reach as far as the sums do

inline bool is_coded(const Segment& s) { return s.dtypes >> 32 != kPlain; }

inline float scaling_of(const Segment& s) { return s.rank > 0 ? static_cast<float>(s.scaling) : 1; }


// Writes round(scale * (w + scaling * sums)).
template <class Source, class Out, bool kStochastic>
struct Merge {
  using W = typename Source::Element;

  Source w;
  View<Out> to;
  const float* row_scale;
  F scaling;
  bool adjacent;  // elements of a row, in tiles of the source and in the destination
  float* sums;    // of a tile that does not lie inside
  bool* beyond;   // set where a result is infinite or NaN, of float16
  Out* stripe;    // where rows of tiles wait for whole cache lines; null: they go straight to `to`
  uint64_t key, first, pitch[2];
  Offsets offsets;

  // Whether pieces of rows are whole cache lines (and a rest at the end).
  static bool streams(const Unit& unit) {
    const Segment& s = *unit.segment;
    const int64_t pitch = s.destination_stride[0] * sizeof(Out), piece = Products::chunk(s) * sizeof(Out);
    return unit.streamed && s.destination_stride[1] == 1 && ((s.destination | pitch | piece) & (kLine - 1)) == 0;
  }

  Merge(const Segment& s, const Unit& unit, uint64_t seed, Scratch& m)
      : w(unit, m),
        to(s.destination, s.destination_stride, unit),
        row_scale(s.row_scale ? reinterpret_cast<const float*>(s.row_scale) + unit.row : nullptr),
        scaling(set(scaling_of(s))),
        adjacent(w.adjacent() && to.step[1] == 1),
        sums(m.sums),
        beyond(&m.beyond),
        stripe(streams(unit) ? reinterpret_cast<Out*>(m.stripe) : nullptr),
        key(s.key ^ seed),
        first(s.first + unit.row * s.pitch[0] + unit.col * s.pitch[1]),
        pitch{static_cast<uint64_t>(s.pitch[0]), static_cast<uint64_t>(s.pitch[1])},
        offsets(pitch[1]) {}

  void take(int64_t i, int64_t j, int64_t rows, int64_t cols, Products& products) const {
    const Tile<W> tile = w.tile(i, j, rows, cols);
    Out* here = stripe ? stripe + j : to.at(i, j);
    const int64_t step = stripe ? kStripe : to.step[0];
    const float* scale = row_scale ? row_scale + i : nullptr;
    const uint64_t index = first + i * pitch[0] + j * pitch[1];
    if (adjacent && rows == kTileRows && cols == kPanel) {
      finish_tile(products, j, tile.from, tile.step[0], here, step, scale, index);
    } else {
      products.sum(j, sums);
      finish_part(tile, here, step, rows, cols, scale, index);
    }
  }

  // A tile that lies inside, from registers to memory.
  __attribute__((noinline)) void finish_tile(Products& products, int64_t j, const W* from, int64_t w_step, Out* here,
                                             int64_t step, const float* scale, uint64_t index) const {
    const F scaling = this->scaling;
    F t[kTileRows][2];
    products.sum(j, t);
#pragma GCC unroll 16
    for (int l = 0; l < kTileRows; ++l, from += w_step) {
      t[l][0] = fma(scaling, t[l][0], load(from));
      t[l][1] = fma(scaling, t[l][1], load(from + kLanes));
    }
    if (scale) {
#pragma GCC unroll 16
      for (int l = 0; l < kTileRows; ++l) {
        t[l][0] = mul(t[l][0], set(scale[l]));
        t[l][1] = mul(t[l][1], set(scale[l]));
      }
    }
    if (any_special(t)) {
#pragma GCC unroll 16
      for (int l = 0; l < kTileRows; ++l) {
        t[l][0] = quiet(t[l][0]);
        t[l][1] = quiet(t[l][1]);
      }
      if constexpr (kPlainDiffers) {
        for (int l = 0; l < kTileRows; ++l, here += step, index += pitch[0]) put(here, t[l], index);
        return;
      }
    }
#pragma GCC unroll 16
    for (int l = 0; l < kTileRows; ++l, here += step, index += pitch[0]) put_plain(here, t[l], index);
  }

  // A row of tiles is done, and still in the nearest cache.
  void end(int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    for (int64_t l = 0; l < rows; ++l) {
      const Out* done = stripe ? stripe + l * kStripe + j : to.at(i + l, j);
      if (any_beyond(done, cols, stripe ? 1 : to.step[1])) *beyond = true;
    }
    if (!stripe) return;
    const int64_t bytes = cols * sizeof(Out), lines = bytes / kLine * kLine;
    for (int64_t l = 0; l < rows; ++l) {
      const char* from = reinterpret_cast<const char*>(stripe + l * kStripe + j);
      char* here = reinterpret_cast<char*>(to.at(i + l, j));
      for (int64_t b = 0; b < lines; b += kLine) stream(here + b, from + b);
      __builtin_memcpy(here + lines, from + lines, bytes - lines);
    }
  }

  __attribute__((always_inline)) void put(Out* here, const F (&x)[2], uint64_t index) const {
    if constexpr (kStochastic) {
      for (int h = 0; h < 2; ++h) {
        store_rounded(here + h * kLanes, x[h], random_words(key, index, offsets.low[h], offsets.high[h]));
      }
    } else {
      store(here, x[0], x[1]);
    }
  }

  __attribute__((always_inline)) void put_plain(Out* here, const F (&x)[2], uint64_t index) const {
    if constexpr (kStochastic) put(here, x, index);
    else store_plain(here, x[0], x[1]);
  }

  __attribute__((noinline)) void finish_part(Tile<W> tile, Out* here, int64_t step, int64_t rows, int64_t cols,
                                           const float* scale, uint64_t index) const {
    const float* sums = this->sums;
    const W* from = tile.from;
    for (int64_t l = 0; l < rows; ++l, from += tile.step[0], here += step, sums += kPanel, index += pitch[0]) {
      const F factor = set(scale ? scale[l] : 1);
      W some[kPanel];
      Out done[kPanel];
      gather(from, tile.step[1], cols, some);
      const F x[2] = {quiet(mul(fma(scaling, load(sums), load(some)), factor)),
                      quiet(mul(fma(scaling, load(sums + kLanes), load(some + kLanes)), factor))};
      put(done, x, index);
      scatter(done, here, to.step[1], cols);
    }
  }
};

template <class Source, class Out>
void merge_as(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  if constexpr (sizeof(Out) == 2) {  // a float32 output drops nothing
    if (stochastic) return sweep(unit, scratch, Merge<Source, Out, true>(*unit.segment, unit, seed, scratch));
  }
  sweep(unit, scratch, Merge<Source, Out, false>(*unit.segment, unit, seed, scratch));
}

template <class Source>
void merge_from(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  with_dtype(unit.segment->dtypes >> 8,
             [&](auto x) { merge_as<Source, decltype(x)>(unit, stochastic, seed, scratch); });
}

void merge(const Unit& unit, bool stochastic, uint64_t seed, Scratch& scratch) {
  const auto from = [&](auto x) { merge_from<Plain<decltype(x)>>(unit, stochastic, seed, scratch); };
  if (is_coded(*unit.segment)) merge_from<Coded>(unit, stochastic, seed, scratch);
  else with_dtype(unit.segment->dtypes, from);
  if (unit.streamed) drain();
}

inline void add_squares(const float* values, double* to) {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef double Doubles __attribute__((vector_size(8 * kLanes)));
  Floats value;
  Doubles sum;
  __builtin_memcpy(&value, values, sizeof value);
  __builtin_memcpy(&sum, to, sizeof sum);
  const Doubles wide = __builtin_convertvector(value, Doubles);
  sum += wide * wide;
  __builtin_memcpy(to, &sum, sizeof sum);
}

// Squared norms of rows: kNormLanes float64 sums a row, each of the columns equal mod kNormLanes, added in order at
// the end. The square of a float32 is exact in float64, so it makes no difference whether it is fused with the sum.
template <class Source>
struct Norms {
  using W = typename Source::Element;

  Source w;
  F scaling;
  float* sums;
  double (*partial)[kNormLanes];

  void end(int64_t, int64_t, int64_t, int64_t) const {}

  void take(int64_t i, int64_t j, int64_t rows, int64_t cols, Products& products) const {
    products.sum(j, this->sums);
    const float* sums = this->sums;
    const Tile<W> tile = w.tile(i, j, rows, cols);
    for (int64_t l = 0; l < rows; ++l, sums += kPanel) {
      W some[kPanel];
      float values[kPanel];
      gather(tile.from + l * tile.step[0], tile.step[1], cols, some);
      store(values, fma(scaling, load(sums), load(some)), fma(scaling, load(sums + kLanes), load(some + kLanes)));
      for (int64_t e = cols; e < kPanel; ++e) values[e] = 0;
      for (int64_t h = 0; h < kPanel; h += kLanes) add_squares(values + h, partial[i + l] + (j + h) % kNormLanes);
    }
  }
};

template <class Source>
void row_norms_from(const Unit& unit, double* out, Scratch& scratch) {
  const Segment& s = *unit.segment;
  for (int64_t i = 0; i < unit.rows; ++i) {
    for (double& x : scratch.norms[i]) x = 0;
  }
  sweep(unit, scratch, Norms<Source>{Source(unit, scratch), set(scaling_of(s)), scratch.sums, scratch.norms});
  for (int64_t i = 0; i < unit.rows; ++i) {
    out[i] = 0;
    for (const double x : scratch.norms[i]) out[i] += x;
  }
}

void row_norms(const Unit& unit, double* out, Scratch& scratch) {
  if (is_coded(*unit.segment)) return row_norms_from<Coded>(unit, out, scratch);
  with_dtype(unit.segment->dtypes, [&](auto x) { row_norms_from<Plain<decltype(x)>>(unit, out, scratch); });
}
