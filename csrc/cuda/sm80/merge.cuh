// The merge kernel: one persistent grid over all units of a segment table.
//
// A unit is a strip of 64 columns a warp and many rows. Warps walk down their strip on their own, eight rows a step:
//
//   W, B global -> shared by cp.async, several steps ahead, across units, to memory of the warp's own: no barrier.
//   A    the strip's columns of lora_A, all ranks, in shared memory (in registers up to rank 32), loaded once a unit.
//   mma  (A^T)(B^T): columns of W are the 16-wide side of the matrix unit, rows the 8-wide side. Products of bf16,
//        float32 sums. All ranks are summed in the matrix unit. Its adder truncates, by up to 2^-20 of what it adds for
//        16 ranks, which is small against rounding to 16 bits; where W or the result is float32, or the adapters are,
//        32 ranks are summed there and then added to the rest (round to nearest).
//   out  registers -> the stage of W -> global, so that eight lanes write 128 adjacent bytes.
//
// Two permutations make every access 16 bytes wide without a shuffle. Columns: place 16t + 8h + g of a strip in shared
// memory holds column 8g + 2t + h, so that a lane ends up with eight adjacent columns. Ranks: place 16h + 8u + 2q + e
// of 32 holds rank 8q + 4h + 2u + e, so that eight adjacent ranks of a row of B are a lane's operands.
//
// Bits of an element depend on its row of B, its column of A, the rank and W alone: units, edges and alignment choose
// only how data is loaded and stored.
//
// bf16 adapters are multiplied as they are, and fp16 ones of fp16 weights. All others keep float32 accuracy: each
// number is split into three bf16 parts, and the six products above 2^-26 are summed, small ones separately; or
// they come as pairs of fp16 (parts.h; lora_merge/kernels/cuda/table.py says which do), of which three products are.
#pragma once
#include "../copies.cuh"
#include "norms.cuh"
#include "stream.cuh"

