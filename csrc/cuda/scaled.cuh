// Merging into 8 bits: e4m3 elements of which a group (the whole weight, a row, a block of 128 x 128) shares a scale.
//
// Sums are rounded to bf16 or fp16 as the merge kernel rounds them, and what becomes of these numbers is what vLLM's
// quantisers make of a weight that is loaded (lora_merge/kernels/scaled.py has the rules). Scales need the largest
// magnitude of their group first:
//
//   kScaledMeasure   one pass that writes these alone: by atomic operations on bits, whose order is that of numbers,
//   with
//                    NaN above infinity, so that none hides
//   kScaledConvert   a second pass, with the same products
//   kScaledWhole     both at once, for blocks that lie whole in their segment: a unit is one block wide, and a step of
//                    the block of threads 128 rows; what is merged waits in registers until all warps have met
//
// The walk is that of merge.cuh, two warps side by side; four steps of a warp are the 128 rows.
#pragma once
#include <cuda_fp8.h>

#include "scaled.h"
#include "stream.cuh"

namespace lora_merge {

constexpr float kLargestFp8 = 448.0f;
constexpr int kScaledStride = kStepRows * (kWarps / kScaledColWarps);  // rows from one step of a warp to its next
constexpr int kScaledSteps = kScaledBlock / kScaledStride;
static_assert(kScaledSteps == 4, "two pairs of steps are the rows of a block");

__device__ __forceinline__ const Scaled* scaled_of(const ScaledLaunch& launch) {
  return launch.scaled != nullptr ? launch.scaled : launch.inline_scaled;
}

// Sixteen bits each, as unsigned numbers.
__device__ __forceinline__ uint32_t larger2(uint32_t x, uint32_t y) { return __vmaxu2(x, y); }

// The largest magnitude of eight numbers, and of two in a word: its bits in their own format.
template <typename T>
__device__ __forceinline__ uint32_t largest2(const Packed<T>& x) {
  const uint4 w = x.word[0];
  const uint32_t m = 0x7fff7fff;
  return larger2(larger2(w.x & m, w.y & m), larger2(w.z & m, w.w & m));
}
__device__ __forceinline__ uint32_t larger_half(uint32_t x) { return max(x & 0xffff, x >> 16); }
template <typename T>
__device__ __forceinline__ uint32_t float_bits(uint32_t half) {
  return __float_as_uint(half_as_float(half, std::is_same_v<T, bf16> ? kBFloat16 : kFloat16));
}

// A group's scale, and how elements are divided by it.
struct Divisor {
  float scale, inverse;
  bool divides;  // by one division each; else they are multiplied by the inverse
  bool odd;      // zero, infinite or no number, or its inverse is
  bool hides;    // a quotient that is no number becomes the largest one, as in vLLM's kernel

  __device__ __forceinline__ Divisor(float largest, int kind) {
    divides = kind == kChannel, hides = kind == kTensor;
    if (kind == kTensor) scale = __fdiv_rn(largest, kLargestFp8);
    // A NaN stays one.
    else if (kind == kChannel) scale = larger(__fdiv_rn(largest, kLargestFp8), 1.0f / (kLargestFp8 * 512.0f));
    else scale = __fmul_rn(larger(largest, 1e-4f), 1.0f / kLargestFp8);
    inverse = __fdiv_rn(1.0f, scale);
    odd = !(scale > 0.0f && scale < INFINITY && inverse < INFINITY);
  }
  static __device__ __forceinline__ float larger(float x, float least) { return x < least ? least : x; }

  // Division rounds right: the quotient by the inverse is off by little, and what remains says by how much. (Tried for
  // the fractions of all scales and of all bf16 and fp16 numbers.) What remains of a zero would lose its sign.
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = __fmul_rn(x, inverse);
    return divides ? copysignf(fmaf(fmaf(-quotient, scale, x), inverse, quotient), x) : quotient;
  }
  __device__ __noinline__ float carefully(float x) const {
    const float y = divides ? __fdiv_rn(x, scale) : __fmul_rn(x, inverse);
    return hides ? fmaxf(-kLargestFp8, fminf(y, kLargestFp8)) : y;
  }
};

