// Pairs of fp16 out of the halves of adapters: csrc/parts.h says what they are. Adapters are small, so this is bound by
// their bytes: each number is read from memory once (and of long vectors once more, from the cache), its pair written.
#include "adapters.cuh"

namespace lora_merge {
namespace {

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
  // Of lanes of a warp that share a vector.
  __device__ __forceinline__ void join(uint32_t lanes) {
    most = __reduce_max_sync(lanes, most);
    least = __reduce_min_sync(lanes, least);
    zero = __any_sync(lanes, zero);
  }
  __device__ __forceinline__ void join_small(uint32_t lanes) {
    if (__any_sync(lanes, small)) small = __reduce_add_sync(lanes, small);
  }
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
};

// Four elements side by side, of as many vectors or of one. Those that are not there are zeros.
struct Four {
  float x[4] = {};
  int there = 0;

  // `step`: elements from one to the next; `run`: one load may take all.
  __device__ __forceinline__ void load(const Segment& s, int64_t at, int64_t step, int count, bool run) {
    there = max(min(count, 4), 0);
    // Not `there == 4`: ptxas 13.0 asks that of VIMNMX.RELU, which says yes for a negative count, too.
    if (run && count >= 4) {
      const float4 v = __ldg(reinterpret_cast<const float4*>(s.source + at * 4));
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
      return;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (e < there) x[e] = load_as_float(s.source, at + e * step, s.dtypes & 0xff);
  }
};

// Element `x` as a pair: high part in the lower half of the word.
__device__ __forceinline__ uint32_t pair_of(float x, float scale, int& small) {
  const float scaled = x * scale;
  const __half high = __float2half_rn(scaled), low = __float2half_rn((scaled - __half2float(high)) * 0x1p11f);
  small += x != 0 && fabsf(scaled) < 0x1p-13f;
  return __half_as_ushort(high) | static_cast<uint32_t>(__half_as_ushort(low)) << 16;
}

// Four pairs to where the first one's high part lies; places are filled up to four where they lie side by side.
__device__ __forceinline__ void write(uint16_t* to, int64_t step, int64_t plane, const uint32_t (&pair)[4], int there) {
  if (step == 1) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410));
    *reinterpret_cast<uint2*>(to + plane) =
        make_uint2(__byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
    return;
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (e >= there) break;
    to[e * step] = static_cast<uint16_t>(pair[e]);
    to[e * step + plane] = static_cast<uint16_t>(pair[e] >> 16);
  }
}

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

// Vectors whose ranks lie side by side: half a warp or a whole one takes each, `Fours` runs of ranks a lane, and has
// several under way. `words`: of `count` vectors from `first` on.
template <int Fours>
__device__ __forceinline__ void split_along(const Segment& s, const Place& place, int64_t first, int count, bool run,
                                            uint32_t* words) {
  constexpr int kAtOnce = 4 / Fours;
  const int rank = s.cols, lanes = rank <= 64 ? 16 : 32, lane = threadIdx.x % lanes, k = 4 * lane;
  const uint32_t mask = lanes == 32 ? ~0u : 0xffffu << (threadIdx.x & 16);
  const int begin = threadIdx.x / lanes, step = kThreads / lanes;
#pragma unroll 1
  for (int v = begin; v < count; v += kAtOnce * step) {
    Four four[kAtOnce][Fours];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int f = 0; f < Fours; ++f) {
        const int at = k + f * 4 * lanes;
        const int64_t vector = first + v + i * step;
        if (v + i * step < count) four[i][f].load(s, vector * s.source_stride[0] + at, 1, rank - at, run);
      }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (v + i * step >= count) break;
      Seen seen;
#pragma unroll
      for (int f = 0; f < Fours; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (e < four[i][f].there) seen.add(four[i][f].x[e]);
      seen.join(mask);
      const Scale scale(seen);
      uint16_t* const to = place.parts + (first + v + i * step) * place.of_vector;
#pragma unroll
      for (int f = 0; f < Fours; ++f) {
        uint32_t pair[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) pair[e] = pair_of(four[i][f].x[e], scale.scale, seen.small);
        const int at = k + f * 4 * lanes;
        if (four[i][f].there > 0) write(to + at * place.of_rank, place.of_rank, place.plane, pair, four[i][f].there);
      }
      seen.join_small(mask);
      if (lane == 0) words[v + i * step] = scale.word(seen);
    }
  }
}

// Others: a thread takes every fourth rank of four vectors, twice.
__device__ __forceinline__ void split_across(const Segment& s, const Place& place, int64_t first, int count, bool run,
                                             uint32_t* words) {
  constexpr int kAcross = kPartVectors / 4, kRanks = kThreads / kAcross;
  __shared__ Seen all[kPartVectors];
  const int rank = s.cols, v = threadIdx.x % kAcross * 4, begin = threadIdx.x / kAcross;
  const auto four_of = [&](int k) {
    Four four;
    four.load(s, (first + v) * s.source_stride[0] + k * s.source_stride[1], s.source_stride[0], count - v, run);
    return four;
  };
  all[threadIdx.x] = Seen{};
  __syncthreads();
  if (v < count) {
    Seen seen[4];
#pragma unroll 8
    for (int k = begin; k < rank; k += kRanks) {
      const Four four = four_of(k);
#pragma unroll
      for (int e = 0; e < 4; ++e) seen[e].add(four.x[e]);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (begin >= rank) break;
      atomicMax(&all[v + e].most, seen[e].most);
      atomicMin(&all[v + e].least, seen[e].least);
      if (seen[e].zero) all[v + e].zero = true;
    }
  }
  __syncthreads();
  if (v < count) {
    const Scale scale[4] = {Scale(all[v]), Scale(all[v + 1]), Scale(all[v + 2]), Scale(all[v + 3])};
    uint16_t* const to = place.parts + (first + v) * place.of_vector;
    int small[4] = {};
#pragma unroll 8
    for (int k = begin; k < rank; k += kRanks) {
      const Four four = four_of(k);
      uint32_t pair[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) pair[e] = pair_of(four.x[e], scale[e].scale, small[e]);
      write(to + k * place.of_rank, place.of_vector, place.plane, pair, four.there);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (small[e] > 0) atomicAdd(&all[v + e].small, small[e]);
  }
  __syncthreads();
  if (threadIdx.x < count) words[threadIdx.x] = Scale(all[threadIdx.x]).word(all[threadIdx.x]);
}

__global__ void __launch_bounds__(kThreads) parts_kernel(const __grid_constant__ Launch launch) {
  static_assert(kPartVectors == kThreads && kThreads % kFactorsAtOnce == 0);
  static_assert(kMaxRank <= 4 * 32 * 4, "`split_along` has room for so many ranks");
  __shared__ uint32_t words[kPartVectors];
  for (int unit = blockIdx.x; unit < launch.n_units; unit += gridDim.x) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    const int64_t first = (unit - s.unit_begin) * kPartVectors, *const stride = s.source_stride;
    const int rank = s.cols, count = min(static_cast<int64_t>(kPartVectors), s.rows - first);
    const Place place(s);
    const bool along = stride[1] == 1 && stride[0] != 1, beside = along || stride[0] == 1;
    const bool run = beside && (s.dtypes & 0xff) == kFloat32 && ((s.source | stride[along ? 0 : 1] * 4) & 15) == 0;
    if (!along) split_across(s, place, first, count, run, words);
    else if (rank <= 128) split_along<1>(s, place, first, count, run, words);
    else if (rank <= 256) split_along<2>(s, place, first, count, run, words);
    else split_along<4>(s, place, first, count, run, words);
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
