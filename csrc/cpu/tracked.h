// Merging with a way back in two bits an element, and that way; included after merge.h, once for each instruction set.
//
// `estimate = round(W' - D)` lies a step or so from W. A code says bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2, or
// 3, an escape, whose raw bits are kept in the order of the sweep. A row of a tile has its codes in two masks, the low
// bits of its kPanel elements and then the high ones; those outside the matrix are no escapes. W comes back bit for bit
// whatever the values are: an unmerge computes the same estimate from the same W' and adapters.

// The raw bits of kLanes elements.
inline Words raw(const float* p) {
  Words x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class T>
inline Words raw(const T* p) {
  Halves x;
  __builtin_memcpy(&x, p, sizeof x);
  return __builtin_convertvector(x, Words);
}

inline void put_raw(float* p, Words x) { __builtin_memcpy(p, &x, sizeof x); }
template <class T>
inline void put_raw(T* p, Words x) {
  const Halves half = __builtin_convertvector(x, Halves);
  __builtin_memcpy(p, &half, sizeof half);
}

inline Words lane_bits(uint32_t mask) {
  Words shift;
  for (uint32_t l = 0; l < kLanes; ++l) shift[l] = l;
  return ((Words{} + mask) >> shift) & 1;
}

constexpr int64_t kMaskBytes = kPanel / 8;
constexpr uint32_t kAllLanes = kPanel == 32 ? ~0u : (1u << (kPanel % 32)) - 1;

// What merging and unmerging share: the rows of a tile, and the estimate.
template <class W>
struct Tracked {
  View<W> w;
  const float* row_scale;
  F plus, minus;
  int64_t panels;

  explicit Tracked(const Unit& unit)
      : w(unit.segment->source, unit.segment->source_stride, unit),
        row_scale(unit.segment->row_scale ? reinterpret_cast<const float*>(unit.segment->row_scale) + unit.row
                                          : nullptr),
        plus(set(scaling_of(*unit.segment))),
        minus(set(-scaling_of(*unit.segment))),
        panels((unit.cols + kPanel - 1) / kPanel) {}

  void end(int64_t, int64_t, int64_t, int64_t) const {}

  int64_t code_at(int64_t i, int64_t j) const { return (i * panels + j / kPanel) * 2 * kMaskBytes; }

  // Raw bits of round(W' / row_scale - D) for the kPanel elements at `merged`; the factor is 1 / row_scale. There is one
  // NaN: the bits of one that is computed are nobody's promise.
  void estimate(const W* merged, const float* sums, F factor, Words (&bits)[2]) const {
    W rounded[kPanel];
    store(rounded, quiet(fma(minus, load(sums), mul(load(merged), factor))),
          quiet(fma(minus, load(sums + kLanes), mul(load(merged + kLanes), factor))));
    for (int h = 0; h < 2; ++h) bits[h] = raw(rounded + h * kLanes);
  }
};

template <class W>
struct Track : Tracked<W> {
  W* merged;
  W* escaped;
  uint8_t* codes;
  int64_t* count;

  Track(const Unit& unit, uint8_t* to, TrackScratch& m, int64_t* n)
      : Tracked<W>(unit),
        merged(reinterpret_cast<W*>(m.merged)),
        escaped(reinterpret_cast<W*>(m.escaped)),
        codes(to),
        count(n) {}

  void take(int64_t i, int64_t j, int64_t rows, int64_t cols, Factors f) const {
    f.sum_all();
    const uint32_t inside = cols == kPanel ? kAllLanes : (1u << cols) - 1;
    W* next = escaped + *count;
    for (int64_t l = 0; l < rows; ++l, f.sums += kPanel) {
      const F factor = set(this->row_scale ? this->row_scale[i + l] : 1);
      const F inverse = set(this->row_scale ? 1 / this->row_scale[i + l] : 1);
      W base[kPanel];
      gather(this->w.at(i + l, j), this->w.step[1], cols, base);
      W* here = merged + (i + l) * kStripe + j;
      store(here, quiet(mul(fma(this->plus, load(f.sums), load(base)), factor)),
            quiet(mul(fma(this->plus, load(f.sums + kLanes), load(base + kLanes)), factor)));
      Words bits[2];
      this->estimate(here, f.sums, inverse, bits);
      uint32_t low = 0, high = 0;
      for (int h = 0; h < 2; ++h) {
        const Words before = raw(base + h * kLanes);
        const Words away = (before - bits[h] + 1) & (sizeof(W) == 4 ? 0xffffffff : 0xffff);
        const Words escape = Words(away > 2);
        low |= sign_bits(away << 31 | escape) << h * kLanes;
        high |= sign_bits(away << 30 | escape) << h * kLanes;
      }
      low &= inside, high &= inside;
      uint8_t* code = codes + this->code_at(i + l, j);
      __builtin_memcpy(code, &low, kMaskBytes);
      __builtin_memcpy(code + kMaskBytes, &high, kMaskBytes);
      for (uint32_t left = low & high; left != 0; left &= left - 1) {
        *next++ = base[__builtin_ctz(left)];
      }
    }
    *count = next - escaped;
  }
};

template <class W>
struct Untrack : Tracked<W> {
  const uint8_t* codes;
  const uint8_t** next;

  Untrack(const Unit& unit, const uint8_t* from, const uint8_t** escaped)
      : Tracked<W>(unit), codes(from), next(escaped) {}

  void take(int64_t i, int64_t j, int64_t rows, int64_t cols, Factors f) const {
    f.sum_all();
    for (int64_t l = 0; l < rows; ++l, f.sums += kPanel) {
      W* here = this->w.at(i + l, j);
      W base[kPanel];
      gather(static_cast<const W*>(here), this->w.step[1], cols, base);
      Words bits[2];
      this->estimate(base, f.sums, set(this->row_scale ? 1 / this->row_scale[i + l] : 1), bits);
      uint32_t low = 0, high = 0;
      const uint8_t* code = codes + this->code_at(i + l, j);
      __builtin_memcpy(&low, code, kMaskBytes);
      __builtin_memcpy(&high, code + kMaskBytes, kMaskBytes);
      for (int h = 0; h < 2; ++h) {
        const Words step = lane_bits(low >> h * kLanes) + lane_bits(high >> h * kLanes) * 2;
        put_raw(base + h * kLanes, bits[h] + step - 1);
      }
      for (uint32_t left = low & high; left != 0; left &= left - 1, *next += sizeof(W)) {
        __builtin_memcpy(base + __builtin_ctz(left), *next, sizeof(W));
      }
      scatter(base, here, this->w.step[1], cols);
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
  switch (unit.segment->dtypes & 0xff) {
    case kBFloat16: return track_as<BFloat16>(unit, codes, scratch);
    case kFloat16: return track_as<Float16>(unit, codes, scratch);
    default: return track_as<float>(unit, codes, scratch);
  }
}

template <class W>
void write_as(const Unit& unit, const TrackScratch& scratch) {
  const View<W> w(unit.segment->source, unit.segment->source_stride, unit);
  for (int64_t i = 0; i < unit.rows; ++i) {
    const W* from = reinterpret_cast<const W*>(scratch.merged) + i * kStripe;
    if (w.step[1] == 1) {
      __builtin_memcpy(w.at(i, 0), from, unit.cols * sizeof(W));
    } else {
      for (int64_t j = 0; j < unit.cols; ++j) *w.at(i, j) = from[j];
    }
  }
}

void write(const Unit& unit, const TrackScratch& scratch) {
  (unit.segment->dtypes & 0xff) == kFloat32 ? write_as<float>(unit, scratch) : write_as<BFloat16>(unit, scratch);
}

void untrack(const Unit& unit, const uint8_t* codes, const uint8_t* escaped, TrackScratch& scratch) {
  switch (unit.segment->dtypes & 0xff) {
    case kBFloat16: return sweep(unit, scratch, Untrack<BFloat16>(unit, codes, &escaped));
    case kFloat16: return sweep(unit, scratch, Untrack<Float16>(unit, codes, &escaped));
    default: return sweep(unit, scratch, Untrack<float>(unit, codes, &escaped));
  }
}
