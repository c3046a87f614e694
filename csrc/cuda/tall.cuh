// The merge kernel where products weigh as much as bytes: float32 adapters, and bf16 ones of high rank, on 16-bit weights.
//
// As merge.cuh, with which it shares every product and every sum, so that bits are the same; but a block of eight warps
// has the multiprocessor to itself and walks down its strip in tiles of 64 rows: a warp multiplies 32 rows at a time
// with what it reads of A (shared memory is what binds merge.cuh at high ranks), and B is split into planes once a
// block instead of once a warp.
//
//   W    global -> registers when a tile begins; it is needed when the products are done.
//   B    of the next tile: global -> registers meanwhile, then split, to the other of two buffers in shared memory.
#pragma once
#include "copies.cuh"
#include "adapters.cuh"
#include "tiles.cuh"

namespace lora_merge {

constexpr int kTallSteps = 4;                              // steps that share a load of A
constexpr int kTallRows = kTallSteps * 2 * kStepRows;      // of a tile, at four warps across
template <bool Wide>
constexpr int kTallChunks = Wide ? 2 : 8;                  // the most that a rank may have

// Elements from a row of B in shared memory to the next: an odd number of chunks, so that eight lanes meet no bank twice.
__host__ __device__ __forceinline__ int tall_pitch_B(int chunks) { return (chunks | 1) * kChunk; }

template <bool Wide>
__host__ __device__ __forceinline__ int tall_bytes(int max_rank, int pitch_A) {
  const int chunks = (max_rank + kChunk - 1) / kChunk, planes = Wide ? 3 : 1;
  return planes * static_cast<int>(sizeof(bf16)) * (chunks * kChunk * pitch_A + 2 * kTallRows * tall_pitch_B(chunks));
}

template <typename Source, typename Destination, bool Wide>
__global__ void __launch_bounds__(kThreads, 1) tall_kernel(const __grid_constant__ Launch launch) {
  constexpr int kPlanes = Wide ? 3 : 1;
  extern __shared__ __align__(128) char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, group = lane / 4;
  const int width = 4 * 64, pitch = width + launch.margin, stride = 2 * kStepRows;
  bf16* const shared_A = reinterpret_cast<bf16*>(memory);
  bf16* const shared_B = shared_A + kPlanes * up_to_chunk(launch.max_rank) * pitch;
  const uint32_t a_address = operand_A_address(shared_A, warp % 4, pitch);
  __shared__ int unit_ring[4];
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();

  int n = 0, unit = units[0];
  for (; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    __syncthreads();  // the last unit's A and B are no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int begin = walk.first_row - warp / 4 * kStepRows, chunks = (s.rank + kChunk - 1) / kChunk;
    const int tiles = (walk.row_end - begin + kTallRows - 1) / kTallRows;
    const bool aligned = aligned16(s.source, s.source_stride, sizeof(Source)) &&
                         aligned16(s.destination, s.destination_stride, sizeof(Destination));
    const int full_steps = aligned ? walk.full_steps : 0;
    const bool vector = vector_B<Wide>(s), special = launch.stochastic || s.row_scale != 0;
    const float scaling = static_cast<float>(s.scaling);
    const int pitch_B = tall_pitch_B(chunks), plane_B = kTallRows * pitch_B, plane_A = up_to_chunk(s.rank) * pitch * 2;

    // This thread's pieces of B of a tile: eight ranks of each chunk, of one row.
    Piece<Wide> next[kTallChunks<Wide>];
    const auto ask_B = [&](int tile) {
#pragma unroll
      for (int c = 0; c < kTallChunks<Wide>; ++c)
        if (c < chunks)
          next[c] = load_piece<Wide>(s, begin + tile * kTallRows + threadIdx.x / 4, c * kChunk + quad * 8, vector);
    };
    const auto keep_B = [&](int tile) {
      bf16* const row = shared_B + tile % 2 * kPlanes * plane_B + threadIdx.x / 4 * pitch_B + quad * 8;
#pragma unroll
      for (int c = 0; c < kTallChunks<Wide>; ++c) {
        if (c >= chunks) break;
        uint32_t words[kPlanes][4];
        operand_B<Wide>(words, next[c]);
#pragma unroll
        for (int p = 0; p < kPlanes; ++p)
          *reinterpret_cast<uint4*>(row + p * plane_B + c * kChunk) =
              make_uint4(words[p][0], words[p][1], words[p][2], words[p][3]);
      }
    };
    ask_B(0);
    if (s.rank > 0) load_A<Wide>(shared_A, s, walk.strip, width, pitch);
    keep_B(0);
    __syncthreads();

#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      const int first_step = tile * kTallSteps;
      uint4 base[kTallSteps][2];
      const auto place = [&](const int64_t (&strides)[2], int step, int e) {
        return (walk.first_row + step * stride + 2 * quad + e) * strides[0] + walk.col;
      };
#pragma unroll
      for (int j = 0; j < kTallSteps; ++j)
        if (first_step + j < full_steps)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            base[j][e] = __ldcs(reinterpret_cast<const uint4*>(
                reinterpret_cast<const Source*>(s.source) + place(s.source_stride, first_step + j, e)));
      if (tile + 1 < tiles) ask_B(tile + 1);

      float sum[kTallSteps][4][4] = {};
      const bf16* const tile_B =
          shared_B + tile % 2 * kPlanes * plane_B + (warp / 4 * kStepRows + group) * pitch_B + quad * 8;
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        uint32_t b[kTallSteps][kPlanes][4];
#pragma unroll
        for (int j = 0; j < kTallSteps; ++j)
#pragma unroll
          for (int p = 0; p < kPlanes; ++p) {
            const uint4 v =
                *reinterpret_cast<const uint4*>(tile_B + p * plane_B + j * stride * pitch_B + c * kChunk);
            b[j][p][0] = v.x, b[j][p][1] = v.y, b[j][p][2] = v.z, b[j][p][3] = v.w;
          }
        multiply_chunk<Wide, kTallSteps>(sum, a_address + c * kChunk * pitch * 2, pitch, plane_A, b);
      }

#pragma unroll
      for (int j = 0; j < kTallSteps; ++j) {
        const int step = first_step + j;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = walk.first_row + step * stride + 2 * quad + e;
          const bool whole = step < full_steps;
          if (!whole && (row >= walk.row_end || walk.col >= s.cols)) continue;
          Eight x = whole ? unpack(Packed<Source>{{base[j][e]}}) : load_elements<Source>(s, row, walk.col);
          if (s.rank > 0) {
#pragma unroll
            for (int i = 0; i < 8; ++i) x.value[i] = fmaf(scaling, sum[j][i / 2][i % 2 * 2 + e], x.value[i]);
          }
          if (!whole) {
            store_elements<Destination>(x, s, row, walk.col, launch.stochastic, launch.seed);
            continue;
          }
          Packed<Destination> out;
          if (special) out = round_special<Destination>(x, s, row, walk.col, launch.stochastic, launch.seed);
          else round_nearest8(reinterpret_cast<Destination(&)[8]>(out), x.value);
          __stcs(reinterpret_cast<uint4*>(reinterpret_cast<Destination*>(s.destination) +
                                          place(s.destination_stride, step, e)),
                 out.word[0]);
        }
      }
      if (tile + 1 < tiles) keep_B(tile + 1);
      __syncthreads();
    }
  }
  copy_units(launch, units, n, unit);
  units.close();
}

template <typename Source, typename Destination, bool Wide>
cudaError_t launch_tall(const Launch& launch, cudaStream_t stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (launch.col_warps != 4 || launch.max_rank > kTallChunks<Wide> * kChunk) return cudaErrorInvalidValue;
  const int shared = tall_bytes<Wide>(launch.max_rank, 4 * 64 + launch.margin);
  const auto kernel = tall_kernel<Source, Destination, Wide>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  kernel<<<static_cast<unsigned>(units < processors ? units : processors), kThreads, shared, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace lora_merge
