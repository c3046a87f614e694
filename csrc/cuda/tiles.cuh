// The base and the result: eight elements a lane, stages in shared memory, rounding, edges.
#pragma once
#include <type_traits>

#include "units.cuh"

namespace lora_merge {

struct Eight {
  float value[8];
};

template <typename Source>
__device__ __noinline__ Eight load_elements(const Segment& s, int row, int col) {
  const Source* from = reinterpret_cast<const Source*>(s.source) + row * s.source_stride[0] + col * s.source_stride[1];
  Eight w;
#pragma unroll
  for (int e = 0; e < 8; ++e) w.value[e] = col + e < s.cols ? to_float(from[e * s.source_stride[1]]) : 0.0f;
  return w;
}

// The stage of a warp's step: eight rows of 64 elements of T, in 16-byte vectors. Vector v of a row lies at v ^ row, so
// that neither eight lanes along a row nor those of the matrix unit's layout meet in a bank.
template <typename T>
struct Stage {
  static constexpr int kAcross = 4 * sizeof(T);   // vectors in a row
  static constexpr int kLaneVectors = sizeof(T);  // that a lane moves: vector i * 32 + lane of the stage
  static constexpr int kRowStep = 32 / kAcross;   // rows from one of them to the next
  static __device__ __forceinline__ uint32_t place(int row, int vector) {
    return (row * kAcross + (vector ^ row)) * 16;
  }
};

// Eight elements, packed.
template <typename T>
struct Packed {
  uint4 word[sizeof(T) / 2];
};

template <typename T>
__device__ __forceinline__ Eight unpack(const Packed<T>& packed) {
  Eight x;
  if constexpr (std::is_same_v<T, bf16>) {
    const uint32_t word[4] = {packed.word[0].x, packed.word[0].y, packed.word[0].z, packed.word[0].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x.value[2 * i] = __uint_as_float(word[i] << 16);
      x.value[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  } else {
    const T* raw = reinterpret_cast<const T*>(packed.word);
#pragma unroll
    for (int e = 0; e < 8; ++e) x.value[e] = to_float(raw[e]);
  }
  return x;
}

// Rounding off the usual path: rows with a factor, stochastic rounding. Pairs of elements are `step` columns apart.
template <typename T>
__device__ __noinline__ Packed<T> round_special(Eight x, const Segment& s, int row, int col, int step, bool stochastic,
                                                uint64_t seed) {
  const float factor = s.row_scale != 0 ? __ldg(reinterpret_cast<const float*>(s.row_scale) + row) : 1.0f;
  const uint64_t key = s.key ^ seed, index = s.first + row * s.pitch[0] + col * s.pitch[1];
  Packed<T> packed;
  T* out = reinterpret_cast<T*>(packed.word);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float value = x.value[e] * factor;
    out[e] = stochastic ? round_stochastic<T>(value, random_bits(key, index + (e / 2 * step + e % 2) * s.pitch[1]))
                        : round_nearest<T>(value);
  }
  return packed;
}

// A row at an edge, or one that is no run of aligned vectors.
template <typename T>
__device__ __noinline__ void store_elements(Eight x, const Segment& s, int row, int col, bool stochastic,
                                            uint64_t seed) {
  const Packed<T> packed = round_special<T>(x, s, row, col, 2, stochastic, seed);
  const T* out = reinterpret_cast<const T*>(packed.word);
  T* to = reinterpret_cast<T*>(s.destination) + row * s.destination_stride[0] + col * s.destination_stride[1];
#pragma unroll
  for (int e = 0; e < 8; ++e)
    if (col + e < s.cols) to[e * s.destination_stride[1]] = out[e];
}

}  // namespace lora_merge
