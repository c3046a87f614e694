// Where the elements of a source come from: memory as it is, or codes that are decoded tile by tile into memory of the
// thread's own (lora_merge/kernels/packed.py says what they stand for). Included by merge.h.

// A tile of a source, or more of it than there is: rows x cols elements from `from` on.
template <class W>
struct Tile {
  const W* from;
  int64_t step[2];
};

// Every such class has what is public here.
template <class W>
struct Plain : View<const W> {
  using Element = W;

  Plain(const Unit& unit, Scratch&) : View<const W>(unit.segment->source, unit.segment->source_stride, unit) {}

  // Whether the elements of a tile's row are adjacent.
  bool adjacent() const { return this->step[1] == 1; }
  Tile<W> tile(int64_t i, int64_t j, int64_t, int64_t) const {
    return {this->at(i, j), {this->step[0], this->step[1]}};
  }
};

class Coded {
 public:
  using Element = float;
  int64_t step[2];  // bytes, more or less: of what is asked for ahead

  Coded(const Unit& unit, Scratch& m)
      : s_(*unit.segment),
        int8_((s_.dtypes >> 32) == kInt8),
        dtype_(s_.dtypes & 0xff),
        corner_(s_.place + unit.row * s_.source_stride[0] + unit.col * s_.source_stride[1]),
        tile_(m.decoded) {
    for (int k = 0; k < 2; ++k) step[k] = s_.source_stride[k] >> (int8_ ? 0 : 1);
    for (int64_t k = 0; k < kTable; ++k) code_[k] = !int8_ && k < 16 ? floats(s_.code)[k] : 0;
  }

  bool adjacent() const { return true; }
  const uint8_t* at(int64_t i, int64_t j) const { return bytes(s_.source) + (place(i, j) >> (int8_ ? 0 : 1)); }

  Tile<float> tile(int64_t i, int64_t j, int64_t rows, int64_t cols) const {
    const int64_t along = s_.source_stride[1];
    for (int64_t l = 0; l < rows; ++l) {
      float* to = tile_ + l * kPanel;
      if (along == 1) {
        row(place(i + l, j), cols, to);
      } else {
        for (int64_t e = 0; e < cols; ++e) row(place(i + l, j + e), 1, to + e);
      }
    }
    return {tile_, {kPanel, 1}};
  }

 private:
  static constexpr int64_t kTable = kPanel > 16 ? kPanel : 16;

  static const uint8_t* bytes(int64_t address) { return reinterpret_cast<const uint8_t*>(address); }
  static const float* floats(int64_t address) { return reinterpret_cast<const float*>(address); }

  int64_t place(int64_t i, int64_t j) const { return corner_ + i * s_.source_stride[0] + j * s_.source_stride[1]; }

  float scale(int64_t block) const {
    if (s_.absmax_code == 0) return floats(s_.absmax)[block];
    const float code = floats(s_.absmax_code)[bytes(s_.absmax)[block]];
    const float product = code * floats(s_.absmax_scale)[block / s_.absmax_block];
    return product + *floats(s_.absmax_offset);
  }

  // Adjacent codes, block by block.
  void row(int64_t place, int64_t n, float* to) const {
    while (n > 0) {
      const int64_t block = place / s_.block, rest = (block + 1) * s_.block - place, some = n < rest ? n : rest;
      int8_ ? whole(place, some, scale(block), to) : halves(place, some, scale(block), to);
      place += some, n -= some, to += some;
    }
  }

  void halves(int64_t place, int64_t n, float scale, float* to) const {
    alignas(64) float value[kTable];
    for (int64_t k = 0; k < 16; k += kPanel) {
      rounded(mul(load(code_ + k), set(scale)), mul(load(code_ + k + kLanes), set(scale)), value + k);
    }
    const uint8_t* from = bytes(s_.source) + (place >> 1);
    if (place & 1) *to++ = value[*from++ & 15], --n;
    for (; n > 1; n -= 2, to += 2, ++from) to[0] = value[*from >> 4], to[1] = value[*from & 15];
    if (n > 0) *to = value[*from >> 4];
  }

  void whole(int64_t place, int64_t n, float scale, float* to) const {
    const int8_t* from = reinterpret_cast<const int8_t*>(s_.source) + place;
    for (int64_t e = 0; e < n; e += kPanel) {
      const int64_t some = n - e < kPanel ? n - e : kPanel;
      alignas(64) float x[kPanel] = {};
      for (int64_t l = 0; l < some; ++l) x[l] = from[e + l];
      const F factor = set(scale), step = set(kInt8Step);
      rounded(mul(mul(load(x), factor), step), mul(mul(load(x + kLanes), factor), step), x);
      __builtin_memcpy(to + e, x, some * sizeof(float));
    }
  }

  template <class W>
  static void round_as(F a, F b, float* to) {
    W some[kPanel];
    store(some, quiet(a), quiet(b));
    store(to, load(some), load(some + kLanes));
  }

  // kPanel values in the weight's dtype, as float32.
  void rounded(F a, F b, float* to) const {
    switch (dtype_) {
      case kBFloat16: return round_as<BFloat16>(a, b, to);
      case kFloat16: return round_as<Float16>(a, b, to);
      default: return store(to, a, b);
    }
  }

  const Segment& s_;
  bool int8_;
  int64_t dtype_, corner_;
  float* tile_;
  alignas(64) float code_[kTable];
};
