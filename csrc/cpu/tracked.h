// Merging with a way back in two bits an element, and that way; included after merge.h, once for each instruction set.
//
// `estimate = round(W' - D)` lies a step or so from W. A code says bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2, or
// 3, an escape, whose raw bits are kept in the order of the sweep. A row of a tile has its kPanel codes in kPanel / 4
// bytes; those outside the matrix are no escapes. W comes back bit for bit whatever the values are: an unmerge computes
// the same estimate from the same W' and adapters.

template <class W>
constexpr int64_t kPitch = kTrackPitch / sizeof(W);

typedef uint16_t Codes __attribute__((vector_size(2 * kPanel)));  // of a row of a tile

inline Words bits_of(F x) {
  Words bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline F value_of(Words bits) {
  F x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

template <class W>
inline F value(const W* from) {
  return load(from);
}

// The raw bits of kPanel elements of a row; of an estimate, one less, so that a code is what lies between the two. An
// estimate may round as it likes, as long as it always does so.
template <class W>
struct Row {
  Codes x;

  static Row load(const W* from) {
    Row row;
    __builtin_memcpy(&row.x, from, sizeof row.x);
    return row;
  }
  // To nearest even, in `x` too.
  static Row rounded(F (&x)[2]) {
    W to[kPanel];
    store(to, x[0], x[1]);
    x[0] = value(to), x[1] = value(to + kLanes);
    return load(to);
  }
  static Row estimate(F a, F b) {
    W to[kPanel];
    store(to, a, b);
    return {load(to).x - 1};
  }
  void put(W* to) const { __builtin_memcpy(to, &x, sizeof x); }
  Codes code(const Row& estimate) const { return at_most_3(x - estimate.x); }
  void add(const uint8_t* codes) { x = plus_codes(x, codes); }
};

template <>
inline Row<BFloat16> Row<BFloat16>::rounded(F (&x)[2]) {
  Words bits[2];
  for (int h = 0; h < 2; ++h) {
    bits[h] = bits_of(x[h]);
    bits[h] += (bits[h] >> 16 & 1) + 0x7fff;
    x[h] = value_of(bits[h] & 0xffff0000);
  }
  return {narrow<Codes>(bits[0] >> 16, bits[1] >> 16)};
}
// Halves away from zero: two instructions less than to even.
template <>
inline Row<BFloat16> Row<BFloat16>::estimate(F a, F b) {
  return {narrow<Codes>((bits_of(a) + (0x8000 - 0x10000)) >> 16, (bits_of(b) + (0x8000 - 0x10000)) >> 16)};
}

template <>
struct Row<float> {
  Words x[2];

  static Row load(const float* from) {
    Row row;
    __builtin_memcpy(row.x, from, sizeof row.x);
    return row;
  }
  static Row rounded(F (&x)[2]) { return {{bits_of(x[0]), bits_of(x[1])}}; }
  static Row estimate(F a, F b) { return {{bits_of(a) - 1, bits_of(b) - 1}}; }
  void put(float* to) const { __builtin_memcpy(to, x, sizeof x); }
  Codes code(const Row& estimate) const {
    return narrow<Codes>(at_most_3(x[0] - estimate.x[0]), at_most_3(x[1] - estimate.x[1]));
  }
  void add(const uint8_t* codes) {
    Words wide[2];
    widen(plus_codes(Codes{}, codes), wide);
    x[0] += wide[0], x[1] += wide[1];
  }
};

// What merging and unmerging share: products are summed tile by tile, into `strip`; the weights are gone through row by
// row, when a row of tiles is summed.
template <class W>
struct Tracked {
  View<W> w;
  const float* row_scale;
  F plus, minus;
  float* strip;
  int64_t chunk, row_codes;

  Tracked(const Unit& unit, TrackScratch& m)
      : w(unit.segment->source, unit.segment->source_stride, unit),
        row_scale(unit.segment->row_scale ? reinterpret_cast<const float*>(unit.segment->row_scale) + unit.row
                                          : nullptr),
        plus(set(scaling_of(*unit.segment))),
        minus(set(-scaling_of(*unit.segment))),
        strip(m.stripe),
        chunk(Products::chunk(*unit.segment)),
        row_codes(round_up(unit.cols, kPanel) / 4) {}

  void take(int64_t, int64_t j, int64_t, int64_t, Products& products) const {
    products.sum(j, strip + j % chunk * kTileRows);
  }

  // round(W' / row_scale - D), where `merged` is W' / row_scale.
  Row<W> estimate(const F (&merged)[2], const float* sums) const {
    return Row<W>::estimate(no_nan(fma(minus, load(sums), merged[0])),
                            no_nan(fma(minus, load(sums + kLanes), merged[1])));
  }
};

template <class W>
struct Track : Tracked<W> {
  W* merged;
  W* escaped;
  uint8_t* codes;
  int64_t* count;

  Track(const Unit& unit, uint8_t* to, TrackScratch& m, int64_t* n)
      : Tracked<W>(unit, m),
        merged(reinterpret_cast<W*>(m.merged)),
        escaped(reinterpret_cast<W*>(m.escaped)),
        codes(to),
        count(n) {}

  void end(int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    for (int64_t l = 0; l < rows; ++l) {
      const float* sums = this->strip + l * kPanel;
      this->row_scale ? row<true>(i + l, j, cols, sums) : row<false>(i + l, j, cols, sums);
    }
  }

  template <bool kScaled>
  void row(int64_t i, int64_t j, int64_t cols, const float* sums) const {
    const F factor = set(kScaled ? this->row_scale[i] : 1), inverse = set(kScaled ? 1 / this->row_scale[i] : 1);
    const F plus = this->plus;
    const int64_t step = this->w.step[1];
    const W* from = this->w.at(i, j);
    W* here = merged + i * kPitch<W> + j;
    uint8_t* to = codes + i * this->row_codes + j / 4;
    W* next = escaped + *count;
    for (int64_t left = cols; left > 0; left -= kPanel) {
      W some[kPanel];
      const W* base = from;
      if (step != 1 || left < kPanel) {
        gather(from, step, left < kPanel ? left : kPanel, some);
        base = some;
      }
      F x[2] = {fma(plus, load(sums), load(base)), fma(plus, load(sums + kLanes), load(base + kLanes))};
      if (kScaled) x[0] = mul(x[0], factor), x[1] = mul(x[1], factor);
      x[0] = quiet(x[0]), x[1] = quiet(x[1]);
      Row<W>::rounded(x).put(here);
      if (kScaled) x[0] = mul(x[0], inverse), x[1] = mul(x[1], inverse);
      Codes code = Row<W>::load(base).code(this->estimate(x, sums));
      for (int64_t e = left; e < kPanel; ++e) code[e] = 0;
      put_codes(code, to);
      if (const Escapes escapes(to); __builtin_expect(escapes.any(), 0)) {
        for (uint32_t which = escapes.all(); which != 0; which &= which - 1) *next++ = base[__builtin_ctz(which)];
      }
      from += kPanel * step, sums += kPanel * kTileRows, here += kPanel, to += kPanel / 4;
    }
    *count = next - escaped;
  }
};

template <class W>
struct Untrack : Tracked<W> {
  const uint8_t* codes;
  const uint8_t** next;

  Untrack(const Unit& unit, const uint8_t* from, TrackScratch& m, const uint8_t** escaped)
      : Tracked<W>(unit, m), codes(from), next(escaped) {}

  void end(int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    for (int64_t l = 0; l < rows; ++l) {
      const float* sums = this->strip + l * kPanel;
      this->row_scale ? row<true>(i + l, j, cols, sums) : row<false>(i + l, j, cols, sums);
    }
  }

  template <bool kScaled>
  void row(int64_t i, int64_t j, int64_t cols, const float* sums) const {
    const F inverse = set(kScaled ? 1 / this->row_scale[i] : 1);
    const int64_t step = this->w.step[1];
    W* here = this->w.at(i, j);
    const uint8_t* from = codes + i * this->row_codes + j / 4;
    for (int64_t left = cols; left > 0; left -= kPanel) {
      const int64_t inside = left < kPanel ? left : kPanel;
      const bool whole = step == 1 && left >= kPanel;
      W some[kPanel];
      if (!whole) gather(static_cast<const W*>(here), step, inside, some);
      W* const base = whole ? here : some;
      F x[2] = {load(base), load(base + kLanes)};
      if (kScaled) x[0] = mul(x[0], inverse), x[1] = mul(x[1], inverse);
      Row<W> bits = this->estimate(x, sums);
      bits.add(from);
      bits.put(base);
      if (const Escapes escapes(from); __builtin_expect(escapes.any(), 0)) {
        for (uint32_t which = escapes.all(); which != 0; which &= which - 1, *next += sizeof(W)) {
          __builtin_memcpy(base + __builtin_ctz(which), *next, sizeof(W));
        }
      }
      if (!whole) scatter(static_cast<const W*>(some), here, step, inside);
      here += kPanel * step, sums += kPanel * kTileRows, from += kPanel / 4;
    }
  }
};

template <class W>
int64_t track_as(const Unit& unit, uint8_t* codes, TrackScratch& scratch) {
  int64_t count = 0;
  sweep(unit, scratch, Track<W>(unit, codes, scratch, &count));
  return count * sizeof(W);
}

int64_t track(const Unit& unit, uint8_t* codes, TrackScratch& scratch) {
  return with_dtype(unit.segment->dtypes, [&](auto x) { return track_as<decltype(x)>(unit, codes, scratch); });
}

// Of the bits of a unit, row by row: a sum of products of pairs of 32-bit words, each added to a number that depends on
// its place (NH, Black et al. 1999, "UMAC").
template <class T>
struct Checksum {
  typedef uint64_t Longs __attribute__((vector_size(sizeof(Words))));
  static constexpr int64_t kStep = sizeof(Words) / sizeof(T);
  Words key, advance;
  Longs sums = {};

  Checksum() {
    for (uint32_t l = 0; l < kLanes; ++l) {
      key[l] = (2 * l + 1) * 0x27d4eb2f;
      advance[l] = l % 2 ? 0x85ebca6b : 0x9e3779b9;
    }
  }

  void add(const T* from) {
    Words x;
    __builtin_memcpy(&x, from, sizeof x);
    sums += multiply_halves(reinterpret_cast<Longs>(x + key));
    key += advance;
  }

  void row(const T* from, int64_t n) {
    int64_t j = 0;
    for (; j + kStep <= n; j += kStep) add(from + j);
    if (j == n) return;
    T rest[kStep] = {};
    for (int64_t l = 0; j + l < n; ++l) rest[l] = from[j + l];
    add(rest);
  }

  uint64_t sum() const {
    uint64_t sum = 0;
    for (int64_t l = 0; l < kLanes / 2; ++l) sum += sums[l];
    return sum;
  }
};

template <class T>
uint64_t write_as(const Unit& unit, const TrackScratch& scratch) {
  const View<T> w(unit.segment->source, unit.segment->source_stride, unit);
  Checksum<T> checksum;
  for (int64_t i = 0; i < unit.rows; ++i) {
    const T* from = reinterpret_cast<const T*>(scratch.merged) + i * kPitch<T>;
    checksum.row(from, unit.cols);
    if (w.step[1] == 1) {
      __builtin_memcpy(w.at(i, 0), from, unit.cols * sizeof(T));
    } else {
      for (int64_t j = 0; j < unit.cols; ++j) *w.at(i, j) = from[j];
    }
  }
  return checksum.sum();
}

uint64_t write(const Unit& unit, const TrackScratch& scratch) {
  return (unit.segment->dtypes & 0xff) == kFloat32 ? write_as<uint32_t>(unit, scratch)
                                                   : write_as<uint16_t>(unit, scratch);
}

template <class T>
uint64_t checksum_as(const Unit& unit) {
  const View<const T> w(unit.segment->source, unit.segment->source_stride, unit);
  Checksum<T> checksum;
  for (int64_t i = 0; i < unit.rows; ++i) {
    T some[kTrackBytes / sizeof(T)];
    const T* from = w.at(i, 0);
    if (w.step[1] != 1) {
      for (int64_t j = 0; j < unit.cols; ++j) some[j] = *w.at(i, j);
      from = some;
    }
    checksum.row(from, unit.cols);
  }
  return checksum.sum();
}

uint64_t checksum(const Unit& unit) {
  return (unit.segment->dtypes & 0xff) == kFloat32 ? checksum_as<uint32_t>(unit) : checksum_as<uint16_t>(unit);
}

void untrack(const Unit& unit, const uint8_t* codes, const uint8_t* escaped, TrackScratch& scratch) {
  with_dtype(unit.segment->dtypes,
             [&](auto x) { sweep(unit, scratch, Untrack<decltype(x)>(unit, codes, scratch, &escaped)); });
}
