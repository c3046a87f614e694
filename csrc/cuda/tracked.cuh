// What tracked merges are made of: codes of words, checksums, escapes, room in the arena.
//
// `estimate = round(W' - D)` lies a step or so from W. A code says bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2,
// or 3, an escape, whose raw bits are kept in the arena. W comes back bit for bit whatever the values are: an unmerge
// computes the same estimate from the same W' and adapters. NaN that is computed has the same bits each time on these
// GPUs. Whether it is the same W' is told by a checksum of each unit: one that was written meanwhile is left as it is.
//
// A unit of the journal is 1024 elements of a warp: two halves of 16 elements a lane, whose codes are a word each. A
// half is two runs of eight elements of a row.
#pragma once
#include <type_traits>

#include "device.cuh"
#include "tracked.h"

namespace lora_merge {

constexpr int kHalves = 2;  // of a unit

template <typename T>
using Raw = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

// ---- words: of one element, or of two -------------------------------------------------------------------------------

template <typename T>
constexpr int kPerWord = 4 / sizeof(T);
template <typename T>
constexpr int kWords = 8 / kPerWord<T>;  // of a run of eight elements
template <typename T>
constexpr uint32_t kOnes = sizeof(T) == 4 ? 1 : 0x00010001;  // of each element

template <typename T>
struct Values {
  float x[kPerWord<T>];

  __device__ __forceinline__ explicit Values(uint32_t word) {
    if constexpr (sizeof(T) == 4) {
      x[0] = __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, bf16>) {
      x[0] = __uint_as_float(word << 16), x[1] = __uint_as_float(word & 0xffff0000u);
    } else {
      const float2 both = __half22float2(*reinterpret_cast<const __half2*>(&word));
      x[0] = both.x, x[1] = both.y;
    }
  }
  // To nearest, as a merge does.
  __device__ __forceinline__ uint32_t rounded() const {
    if constexpr (sizeof(T) == 4) {
      return __float_as_uint(x[0]);
    } else {
      std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2> both;
      if constexpr (std::is_same_v<T, bf16>) both = __floats2bfloat162_rn(x[0], x[1]);
      else both = __floats2half2_rn(x[0], x[1]);
      return *reinterpret_cast<const uint32_t*>(&both);
    }
  }
};

// Two elements are subtracted at once. The low one borrows from the high one only where it escapes (no estimate is
// 0xffff, and where one is 0 the base is no NaN); `repair` knows that.
template <typename T>
__device__ __forceinline__ uint32_t encode(uint32_t base, uint32_t estimate) {
  const uint32_t away = base - estimate + kOnes<T>;
  return sizeof(T) == 4 ? min(away, 3u) : __vminu2(away, 3 * kOnes<T>);
}

template <typename T>
__device__ __forceinline__ uint32_t decode(uint32_t estimate, uint32_t codes) {
  return estimate + (codes & (3 * kOnes<T>)) - kOnes<T>;
}

// Puts an escaped element, the `low` one of its word or not, where the result of `decode` lies; low ones before high
// ones.
template <typename T>
__device__ __forceinline__ void repair(char* at, bool low, Raw<T> raw) {
  Raw<T>* const element = reinterpret_cast<Raw<T>*>(at);
  if constexpr (sizeof(T) == 2) {
    // A low one is the estimate + 2 here. Where base - estimate + 1 was negative, it had borrowed.
    if (low && raw + 3 < *element) ++element[1];
  }
  *element = raw;
}

// ---- halves of a unit -----------------------------------------------------------------------------------------------

// Two runs of eight elements.
template <typename T>
struct Half {
  uint32_t word[2][kWords<T>];
};

// Where the code of word w of run e lies in the half's; its high element's 16 bits further.
template <typename T>
__device__ __forceinline__ constexpr int shift_of(int e, int w) {
  return 2 * (e * kWords<T> + w);
}

template <typename T>
struct Coded {
  Half<T> half;
  uint32_t code;
};

// What lies outside is zeros in the result, as it is loaded again, and no escape: all but the first `there0` columns
// of the first run and `there1` of the second, whose words are `step` columns apart. A call, as it is rare.
template <typename T>
__device__ __noinline__ Coded<T> cut(Coded<T> x, int there0, int there1, int step) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w)
#pragma unroll
      for (int h = 0; h < kPerWord<T>; ++h)
        if (w * step + h >= (e == 0 ? there0 : there1)) {
          x.half.word[e][w] &= sizeof(T) == 4 ? 0u : 0xffffu << 16 * (1 - h);
          x.code &= ~(3u << (shift_of<T>(e, w) + 16 * h));
        }
  return x;
}