namespace lora_merge {

template <typename Source, typename Destination, typename Adapter, bool OneChunk>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ Launch launch) {
  constexpr int kGroup = OneChunk || kPaired<Adapter> ? 1 : 2;  // steps that share a load of A
  using In = Stage<Source>;
  using Out = Stage<Destination>;
  extern __shared__ __align__(128) char memory[];
  const uint32_t slot_bytes = slot_bytes_of<Source, Destination, Adapter>(launch),
                 ring_bytes = stages_of<OneChunk>(launch) * slot_bytes;
  bf16* shared_A = reinterpret_cast<bf16*>(memory + ring_bytes);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const int width = launch.col_warps * 64, pitch = width + launch.pad, stride = Walk::row_stride(launch);
  const uint32_t a_address = operand_A_address(shared_A, warp % launch.col_warps, pitch);
  char* const stages = memory + warp * kStageBytes<Source, Destination>;
  const char* const pieces = memory + kWarps * kStageBytes<Source, Destination> + threadIdx.x * 16;
  __shared__ int unit_ring[4];
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  Stream<Source, Destination, Adapter, OneChunk> stream(launch, units, memory);
  uint32_t slot = 0;
  const auto after = [&](uint32_t at) { return at + slot_bytes == ring_bytes ? 0 : at + slot_bytes; };

  int n = 0, unit = units[0];
  for (; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    __syncthreads();  // the last unit's A is no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int rank = s.rank, chunks = (rank + kChunk - 1) / kChunk, steps = walk.steps;
    const int staged = staged_steps<Source, Destination>(s, walk);
    const bool staged_B = launch.staged_B && vector_B<Adapter>(s), special = launch.stochastic || s.row_scale != 0;
    const bool over = turned(s);
    const float scaling = static_cast<float>(s.scaling);
    const int destination_pitch = s.destination_stride[0] * sizeof(Destination);
    char* to =
        reinterpret_cast<char*>(s.destination) +
        (walk.first_row + lane / Out::kAcross) * s.destination_stride[0] * static_cast<int64_t>(sizeof(Destination)) +
        (walk.col - group * 8) * static_cast<int64_t>(sizeof(Destination)) + lane % Out::kAcross * 16;

    if (rank > 0) load_A<Adapter>(shared_A, s, walk.strip, width, pitch);
    __syncthreads();
    const int plane_bytes = up_to_chunk(rank) * pitch * 2;
    uint32_t resident_A[2][4][4];
    if constexpr (OneChunk) {
      if (rank > 0)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int t = 0; t < 4; ++t) ldmatrix4_trans(resident_A[h][t], a_address + (h * 16 * pitch + t * 16) * 2);
    }

    // Sums of kGroup steps from `step` on, whose first slot is `slot`.
    const auto multiply = [&](float (&sum)[kGroup][kSums<Adapter>][4], int step, bool from_stage) {
      const auto piece_of = [&](int j, int c, uint32_t at) {
        if (!from_stage)
          return fetch_B<Adapter>(s, walk.first_row + (step + j) * stride + group, c * kChunk + quad * 8);
        Piece<Adapter> piece = staged_piece<Adapter>(pieces + at + c * kPieces<Adapter> * kVector);
        if (c * kChunk + quad * 8 >= rank) piece = Piece<Adapter>{};  // nothing was copied there
        return piece;
      };
      if constexpr (OneChunk) {
        if (rank > 0) {
          const Piece<Adapter> piece = piece_of(0, 0, slot);
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int t = 0; t < 4; ++t)
              mma<Adapter>(sum[0][t], resident_A[h][t], piece.word[2 * h], piece.word[2 * h + 1]);
        }
      } else {
#pragma unroll 1
        for (int c = 0; c < chunks; ++c) {
          uint32_t b[kGroup][kPlanes<Adapter>][4], at = slot;
#pragma unroll
          for (int j = 0; j < kGroup; ++j, at = after(at)) operand_B<Adapter>(b[j], piece_of(j, c, at));
          multiply_chunk<Adapter, kRoundedSums<Source, Destination, Adapter>, kGroup>(
              sum, a_address + c * kChunk * pitch * 2, pitch, plane_bytes, b, over);
        }
      }
    };
    [[maybe_unused]] ColumnFactors columns;
    if constexpr (kPaired<Adapter>) columns = column_factors(s, walk.col);
    // Of one step.
    const auto products = [&](float (&sum)[kSums<Adapter>][4], int step) {
      if constexpr (kPaired<Adapter>)
        if (rank > 0) unscale(sum, s, columns, walk.first_row + step * stride + 2 * quad, walk.col);
    };
    const auto add = [&](Eight& x, const float (&sum)[kSums<Adapter>][4], int e) {
      if (rank > 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x.value[i] = fmaf(scaling, sum[i / 2][i % 2 * 2 + e], x.value[i]);
      }
    };
    const auto advance = [&] {
      to += stride * destination_pitch;
      slot = after(slot);
      stream.push();
    };

    int step = 0;
#pragma unroll 1
    for (; step + kGroup <= staged; step += kGroup) {
      float sum[kGroup][kSums<Adapter>][4] = {};
      wait_async_all_but<OneChunk ? kNarrow32Stages - 1 : -1>(launch.stages - kGroup);
      __syncwarp();  // what the other lanes staged
      multiply(sum, step, staged_B);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        char* const stage = stages + slot;
        Packed<Source> base[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(Source)) / 2; ++i)
            base[e].word[i] =
                *reinterpret_cast<const uint4*>(stage + In::place(2 * quad + e, group * (sizeof(Source) / 2) + i));
        if constexpr (sizeof(Source) != sizeof(Destination)) __syncwarp();  // all has been read
        products(sum[j], step + j);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Eight x = unpack(base[e]);
          add(x, sum[j], e);
          Packed<Destination> out;
          if (special)
            out = round_special<Destination>(x, s, walk.first_row + (step + j) * stride + 2 * quad + e, walk.col, 2,
                                             launch.stochastic, launch.seed);
          else round_nearest8(reinterpret_cast<Destination(&)[8]>(out), x.value);
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(Destination)) / 2; ++i)
            *reinterpret_cast<uint4*>(stage + Out::place(2 * quad + e, group * (sizeof(Destination) / 2) + i)) =
                out.word[i];
        }
        __syncwarp();
        uint4 vector[Out::kLaneVectors];
#pragma unroll
        for (int i = 0; i < Out::kLaneVectors; ++i)
          vector[i] = *reinterpret_cast<const uint4*>(
              stage + Out::place(lane / Out::kAcross + i * Out::kRowStep, lane % Out::kAcross));
