// Tracked merges in one pass each way: W is read once and written once, and the codes, 2 bits an element.
//
// `estimate = round(W' - D)` lies a step or so from W. A code says bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2, or
// 3, an escape, whose raw bits are kept in the arena in the order of threads. W comes back bit for bit whatever the
// values are: an unmerge computes the same estimate from the same W' and adapters. Whether it is the same W' is told by
// a checksum of each tile: one that was written meanwhile is left as it is.
//
// Blocks walk down strips as in merge.cuh, and their products are the same, so W' is what a merge writes. A tile is a
// step of all warps: it is computed in registers, the block adds up what escapes, asks for room once, and writes. The W
// and B of the next tile are on their way meanwhile.
#include <cuda_runtime.h>

#include <type_traits>

#include "adapters.cuh"
#include "tiles.cuh"
#include "tracked.h"

namespace lora_merge {
namespace {

template <typename T>
using Raw = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

// Eight elements of a row as raw bits, packed.
template <typename T>
struct Row {
  uint4 vector[sizeof(T) / 2];

  __device__ __forceinline__ uint32_t& word(int i) {
    uint4& v = vector[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }
  __device__ __forceinline__ Raw<T> get(int i) {
    if constexpr (sizeof(T) == 4) return word(i);
    else return static_cast<Raw<T>>(word(i / 2) >> 16 * (i % 2));
  }
  __device__ __forceinline__ void put(int i, Raw<T> bits) {
    if constexpr (sizeof(T) == 4) word(i) = bits;
    else word(i / 2) = i % 2 ? (word(i / 2) & 0xffff) | static_cast<uint32_t>(bits) << 16 : (word(i / 2) & ~0xffffu) | bits;
  }
};

template <typename T>
__device__ __noinline__ Row<T> load_row_elements(const Segment& s, int row, int col) {
  Row<T> x{};
  const Raw<T>* from = reinterpret_cast<const Raw<T>*>(s.source) + row * s.source_stride[0] + col * s.source_stride[1];
  if (row < s.rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (col + i < s.cols) x.put(i, from[i * s.source_stride[1]]);
  }
  return x;
}

template <typename T>
__device__ __noinline__ void store_row_elements(Row<T> x, const Segment& s, int row, int col) {
  Raw<T>* to = reinterpret_cast<Raw<T>*>(s.source) + row * s.source_stride[0] + col * s.source_stride[1];
  if (row < s.rows) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (col + i < s.cols) to[i * s.source_stride[1]] = x.get(i);
  }
}

// A row of a tile; `whole` tiles lie inside and are runs of aligned vectors.
template <typename T>
__device__ __forceinline__ Row<T> load_row(const Segment& s, int row, int col, bool whole) {
  if (!whole) return load_row_elements<T>(s, row, col);
  Row<T> x;
  const uint4* from =
      reinterpret_cast<const uint4*>(s.source + (row * s.source_stride[0] + col) * static_cast<int64_t>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) x.vector[i] = __ldcs(from + i);
  return x;
}

template <typename T>
__device__ __forceinline__ void store_row(const Row<T>& x, const Segment& s, int row, int col, bool whole) {
  if (!whole) return store_row_elements<T>(x, s, row, col);
  uint4* to = reinterpret_cast<uint4*>(s.source + (row * s.source_stride[0] + col) * static_cast<int64_t>(sizeof(T)));
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i) __stcs(to + i, x.vector[i]);
}

template <typename T>
__device__ __forceinline__ float value_of(Raw<T> bits) {
  if constexpr (sizeof(T) == 4) return __uint_as_float(bits);
  else return half_as_float(bits, std::is_same_v<T, bf16> ? kBFloat16 : kFloat16);
}

// Rounded once. There is one NaN: the bits of one that is computed are nobody's promise.
template <typename T>
__device__ __forceinline__ Raw<T> estimate_of(float x) {
  const T y = round_nearest<T>(x != x ? __uint_as_float(0x7fffffff) : x);
  if constexpr (sizeof(T) == 4) return __float_as_uint(y);
  else if constexpr (std::is_same_v<T, bf16>) return __bfloat16_as_ushort(y);
  else return __half_as_ushort(y);
}

// NH (Black et al. 1999, "UMAC") of what a thread has of a tile: products of pairs of words, each added to a number that
// depends on its place.
template <typename T>
__device__ __forceinline__ unsigned long long checksum(Row<T> (&rows)[2]) {
  const uint32_t key = threadIdx.x * 0x9e3779b9u;
  unsigned long long sum = 0;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
#pragma unroll
    for (int i = 0; i < 2 * static_cast<int>(sizeof(T)); i += 2) {
      const uint32_t place = e * 2 * sizeof(T) + i;
      sum += static_cast<unsigned long long>(rows[e].word(i) + (key + place * 0x85ebca6bu)) *
             (rows[e].word(i + 1) + (key + (place + 1) * 0xc2b2ae35u));
    }
  }
  return sum;
}