// W to W' and codes, or (Undo) W' and codes to W: what was read becomes the result. `sum(e, i)` is that of element i of
// run e; without an adapter there is none.
template <typename T, bool Undo, bool Scaled, typename Sum>
__device__ __forceinline__ void convert_runs(Coded<T>& x, const Sum& sum, float scaling, bool adapted, float factor0,
                                             float factor1) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float factor = e == 0 ? factor0 : factor1, inverse = Scaled ? 1.0f / factor : 1.0f;
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const uint32_t word = x.half.word[e][w];
      uint32_t merged = word;
      if constexpr (!Undo) {
        Values<T> value(word);
#pragma unroll
        for (int h = 0; h < kPerWord<T>; ++h) {
          if (!Scaled || adapted) value.x[h] = fmaf(scaling, sum(e, w * kPerWord<T> + h), value.x[h]);
          if (Scaled) value.x[h] *= factor;
        }
        merged = value.rounded();
      }
      Values<T> value(merged);
#pragma unroll
      for (int h = 0; h < kPerWord<T>; ++h) {
        if (Scaled) value.x[h] *= inverse;
        if (!Scaled || adapted) value.x[h] = fmaf(-scaling, sum(e, w * kPerWord<T> + h), value.x[h]);
      }
      const uint32_t estimate = value.rounded();
      if constexpr (Undo) {
        x.half.word[e][w] = decode<T>(estimate, x.code >> shift_of<T>(e, w));
      } else {
        x.half.word[e][w] = merged;
        x.code += encode<T>(word, estimate) << shift_of<T>(e, w);
      }
    }
  }
}

struct Sums {
  float value[2][8];
};

// With factors of rows: DoRA. A call, as it is rare.
template <typename T, bool Undo>
__device__ __noinline__ Coded<T> convert_scaled(Coded<T> x, Sums sums, float scaling, bool adapted, float factor0,
                                                float factor1) {
  convert_runs<T, Undo, true>(x, [&](int e, int i) { return sums.value[e][i]; }, scaling, adapted, factor0, factor1);
  return x;
}

// `factor(e)` of run e, where rows are `scaled`.
template <typename T, bool Undo, typename Sum, typename Factor>
__device__ __forceinline__ void convert(Coded<T>& x, const Sum& sum, float scaling, bool adapted, bool scaled,
                                        const Factor& factor) {
  if (!scaled) {
    convert_runs<T, Undo, false>(x, sum, scaling, true, 1.0f, 1.0f);
    return;
  }
  Sums sums;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int i = 0; i < 8; ++i) sums.value[e][i] = sum(e, i);
  x = convert_scaled<T, Undo>(x, sums, scaling, adapted, factor(0), factor(1));
}

// Checksum of a unit: each word of a lane is turned by its number and multiplied by an odd number of its own, which
// loses nothing, so that a word that differs is always found. The sign bits of a lane's words then lie at different
// places, so that signs which all change do not add up to nothing.
template <typename T>
__device__ __forceinline__ void add_to(uint32_t& sum, const Half<T>& half, int j) {
  uint32_t part[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const uint32_t number = (j * 2 + e) * kWords<T> + w, word = half.word[e][w];
      part[e] += __funnelshift_l(word, word, number) * (0x9e3779b1u + 0x3c6ef372u * number);
    }
  sum += part[0] + part[1];
}

__device__ __forceinline__ uint32_t checksum_of(uint32_t sum) {
  return __reduce_add_sync(~0u, sum * (2 * (threadIdx.x % 32) * 0x85ebca6bu + 1));
}