// Eight numbers in 8 bits.
template <typename T>
__device__ __forceinline__ uint2 convert8(const Packed<T>& x, const Divisor& by) {
  Eight e = unpack(x);
  if (by.odd) {
#pragma unroll
    for (int i = 0; i < 8; ++i) e.value[i] = by.carefully(e.value[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) e.value[i] = by(e.value[i]);
  }
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    pair[i] = __nv_cvt_float2_to_fp8x2(make_float2(e.value[2 * i], e.value[2 * i + 1]), __NV_SATFINITE, __NV_E4M3);
  return make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
}

// Eight columns of a row, as far as they are there.
__device__ __forceinline__ void store8(uint2 bytes, const Segment& s, int row, int col, bool vector) {
  uint8_t* const to = reinterpret_cast<uint8_t*>(s.destination) + row * s.destination_stride[0] + col;
  if (vector && col + 8 <= s.cols) {
    __stcs(reinterpret_cast<uint2*>(to), bytes);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (col + i < s.cols) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
}

// Which group an element is in, and where that has its scale. Groups are as wide as units, or wider.
struct Grid {
  float* const scale;
  uint32_t* const largest;
  const int kind, first_row, first_col, across;
  __device__ __forceinline__ explicit Grid(const Scaled& s)
      : scale(reinterpret_cast<float*>(s.scale)),
        largest(reinterpret_cast<uint32_t*>(s.largest)),
        kind(static_cast<int>(s.kind)),
        first_row(static_cast<int>(s.first_row)),
        first_col(static_cast<int>(s.first_col)),
        across(static_cast<int>(s.across)) {}
  __device__ __forceinline__ int64_t group(int row, int col) const {
    if (kind == kTensor) return 0;
    if (kind == kChannel) return first_row + row;
    return static_cast<int64_t>((first_row + row) / kScaledBlock) * across + (first_col + col) / kScaledBlock;
  }
};

// That share a multiprocessor: what waits in registers leaves no room for two where products take many, too.
template <typename Adapter, int Part>
constexpr int kBlocksOfScaled = kPlanes<Adapter> > 1 && Part == kScaledWhole ? 1 : 2;

template <typename Source, typename T, typename Adapter, int Part>
__global__ void __launch_bounds__(kThreads, kBlocksOfScaled<Adapter, Part>)
    scaled_kernel(const __grid_constant__ ScaledLaunch launch) {
  using In = Stage<Source>;
  extern __shared__ __align__(128) char memory[];
  const uint32_t slot_bytes = slot_bytes_of<Source, T, Adapter>(launch), ring_bytes = launch.stages * slot_bytes;
  bf16* shared_A = reinterpret_cast<bf16*>(memory + ring_bytes);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const int pitch = kScaledBlock + launch.pad;
  const uint32_t a_address = operand_A_address(shared_A, warp % kScaledColWarps, pitch);
  char* const stages = memory + warp * kStageBytes<Source, T>;
  const char* const pieces = memory + kWarps * kStageBytes<Source, T> + threadIdx.x * 16;
  __shared__ int unit_ring[4];
  __shared__ uint32_t met[2][kWarps];
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  Stream<Source, T, Adapter, false> stream(launch, units, memory);
  uint32_t slot = 0;
  const auto after = [&](uint32_t at) { return at + slot_bytes == ring_bytes ? 0 : at + slot_bytes; };
  int meeting = 0;

  int n = 0, unit = units[0];
  for (; unit < launch.n_units; unit = units[++n]) {
    const int number = segment_of(launch, unit);
    const Segment& s = segments_of(launch)[number];
    const Grid grid(scaled_of(launch)[number]);
    __syncthreads();  // the last unit's A is no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int rank = s.rank, chunks = (rank + kChunk - 1) / kChunk;
    const int staged = staged_steps<Source, T>(s, walk);
    const bool staged_B = launch.staged_B && vector_B<Adapter>(s), special = launch.stochastic || s.row_scale != 0;
    const bool over = turned(s), vector = ((s.destination | s.destination_stride[0]) & 7) == 0;
    const float scaling = static_cast<float>(s.scaling);

    if (rank > 0) load_A<Adapter>(shared_A, s, walk.strip, kScaledBlock, pitch);
    __syncthreads();
    const int plane_bytes = up_to_chunk(rank) * pitch * 2;
    uint32_t unit_largest = 0;

    // Merges two steps from `step` on; what is outside is zeros.
    const auto merge = [&](Packed<T>(&out)[2][2], int step) {
      const bool from_stage = step + 2 <= staged, there = step < walk.steps;
      float sum[2][kSums<Adapter>][4] = {};
      if (from_stage) wait_async_all_but<-1>(launch.stages - 2);
      else wait_async_all_but<-1>(0);
      __syncwarp();  // what the other lanes staged
#pragma unroll 1
      for (int c = 0; c < chunks && there; ++c) {
        uint32_t b[2][kPlanes<Adapter>][4], at = slot;
#pragma unroll
        for (int j = 0; j < 2; ++j, at = after(at)) {
          Piece<Adapter> piece{};
          if (!from_stage || !staged_B)
            piece = fetch_B<Adapter>(s, walk.first_row + (step + j) * kScaledStride + group, c * kChunk + quad * 8);
          else if (c * kChunk + quad * 8 < rank)
            piece = staged_piece<Adapter>(pieces + at + c * kPieces<Adapter> * kVector);
          operand_B<Adapter>(b[j], piece);
        }
        multiply_chunk<Adapter, kRoundedSums<Source, T, Adapter>, 2>(sum, a_address + c * kChunk * pitch * 2, pitch,
                                                                     plane_bytes, b, over);
      }
      if constexpr (kPaired<Adapter>) {
        const ColumnFactors columns = column_factors(s, walk.col);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (rank > 0 && there)
            unscale(sum[j], s, columns, walk.first_row + (step + j) * kScaledStride + 2 * quad, walk.col);
      }
      uint32_t at = slot;
#pragma unroll
      for (int j = 0; j < 2; ++j, at = after(at)) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = walk.first_row + (step + j) * kScaledStride + 2 * quad + e;
          Eight x{};
          const bool inside = from_stage || (there && row < walk.row_end && walk.col < s.cols);
          if (from_stage) {
            Packed<Source> base;
#pragma unroll
            for (int i = 0; i < static_cast<int>(sizeof(Source)) / 2; ++i)
              base.word[i] = *reinterpret_cast<const uint4*>(stages + at +
                                                             In::place(2 * quad + e, group * (sizeof(Source) / 2) + i));
            x = unpack(base);
          } else if (inside) {
            x = load_elements<Source>(s, row, walk.col);
          }
          if (rank > 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i) x.value[i] = fmaf(scaling, sum[j][i / 2][i % 2 * 2 + e], x.value[i]);
          }
          if (special && inside) out[j][e] = round_special<T>(x, s, row, walk.col, 2, launch.stochastic, launch.seed);
          else round_nearest8(reinterpret_cast<T(&)[8]>(out[j][e]), x.value);
        }
      }
      __syncwarp();  // all has been read: the slots are free
      if (there) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          slot = after(slot);
          stream.push();
        }
      }
    };
    // Of two steps, each row in its turn: `what(number of the row, packed, row)`.
    const auto each_row = [&](Packed<T>(&out)[2][2], int step, auto what) {
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = walk.first_row + (step + j) * kScaledStride + 2 * quad + e;
          what(out[j][e], row, row < walk.row_end && walk.col < s.cols);
        }
    };

    const int rows = walk.row_end - (walk.first_row - warp / kScaledColWarps * kStepRows);
    const int blocks = (rows + kScaledBlock - 1) / kScaledBlock;
    int step = 0;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      if constexpr (Part == kScaledWhole) {
        Packed<T> held[2][2][2];
        uint32_t largest = 0;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          merge(held[p], step + 2 * p);
          // Rows that are not there are zeros, and so are columns.
          each_row(held[p], 0, [&](const Packed<T>& x, int, bool) { largest = larger2(largest, largest2(x)); });
        }
        largest = __reduce_max_sync(~0u, larger_half(largest));
        if (lane == 0) met[meeting][warp] = largest;
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kWarps; ++w) largest = max(largest, met[meeting][w]);
        meeting ^= 1;
        const Divisor by(__uint_as_float(float_bits<T>(largest)), grid.kind);
        if (threadIdx.x == 0) grid.scale[grid.group(walk.first_row + step * kScaledStride, walk.strip)] = by.scale;