// Eight ranks of a row of B; what lies outside is zeros.
template <bool Wide>
__device__ __forceinline__ Piece<Wide> load_piece(const Segment& s, int row, int k, bool vector) {
  if (!vector) return fetch_B<Wide>(s, row, k);
  Piece<Wide> piece{};
  if (row < s.rows && k < s.rank) {
    const uint4* from = reinterpret_cast<const uint4*>(s.lora_B + (row * s.lora_B_stride[0] + k) * (Wide ? 4 : 2));
#pragma unroll
    for (int i = 0; i < (Wide ? 2 : 1); ++i) {
      const uint4 v = __ldg(from + i);
      piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
    }
  }
  return piece;
}

template <typename T, bool Wide, bool Undo>
__global__ void __launch_bounds__(kThreads, Wide || sizeof(T) == 4 ? 2 : 3)
    tracked_kernel(const __grid_constant__ Launch launch, const __grid_constant__ TrackedJournal journal) {
  extern __shared__ __align__(128) char memory[];
  bf16* shared_A = reinterpret_cast<bf16*>(memory);
  __shared__ int unit_ring[4], totals[2][kWarps];
  __shared__ long long granted[2];
  __shared__ unsigned long long sums[2][kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const int width = launch.col_warps * 64, pitch = width + launch.margin, stride = Walk::row_stride(launch);
  const uint32_t a_address = operand_A_address(shared_A, warp % launch.col_warps, pitch);
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();

  int turn = 0;  // of the two sets of shared words: one is written while the other is still read
  int n = 0;
  for (int unit = units[0]; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    __syncthreads();  // the last unit's A is no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int rank = s.rank, chunks = (rank + kChunk - 1) / kChunk, across = s.units_across;
    const int row_warp = warp / launch.col_warps, begin = walk.first_row - row_warp * kStepRows;
    const int tiles = (walk.row_end - begin + stride - 1) / stride;
    const bool aligned = aligned16(s.source, s.source_stride, sizeof(T)) && walk.strip + width <= s.cols;
    const bool vector = rank > 0 && vector_B<Wide>(s);
    const float scaling = static_cast<float>(s.scaling);
    const float* const row_scale = reinterpret_cast<const float*>(s.row_scale);
    const int64_t first_tile = static_cast<int64_t>(s.key) + static_cast<int64_t>(begin / stride) * across +
                               walk.strip / width;
    if (rank > 0) load_A<Wide>(shared_A, s, walk.strip, width, pitch);
    __syncthreads();
    const int plane_bytes = up_to_chunk(rank) * pitch * 2;

    const auto whole_tile = [&](int step) { return aligned && begin + (step + 1) * stride <= walk.row_end; };
    Row<T> next[2];
    Piece<Wide> next_piece{};
    const auto ask = [&](int step) {
      const int row = walk.first_row + step * stride;
#pragma unroll
      for (int e = 0; e < 2; ++e) next[e] = load_row<T>(s, row + 2 * quad + e, walk.col, whole_tile(step));
      if (rank > 0) next_piece = load_piece<Wide>(s, row + group, quad * 8, vector);
    };
    ask(0);

#pragma unroll 1
    for (int step = 0; step < tiles; ++step) {
      const int row = walk.first_row + step * stride;
      const int64_t tile = first_tile + static_cast<int64_t>(step) * across;
      Row<T> base[2] = {next[0], next[1]};
      const Piece<Wide> piece = next_piece;
      if (step + 1 < tiles) ask(step + 1);
      const int64_t place = journal.places[tile];
      if (Undo ? place < 0 : place >= 0) continue;  // the same for all threads
      uint32_t code = Undo ? __ldcs(journal.codes + tile * kThreads + threadIdx.x) : 0;
      const unsigned long long written = Undo ? journal.sums[tile] : 0;

      float sum[1][4][4] = {};
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        uint32_t b[1][Wide ? 3 : 1][4];
        operand_B<Wide>(b[0], c == 0 ? piece : load_piece<Wide>(s, row + group, c * kChunk + quad * 8, vector));
        multiply_chunk<Wide, 1>(sum, a_address + c * kChunk * pitch * 2, pitch, plane_bytes, b);
      }

      Row<T> result[2]{};  // W', or the estimate of W
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int r = row + 2 * quad + e;
        const float factor = row_scale != nullptr && r < s.rows ? __ldg(row_scale + r) : 1.0f;
        const float inverse = row_scale != nullptr ? 1.0f / factor : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float product = sum[0][i / 2][i % 2 * 2 + e];
          Raw<T> merged = base[e].get(i);
          if constexpr (!Undo) {
            float x = value_of<T>(merged);
            if (rank > 0) x = fmaf(scaling, product, x);
            if (row_scale != nullptr) x *= factor;
            const T y = round_nearest<T>(x);
            if constexpr (sizeof(T) == 4) merged = __float_as_uint(y);
            else merged = *reinterpret_cast<const Raw<T>*>(&y);
          }
          float x = value_of<T>(merged);
          if (row_scale != nullptr) x *= inverse;
          if (rank > 0) x = fmaf(-scaling, product, x);
          const Raw<T> estimate = estimate_of<T>(x);
          const int shift = 16 * e + 2 * i;
          if constexpr (Undo) {
            result[e].put(i, static_cast<Raw<T>>(estimate + (code >> shift & 3) - 1));
          } else {
            const Raw<T> away = static_cast<Raw<T>>(base[e].get(i) - estimate + 1);
            const bool inside = r < walk.row_end && walk.col + i < s.cols;
            if (inside) code |= (away > 2 ? 3u : static_cast<uint32_t>(away)) << shift;
            result[e].put(i, inside ? merged : Raw<T>{0});  // as it is loaded again
          }
        }
      }

      // Where this thread's escaped elements lie among the tile's.
      uint32_t escapes = code & code >> 1 & 0x55555555u;
      int index = __popc(escapes);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(~0u, index, d);
        if (lane >= d) index += other;
      }
      unsigned long long held = checksum<T>(Undo ? base : result);
      held = static_cast<unsigned long long>(__reduce_add_sync(~0u, static_cast<uint32_t>(held >> 32))) << 32 |
             __reduce_add_sync(~0u, static_cast<uint32_t>(held));
      if (lane == 31) totals[turn][warp] = index, sums[turn][warp] = held;
      index -= __popc(escapes);
      __syncthreads();
      int total = 0;
      held = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (w == warp) index += total;
        total += totals[turn][w];
        held += sums[turn][w];
      }
      long long from = place;
      if constexpr (!Undo) {
        if (threadIdx.x == 0) {
          const unsigned long long bytes = (total * sizeof(T) + 3) & ~3ull;
          from = bytes == 0 ? 0 : static_cast<long long>(atomicAdd(journal.counter, bytes));
          if (from + static_cast<long long>(bytes) > journal.room) {
            atomicAdd(journal.counter + 1, bytes);
            from = -1;
          }
          journal.places[tile] = from;
          journal.sums[tile] = held;
          granted[turn] = from;
        }
        __syncthreads();
        from = granted[turn];
      }
      turn ^= 1;
      if (Undo ? held != written : from < 0) {  // others wrote it, or no room: the tile stays as it is
        if (Undo && threadIdx.x == 0) atomicAdd(journal.counter + 2, 1ull);
        continue;
      }

      Raw<T>* const escaped = reinterpret_cast<Raw<T>*>(journal.arena + from) + index;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int shift = 16 * e + 2 * i;
          if (escapes >> shift & 1) {
            Raw<T>* const slot = escaped + __popc(escapes & ((1u << shift) - 1));
            if constexpr (Undo) result[e].put(i, *slot);
            else *slot = base[e].get(i);
          }
        }
        if (!whole_tile(step) && row + 2 * quad + e >= walk.row_end) continue;  // another unit's row
        store_row<T>(result[e], s, row + 2 * quad + e, walk.col, whole_tile(step));
      }
      if constexpr (Undo) {
        if (threadIdx.x == 0) journal.places[tile] = -1;  // all threads read it before the barrier
      } else {
        __stcs(journal.codes + tile * kThreads + threadIdx.x, code);
      }
    }
  }
  units.close();
}

