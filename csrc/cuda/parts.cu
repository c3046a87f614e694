// Pairs of fp16 out of the halves of adapters: csrc/parts.h says what they are. Adapters are small, so this is bound by
// their bytes: each number is read from memory once (and of long vectors once more, from the cache), its pair written.
#include "adapters.cuh"

namespace lora_merge {
namespace {

constexpr int kInHand = 4;  // elements that a lane keeps between both readings, where lanes share a vector

// ilogb of a number above zero, by its bits.
__device__ __forceinline__ int exponent_of(uint32_t bits) {
  return bits < 0x00800000u ? -118 - __clz(static_cast<int>(bits)) : static_cast<int>(bits >> 23) - 127;
}

// What is known of a vector once all its elements have been seen; sizes by their bits, whose order is theirs.
struct Seen {
  uint32_t most = 0, least = ~0u;  // of all; of those that are not zero
  int small = 0;                   // elements that are so when scaled
  bool zero = false;

  __device__ __forceinline__ void add(float x) {
    const uint32_t bits = __float_as_uint(x) & 0x7fffffffu;
    most = max(most, bits);
    least = min(least, bits == 0 ? ~0u : bits);
    zero |= bits == 0;
  }
  __device__ __forceinline__ bool finite() const { return most < 0x7f800000u; }
  // Of the lanes of a warp, which share a vector.
  __device__ __forceinline__ void join() {
    most = __reduce_max_sync(~0u, most);
    least = __reduce_min_sync(~0u, least);
    zero = __any_sync(~0u, zero);
  }
  __device__ __forceinline__ void join_small() { small = __reduce_add_sync(~0u, small); }
};

struct Scale {
  float scale = 1;
  int exponent = 0;  // of the scale
  bool alone;

  __device__ __forceinline__ explicit Scale(const Seen& seen) {
    const float most = __uint_as_float(seen.most);
    alone = !seen.finite() || (seen.most > 0 && (most < 0x1p-80f || most > 0x1p100f));
    if (!seen.finite() || seen.most == 0) return;
    exponent = min(max((13 - exponent_of(seen.most)) >> 3, -11), 11) * 8;
    scale = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
  }
  // The factor that undoes it, and notes.
  __device__ __forceinline__ uint32_t word(const Seen& seen) const {
    const uint32_t factor = static_cast<uint32_t>(127 - exponent) << 23;
    if (alone) return factor | note_of(kAlone, kAlone);
    if (seen.most == 0) return factor | kAllZeros;
    const int top = exponent_of(seen.most);
    const uint32_t apart = seen.zero ? kAnyApart : static_cast<uint32_t>(top - exponent_of(seen.least) + 1);
    return factor | note_of(apart, lack_for(seen.small, top + exponent));
  }
};

// Where a half goes.
struct Place {
  uint16_t* parts;
  int64_t of_vector, of_rank, plane;  // elements to the next
  uint32_t* factors;

  __device__ __forceinline__ explicit Place(const Segment& s) : parts(reinterpret_cast<uint16_t*>(s.destination)) {
    const int64_t vectors = s.rows, rank = s.cols;
    const bool is_A = s.key == 0;
    of_vector = is_A ? 1 : ranks_of_parts(rank);
    of_rank = is_A ? pitch_of_A(vectors) : 1;
    plane = is_A ? plane_of_A(vectors, rank) : plane_of_B(vectors, rank);
    factors = reinterpret_cast<uint32_t*>(parts + 2 * plane);
  }
  // An element of a vector, whose ranks begin at `to`.
  __device__ __forceinline__ void write(uint16_t* to, int rank, float x, float scale, int& small) const {
    const float scaled = x * scale;
    const __half high = __float2half_rn(scaled), low = __float2half_rn((scaled - __half2float(high)) * 0x1p11f);
    uint16_t* const at = to + rank * of_rank;
    at[0] = __half_as_ushort(high);
    at[plane] = __half_as_ushort(low);
    small += x != 0 && fabsf(scaled) < 0x1p-13f;
  }
};

// What 64 vectors have in common, and all their notes, by the first of them.
__device__ __forceinline__ void write_common(uint32_t* to, const uint32_t* words, int count) {
  uint32_t common = kAllZeros, apart = 0, lack = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t word = words[i], factor = word & kExponent;
    if (!(word & kAllZeros)) common = common == kAllZeros || common == factor ? factor : 0;
    apart = max(apart, apart_of(word)), lack = max(lack, lack_of(word));
  }
  to[kCommon] = common == kAllZeros ? words[0] & kExponent : common;
  to[kNotesOfAll] = note_of(apart, lack);
}

__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ Launch launch) {
  static_assert(kPartVectors == kThreads && kThreads % kFactorsAtOnce == 0);
  __shared__ uint32_t words[kPartVectors];
  for (int unit = blockIdx.x; unit < launch.n_units; unit += gridDim.x) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    const int64_t first = (unit - s.unit_begin) * kPartVectors;
    const int rank = s.cols, dtype = s.dtypes & 0xff, count = min(static_cast<int64_t>(kPartVectors), s.rows - first);
    const Place place(s);
    const auto element = [&](int64_t vector, int k) {
      return load_as_float(s.source, vector * s.source_stride[0] + k * s.source_stride[1], dtype);
    };
    if (s.source_stride[1] == 1 && s.source_stride[0] != 1) {  // a warp takes a vector, as long as they are
      const int lane = threadIdx.x % 32;
#pragma unroll 2
      for (int v = threadIdx.x / 32; v < count; v += kWarps) {
        Seen seen;
        float in_hand[kInHand];
#pragma unroll
        for (int i = 0; i < kInHand; ++i)
          if (const int k = lane + i * 32; k < rank) seen.add(in_hand[i] = element(first + v, k));
        for (int k = lane + kInHand * 32; k < rank; k += 32) seen.add(element(first + v, k));
        seen.join();
        const Scale scale(seen);
        uint16_t* const to = place.parts + (first + v) * place.of_vector;
#pragma unroll
        for (int i = 0; i < kInHand; ++i)
          if (const int k = lane + i * 32; k < rank) place.write(to, k, in_hand[i], scale.scale, seen.small);
        for (int k = lane + kInHand * 32; k < rank; k += 32)
          place.write(to, k, element(first + v, k), scale.scale, seen.small);
        seen.join_small();
        if (lane == 0) words[v] = scale.word(seen);
      }
    } else if (threadIdx.x < count) {  // a lane takes one
      const int64_t vector = first + threadIdx.x;
      uint16_t* const to = place.parts + vector * place.of_vector;
      Seen seen;
#pragma unroll 8
      for (int k = 0; k < rank; ++k) seen.add(element(vector, k));
      const Scale scale(seen);
#pragma unroll 8
      for (int k = 0; k < rank; ++k) place.write(to, k, element(vector, k), scale.scale, seen.small);
      words[threadIdx.x] = scale.word(seen);
    }
    __syncthreads();
    const int v = threadIdx.x;
    if (v < count) place.factors[factor_at(first + v)] = words[v];
    if (v < count && v % kFactorsAtOnce == 0)
      write_common(place.factors + factor_at(first + v), words + v, min(kFactorsAtOnce, count - v));
    __syncthreads();
  }
}

}  // namespace

int launch_parts(const Launch& launch, void* stream) {
  const int blocks = launch.n_units < 65535 ? launch.n_units : 65535;
  parts_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(launch);
  return cudaGetLastError();
}

}  // namespace lora_merge