#pragma unroll
        for (int p = 0; p < 2; ++p)
          each_row(held[p], step + 2 * p, [&](const Packed<T>& x, int row, bool inside) {
            const uint2 bytes = convert8(x, by);
            if (inside) store8(bytes, s, row, walk.col, vector);
          });
        step += 4;
      } else {
#pragma unroll 1
        for (int p = 0; p < 2; ++p, step += 2) {
          Packed<T> out[2][2];
          merge(out, step);
          each_row(out, step, [&](const Packed<T>& x, int row, bool inside) {
            if constexpr (Part == kScaledMeasure) {
              uint32_t largest = largest2(x);
              if (grid.kind == kTensor) {
                unit_largest = larger2(unit_largest, largest);
                return;
              }
#pragma unroll
              for (int mask = 4; mask < 32; mask *= 2) largest = larger2(largest, __shfl_xor_sync(~0u, largest, mask));
              if (group == 0 && inside)
                atomicMax(grid.largest + grid.group(row, walk.col), float_bits<T>(larger_half(largest)));
            } else if (inside) {
              const int64_t at = grid.group(row, walk.col);
              const Divisor by(__uint_as_float(__ldg(grid.largest + at)), grid.kind);
              if (walk.col == (grid.kind == kBlock ? walk.strip : 0)) grid.scale[at] = by.scale;
              store8(convert8(x, by), s, row, walk.col, vector);
            }
          });
        }
      }
    }
    if constexpr (Part == kScaledMeasure) {
      if (grid.kind == kTensor) {
        unit_largest = __reduce_max_sync(~0u, larger_half(unit_largest));
        if (lane == 0) atomicMax(grid.largest, float_bits<T>(unit_largest));
      }
    }