template <typename T, bool Wide, bool Undo>
cudaError_t launch_typed(const Launch& launch, const TrackedJournal& journal, cudaStream_t stream) {
  int device = 0, processors = 0, resident = 0;
  const int planes = Wide ? 3 : 1, ranks = (launch.max_rank + kChunk - 1) / kChunk * kChunk;
  const int shared = ranks * (launch.col_warps * 64 + launch.margin) * planes * static_cast<int>(sizeof(bf16));
  const auto kernel = tracked_kernel<T, Wide, Undo>;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared);
  if (error != cudaSuccess) return error;
  const int blocks = processors * (resident > 0 ? resident : 1);
  kernel<<<launch.n_units < blocks ? launch.n_units : blocks, kThreads, shared, stream>>>(launch, journal);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_dtype(bool wide, bool undo, const Launch& launch, const TrackedJournal& journal, cudaStream_t stream) {
  if (wide) {
    return undo ? launch_typed<T, true, true>(launch, journal, stream)
                : launch_typed<T, true, false>(launch, journal, stream);
  }
  return undo ? launch_typed<T, false, true>(launch, journal, stream)
              : launch_typed<T, false, false>(launch, journal, stream);
}

}  // namespace

int launch_tracked(int dtype, bool wide, bool undo, const Launch& launch, const TrackedJournal& journal, void* stream) {
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case kBFloat16: return launch_dtype<bf16>(wide, undo, launch, journal, on);
    case kFloat16: return launch_dtype<__half>(wide, undo, launch, journal, on);
    default: return launch_dtype<float>(wide, undo, launch, journal, on);
  }
}

}  // namespace lora_merge