#pragma unroll
        for (int i = 0; i < Out::kLaneVectors; ++i)
          __stcs(reinterpret_cast<uint4*>(to + i * Out::kRowStep * destination_pitch), vector[i]);
        __syncwarp();  // all has been read: the slot is free
        advance();
      }
    }

    // Edges, and segments that are no runs of aligned vectors: element by element.
#pragma unroll 1
    for (; step < steps; step += kGroup) {
      float sum[kGroup][kSums<Adapter>][4] = {};
      wait_async_all_but<-1>(0);
      __syncwarp();
      multiply(sum, step, false);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        if (step + j >= steps) break;
        products(sum[j], step + j);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = walk.first_row + (step + j) * stride + 2 * quad + e;
          if (row >= walk.row_end || walk.col >= s.cols) continue;
          Eight x = load_elements<Source>(s, row, walk.col);
          add(x, sum[j], e);
          store_elements<Destination>(x, s, row, walk.col, launch.stochastic, launch.seed);
        }
        advance();
      }
    }
  }

  // Copies of raw bits are numbered after all merging.
  for (; unit < launch.n_units + launch.n_raw_units; unit = units[++n]) {
    __syncthreads();  // all have read this unit's number
    if (threadIdx.x == 0) units.fetch(n + 1);
    copy_unit(segments_of(launch)[segment_of(launch, unit)], unit);
    __syncthreads();
  }
  units.close();
}

// ---- launching -----------------------------------------------------------------------------------------------------

template <typename Source, typename Destination, typename Adapter, bool OneChunk>
cudaError_t launch_typed(const Launch& launch, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination);
  const Shape shape = shape_of(launch);
  int device = 0, processors = 0, per_block = 0, per_processor = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess)
    error = cudaDeviceGetAttribute(&per_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  if (error != cudaSuccess) return error;
  if (!accepts(shape, launch.max_rank, kPlanes<Adapter>, kBytes, per_block)) return cudaErrorInvalidConfiguration;
  const int shared = static_cast<int>(shared_bytes(shape, launch.max_rank, kPlanes<Adapter>, kBytes));
  const auto kernel = merge_kernel<Source, Destination, Adapter, OneChunk>;
  error = allow_shared(kernel, shared);
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  const int64_t blocks = static_cast<int64_t>(processors) *
                         (two_share(shape, launch.max_rank, kPlanes<Adapter>, kBytes, per_processor) ? 2 : 1);
  kernel<<<static_cast<unsigned>(units < blocks ? units : blocks), kThreads, shared, stream>>>(launch);
  return cudaGetLastError();
}

template <typename Source, typename Destination, typename Adapter>
cudaError_t launch_adapters(const Launch& launch, cudaStream_t stream) {
  if constexpr (kPlanes<Adapter> == 1)
    if (one_chunk(launch.max_rank, launch.stages))
      return launch_typed<Source, Destination, Adapter, true>(launch, stream);
  return launch_typed<Source, Destination, Adapter, false>(launch, stream);
}

template <typename Source>
int launch_from(int destination_dtype, int adapters, const Launch& launch, cudaStream_t stream) {
  return with_dtype(destination_dtype, [&](auto destination) {
    using Destination = decltype(destination);
    return with_adapters<Source, Destination>(adapters, [&](auto adapter) {
      return launch_adapters<Source, Destination, decltype(adapter)>(launch, stream);
    });
  });
}

template <typename Source>
int row_norms_from(const Launch& launch, double* out, cudaStream_t stream) {
  const int ranks = chunks_of(launch.max_rank < kNormRanks ? launch.max_rank : kNormRanks) * kChunk;
  const int shared = ranks * (64 + kNormPad) * 3 * static_cast<int>(sizeof(bf16));
  const cudaError_t error = allow_shared(row_norms_kernel<Source>, shared);
  if (error != cudaSuccess) return error;
  const int blocks = launch.n_units < 65535 ? launch.n_units : 65535;
  row_norms_kernel<Source><<<blocks, kThreads, shared, stream>>>(launch, out);
  return cudaGetLastError();
}

}  // namespace lora_merge