#pragma unroll 1
    for (; step < walk.steps; ++step) {  // what the stream counts beyond
      slot = after(slot);
      stream.push();
    }
  }
  units.close();
}

// ---- launching -----------------------------------------------------------------------------------------------------

template <typename Source, typename T, typename Adapter, int Part>
cudaError_t launch_scaled_part(const ScaledLaunch& launch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Source) > sizeof(T) ? sizeof(Source) : sizeof(T);
  const Shape shape = shape_of(launch);
  int device = 0, processors = 0, per_block = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  if (launch.col_warps != kScaledColWarps || launch.rows_per_unit % kScaledBlock != 0 ||
      !accepts(shape, launch.max_rank, kPlanes<Adapter>, kBytes, per_block))
    return cudaErrorInvalidConfiguration;
  const int shared = static_cast<int>(shared_bytes(shape, launch.max_rank, kPlanes<Adapter>, kBytes));
  const auto kernel = scaled_kernel<Source, T, Adapter, Part>;
  error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  const bool two =
      kBlocksOfScaled<Adapter, Part> == 2 && two_share(shape, launch.max_rank, kPlanes<Adapter>, kBytes, per_processor);
  const int64_t units = launch.n_units, blocks = static_cast<int64_t>(processors) * (two ? 2 : 1);
  kernel<<<static_cast<unsigned>(units < blocks ? units : blocks), kThreads, shared, stream>>>(launch);
  return cudaGetLastError();
}

template <typename Source, typename T, typename Adapter>
cudaError_t launch_scaled_adapters(int part, const ScaledLaunch& launch, cudaStream_t stream) {
  switch (part) {
    case kScaledMeasure: return launch_scaled_part<Source, T, Adapter, kScaledMeasure>(launch, stream);
    case kScaledConvert: return launch_scaled_part<Source, T, Adapter, kScaledConvert>(launch, stream);
    default: return launch_scaled_part<Source, T, Adapter, kScaledWhole>(launch, stream);
  }
}

template <typename Source, typename T>
int launch_scaled_from(int adapters, int part, const ScaledLaunch& launch, cudaStream_t stream) {
  if constexpr (sizeof(Source) == 2)
    if (adapters == kPairs) return launch_scaled_adapters<Source, T, Pair>(part, launch, stream);
  if (adapters == kFloat32) return launch_scaled_adapters<Source, T, float>(part, launch, stream);
  if (adapters == kBFloat16) return launch_scaled_adapters<Source, T, bf16>(part, launch, stream);
  if constexpr (std::is_same_v<Source, __half> && std::is_same_v<T, __half>)
    return launch_scaled_adapters<Source, T, __half>(part, launch, stream);
  return cudaErrorInvalidConfiguration;
}

}  // namespace lora_merge
