// What a merge makes of a box's products, in the kernel for compute capability 9: W plus these, rounded.
#pragma once
#include "merge.cuh"

namespace lora_merge {
namespace hopper {

template <typename T>
struct Rounding {
  struct Read {
    uint32_t word[4][4];
  };

  static __device__ __forceinline__ Read read(const Box& box) {
    Read read;
#pragma unroll
    for (int i = 0; i < 4; ++i) box.load(i, read.word[i]);
    return read;
  }

  // `take(i, rounded)` for each run i of the box.
  template <typename Take>
  static __device__ __forceinline__ void finish(const Box& box, const Read& read, const float (&sum)[32],
                                                const Take& take) {
    const float scaling = box.scaling;
    const auto added = [&](int i) {
      Eight x = unpack(reinterpret_cast<const Packed<T>&>(read.word[i]));
#pragma unroll
      for (int k = 0; k < 8; ++k) x.value[k] = fmaf(scaling, product_of(sum, i, k), x.value[k]);
      return x;
    };
    if (box.special) {
      const Segment& s = box.s;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = min(box.tile.row + box.row + i / 2 * 8, static_cast<int>(s.rows) - 1);
        take(i, round_special<T>(added(i), s, row, box.tile.col + box.col(i), 8, box.launch.stochastic,
                                 box.launch.seed));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Eight x = added(i);
        Packed<T> rounded;
        round_nearest8(reinterpret_cast<T(&)[8]>(rounded), x.value);
        take(i, rounded);
      }
    }
  }
};

template <typename T>
__device__ __forceinline__ void store(const Box& box, int i, const Packed<T>& x) {
  box.store(i, reinterpret_cast<const uint32_t (&)[4]>(x));
}

}  // namespace hopper
}  // namespace lora_merge
