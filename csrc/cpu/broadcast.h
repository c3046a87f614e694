// `multiply` for vectors whose loads can fill all lanes with one float32; included before fused.h.

// One rank block of a tile of kTileRows x 2 kLanes sums, in registers: B block x A panel, on top of `start`.
__attribute__((always_inline)) inline void multiply(const float* a, const float* b, int64_t depth, float start,
                                                    F (&t)[kTileRows][2]) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileRows; ++i) t[i][0] = t[i][1] = set(start);
#pragma GCC unroll 2
  for (int64_t k = 0; k < depth; ++k) {
    const F a0 = load(a + 2 * k * kLanes), a1 = load(a + (2 * k + 1) * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      const F x = set(b[i * kRankBlock + k]);
      t[i][0] = fma(x, a0, t[i][0]);
      t[i][1] = fma(x, a1, t[i][1]);
    }
  }
}