// ---- escapes --------------------------------------------------------------------------------------------------------

// Of a lane: bit k + j for what its code of half j has at bits k and k + 1.
__device__ __forceinline__ uint32_t escapes_of(uint32_t code0, uint32_t code1) {
  return (code0 & code0 >> 1 & 0x55555555u) | (code1 & code1 << 1 & 0xaaaaaaaau);
}

// Of a unit: how many escapes there are, and how many of them in the lanes before this one.
struct Escapes {
  int count = 0, before = 0;
  __device__ __forceinline__ explicit Escapes(uint32_t escapes) {
    const uint32_t below = (1u << threadIdx.x % 32) - 1;
    uint32_t left = __popc(escapes);
    int weight = 1;
    const auto add = [&] {
      const uint32_t lanes = __ballot_sync(~0u, left % 2);
      count += weight * __popc(lanes), before += weight * __popc(lanes & below);
      weight *= 2, left /= 2;
    };
    add();  // without a branch up to three a lane: most lanes have fewer
    add();
#pragma unroll 1
    while (__any_sync(~0u, left != 0)) add();
  }
};

// `each(j, at, place)` of every escape, which is the one that `at` codes lie below in half j, `place` being among the
// unit's; `ahead(place)` is called by all lanes before that, as often as the lane has escapes that has most. Low
// elements of a word come before high ones.
template <typename Ahead, typename Each>
__device__ __forceinline__ void for_escapes(uint32_t left, int place, const Ahead& ahead, const Each& each) {
#pragma unroll 1
  for (; __any_sync(~0u, left != 0); ++place) {
    ahead(place);
    if (left != 0) {
      const uint32_t lowest = left & -left, bit = 31 - __clz(lowest);
      left ^= lowest;
      each(bit % 2, bit / 2, place);
    }
  }
}

// Whether a place is one in this arena; then where.
__device__ __forceinline__ bool in_arena(const TrackedArena& arena, int64_t place) {
  return static_cast<uint64_t>(place ^ arena.mark) < static_cast<uint64_t>(kSecondArena);
}
__device__ __forceinline__ int64_t offset_in(const TrackedArena& arena, int64_t place) { return place ^ arena.mark; }

// Records in one access.
__device__ __forceinline__ TrackedRecord load_record(const TrackedRecord* from) {
  const longlong2 both = __ldcs(reinterpret_cast<const longlong2*>(from));
  return {both.x, static_cast<unsigned long long>(both.y)};
}
__device__ __forceinline__ void store_record(TrackedRecord* to, const TrackedRecord& record) {
  __stcs(reinterpret_cast<longlong2*>(to), make_longlong2(record.place, static_cast<long long>(record.checksum)));
}

// A warp's room in the arena: it takes a chunk at a time, so that few units wait for an answer from memory.
struct Room {
  const TrackedJournal& journal;
  int64_t next = 0;
  int left = 0;
  bool closed = false;   // the arena had no more
  uint32_t missing = 0;  // bytes for which there was no room

  // Where a unit may write in the arena; negative: nowhere.
  __device__ __forceinline__ int64_t take(int bytes) {
    if (bytes > left) return ask(bytes);
    const int64_t from = next;
    next += bytes, left -= bytes;
    return from;
  }

  __device__ __forceinline__ int64_t ask(int bytes) {
    const int need = (bytes + 3) & ~3;
    if (!closed) {
      const bool alone = need * 8 >= journal.chunk;  // else a chunk would be left with much of it unused
      const int size = alone ? need : journal.chunk;
      int64_t from = 0;
      if (threadIdx.x % 32 == 0)
        from = static_cast<int64_t>(atomicAdd(journal.counter, static_cast<unsigned long long>(size)));
      from = __shfl_sync(~0u, from, 0);
      closed = from + need > journal.to.room;
      if (!closed) {
        if (!alone) next = from + bytes, left = static_cast<int>(min(from + size, journal.to.room) - next);
        return from;
      }
    }
    missing += need;
    return -1;
  }
};

}  // namespace lora_merge
