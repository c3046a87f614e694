// Tracked merges in one pass each way, on any GPU: W is read once and written once, and the codes, 2 bits an element.
//
// Warps walk down strips on their own, with W and B on their way several steps ahead, and their products are summed as
// in merge.cuh, so W' is what a merge writes. A half of a unit of the journal is a step of a warp, eight elements of
// two rows a lane. W stays in its stage until there is room for what escapes; then the result takes its place, and goes
// out as in merge.cuh.
#include <cuda_runtime.h>

#include "stream.cuh"
#include "../tracked.cuh"

namespace lora_merge {
namespace {

// Vector i of row e.
template <typename T>
__device__ __forceinline__ uint4* stage_vector(char* stage, int e, int i) {
  const int quad = threadIdx.x % 4, group = threadIdx.x % 32 / 4;
  return reinterpret_cast<uint4*>(stage + Stage<T>::place(2 * quad + e, group * (sizeof(T) / 2) + i));
}

// So many bytes into this lane's run of row e.
template <typename T>
__device__ __forceinline__ char* stage_byte(char* stage, int e, int byte) {
  return reinterpret_cast<char*>(stage_vector<T>(stage, e, byte / 16)) + byte % 16;
}

// The element whose code lies above `at` others.
template <typename T>
__device__ __forceinline__ char* stage_element(char* stage, int at) {
  return stage_byte<T>(stage, at / kWords<T> % 2, at % kWords<T> * 4 + at / (2 * kWords<T>)*2);
}

template <typename T>
__device__ __forceinline__ Half<T> read_half(char* stage) {
  Half<T> half;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; w += 4) {
      const uint4 v = *stage_vector<T>(stage, e, w / 4);
      half.word[e][w] = v.x, half.word[e][w + 1] = v.y, half.word[e][w + 2] = v.z, half.word[e][w + 3] = v.w;
    }
  return half;
}

template <typename T>
__device__ __forceinline__ void write_half(char* stage, const Half<T>& half) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; w += 4)
      *stage_vector<T>(stage, e, w / 4) =
          make_uint4(half.word[e][w], half.word[e][w + 1], half.word[e][w + 2], half.word[e][w + 3]);
}

// At edges, and of segments that are no runs of aligned vectors; what lies outside is loaded as zeros. Calls, as they
// are rare.
template <typename T>
__device__ __noinline__ void load_half(char* stage, const Segment& s, int row, int col) {
  const Raw<T>* const from = reinterpret_cast<const Raw<T>*>(s.source);
#pragma unroll 1
  for (int e = 0; e < 2; ++e)
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<Raw<T>*>(stage_byte<T>(stage, e, i * sizeof(T))) =
          row + e < s.rows && col + i < s.cols ? from[(row + e) * s.source_stride[0] + (col + i) * s.source_stride[1]]
                                               : Raw<T>{0};
}

template <typename T>
__device__ __noinline__ void store_half(char* stage, const Segment& s, int row, int col) {
  Raw<T>* const to = reinterpret_cast<Raw<T>*>(s.source);
#pragma unroll 1
  for (int e = 0; e < 2; ++e)
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      if (row + e < s.rows && col + i < s.cols)
        to[(row + e) * s.source_stride[0] + (col + i) * s.source_stride[1]] =
            *reinterpret_cast<const Raw<T>*>(stage_byte<T>(stage, e, i * sizeof(T)));
}

// Turn: kTrackMerge, kTrackUnmerge, or both at once.
template <typename T, typename Adapter, int Turn>
__global__ void __launch_bounds__(kThreads, 2)
    tracked_kernel(const __grid_constant__ Launch launch, const __grid_constant__ TrackedJournal journal) {
  constexpr bool kThere = Turn != kTrackUnmerge, kBack = Turn != kTrackMerge;
  constexpr int kProducts = kThere && kBack ? 2 : 1;
  using S = Stage<T>;
  extern __shared__ __align__(128) char memory[];
  const uint32_t slot_bytes = slot_bytes_of<T, T, Adapter>(launch), ring_bytes = launch.stages * slot_bytes;
  bf16* shared_A = reinterpret_cast<bf16*>(memory + ring_bytes);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const int width = launch.col_warps * 64, pitch = width + launch.pad, stride = Walk::row_stride(launch);
  const uint32_t a_address = operand_A_address(shared_A, warp % launch.col_warps, pitch);
  char* const stages = memory + warp * kStageBytes<T, T>;
  const char* const pieces = memory + kWarps * kStageBytes<T, T> + threadIdx.x * 16;
  __shared__ int unit_ring[4];
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  Stream<T, T, Adapter, false, kProducts> stream(launch, units, memory);
  Room room{journal};
  uint32_t slot = 0;
  const auto after = [&](uint32_t at) { return at + slot_bytes == ring_bytes ? 0 : at + slot_bytes; };

  int n = 0;
  for (int unit = units[0]; unit < launch.n_units; unit = units[++n]) {
    const int number = segment_of(launch, unit);
    const auto adapter = [&](int p) -> const Segment& {
      return segments_of(launch)[row_of<kProducts>(launch, number, p)];
    };
    const Segment& s = adapter(kProducts - 1);
    __syncthreads();  // the last unit's A is no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int rank = s.rank, chunks = (rank + kChunk - 1) / kChunk;
    const int staged = staged_steps<T, T>(s, walk);
    const bool staged_B = stages_B<Adapter, kProducts>(launch, number);
    const bool over = turned(s);
    const int row_bytes = s.source_stride[0] * sizeof(T);
    char* to = reinterpret_cast<char*>(s.source) +
               (walk.first_row + lane / S::kAcross) * s.source_stride[0] * static_cast<int64_t>(sizeof(T)) +
               (walk.col - group * 8) * static_cast<int64_t>(sizeof(T)) + lane % S::kAcross * 16;

    // Units of the journal: one for each warp, along a row of tiles, row after row.
    const int advance = static_cast<int>(s.units_across) * kWarps;
    int64_t at = (static_cast<int64_t>(s.key) + walk.strip / width) * kWarps + warp +
                 static_cast<int64_t>(walk.first_row / (kHalves * stride)) * advance;
    TrackedRecord next_record{};
    uint2 next_code{};
    const auto ask = [&](int64_t at, int step) {
      if (walk.first_row + step * stride >= walk.row_end) return;
      next_record = load_record(journal.records + at);
      if (kBack) next_code = __ldcs(reinterpret_cast<const uint2*>(journal.codes) + at * 32 + lane);
    };
    ask(at, 0);
    const int plane_bytes = up_to_chunk(rank) * pitch * 2, product_bytes = kPlanes<Adapter> * plane_bytes;
    if (rank > 0) {
#pragma unroll
      for (int p = 0; p < kProducts; ++p)
        load_A<Adapter>(shared_A + p * (product_bytes / 2), adapter(p), walk.strip, width, pitch);
    }
    __syncthreads();
    [[maybe_unused]] ColumnFactors columns[kProducts];
    if constexpr (kPaired<Adapter>) {
#pragma unroll
      for (int p = 0; p < kProducts; ++p) columns[p] = column_factors(adapter(p), walk.col);
    }

    // Brings a unit back, or there, or both; nothing, if it stays as it is.
    const auto run = [&](int step, int64_t at, const TrackedRecord& record, uint2 codes, bool whole,
                         char* const(&stage)[kHalves]) {
      const int first_row = walk.first_row + step * stride, row = first_row + 2 * quad;
      if (first_row >= walk.row_end || !(kBack ? in_arena(journal.from, record.place) : record.place < 0)) return;
      const int64_t from = offset_in(journal.from, record.place);
      Raw<T> early{};  // escape number `lane`, asked for before it is known whether there is one
      if (kBack && from + (lane + 1) * static_cast<int>(sizeof(T)) <= journal.from.room)
        early = __ldcs(reinterpret_cast<const Raw<T>*>(journal.from.begin + from) + lane);
      if (!whole) {
#pragma unroll
        for (int j = 0; j < kHalves; ++j) load_half<T>(stage[j], s, row + j * stride, walk.col);
      }

      float sum[kHalves][kSums<Adapter>][4];
      // The sums of product p.
      const auto multiply = [&](int p) {
#pragma unroll
        for (int j = 0; j < kHalves; ++j)
#pragma unroll
          for (int t = 0; t < kSums<Adapter>; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) sum[j][t][e] = 0;
        const auto chunk = [&](auto first, int c) {
          uint32_t b[kHalves][kPlanes<Adapter>][4], from = slot;
#pragma unroll
          for (int j = 0; j < kHalves; ++j, from = after(from)) {
            Piece<Adapter> piece{};
            if (!whole || !staged_B)
              piece = fetch_B<Adapter>(adapter(p), first_row + j * stride + group, c * kChunk + quad * 8);
            else if (c * kChunk + quad * 8 < rank)
              piece = staged_piece<Adapter>(pieces + from + (p * chunks + c) * kPieces<Adapter> * kVector);
            operand_B<Adapter>(b[j], piece);
          }
          multiply_chunk<Adapter, kRoundedSums<T, T, Adapter>, kHalves, decltype(first)::value>(
              sum, a_address + p * product_bytes + c * kChunk * pitch * 2, pitch, plane_bytes, b, over);
        };
        if (rank > 0) chunk(std::true_type{}, 0);
#pragma unroll 1
        for (int c = 1; c < chunks; ++c) chunk(std::false_type{}, c);
        if constexpr (kPaired<Adapter>) {
          if (rank > 0)
#pragma unroll
            for (int j = 0; j < kHalves; ++j) unscale(sum[j], adapter(p), columns[p], row + j * stride, walk.col);
        }
      };
      // A half of a unit is converted, by product p.
      const auto convert_half = [&](auto undo, int p, Coded<T>& x, int j) {
        const Segment& of = adapter(p);
        const float* const row_scale = reinterpret_cast<const float*>(of.row_scale);
        const auto factor = [&](int e) {
          return row + j * stride + e < s.rows ? __ldg(row_scale + row + j * stride + e) : 1.0f;
        };
        convert<T, decltype(undo)::value>(
            x, [&](int e, int i) { return sum[j][i / 2][i % 2 * 2 + e]; }, static_cast<float>(of.scaling), rank > 0,
            row_scale != nullptr, factor);
      };

      Coded<T> half[kHalves];
      if constexpr (kBack) {
        multiply(0);
        uint32_t checksum = 0;
#pragma unroll
        for (int j = 0; j < kHalves; ++j) {
          half[j] = {read_half<T>(stage[j]), j == 0 ? codes.x : codes.y};
          add_to(checksum, half[j].half, j);
          convert_half(std::true_type{}, 0, half[j], j);
        }
        const uint32_t escapes = escapes_of(half[0].code, half[1].code);
        const Escapes found(escapes);
        if (checksum_of(checksum) != static_cast<uint32_t>(record.checksum)) {  // others wrote it
          if (lane == 0) atomicAdd(journal.counter + 2, 1ull);
          return;
        }
#pragma unroll
        for (int j = 0; j < kHalves; ++j) write_half(stage[j], half[j].half);
        const Raw<T>* const escaped = reinterpret_cast<const Raw<T>*>(journal.from.begin + from);
        Raw<T> raw{};
        const auto fetch = [&](int place) {
          raw = static_cast<Raw<T>>(__shfl_sync(~0u, static_cast<uint32_t>(early), place & 31));
        };
        for_escapes(escapes, found.before, fetch, [&](int j, int at, int number) {
          repair<T>(stage_element<T>(j ? stage[1] : stage[0], at), at < 8,
                    number < 32 ? raw : __ldcs(escaped + number));
        });
        if (lane == 0) journal.records[at].place = -1;
      }
      if constexpr (kThere) {
        multiply(kProducts - 1);
        uint32_t checksum = 0;
#pragma unroll
        for (int j = 0; j < kHalves; ++j) {
          half[j] = {read_half<T>(stage[j]), 0};
          convert_half(std::false_type{}, kProducts - 1, half[j], j);
          if (!whole) {
            const auto there = [&](int e) {
              return row + j * stride + e < s.rows ? static_cast<int>(s.cols) - walk.col : 0;
            };
            half[j] = cut(half[j], there(0), there(1), kPerWord<T>);
          }
          add_to(checksum, half[j].half, j);
        }
        checksum = checksum_of(checksum);
        const uint32_t escapes = escapes_of(half[0].code, half[1].code);
        const Escapes found(escapes);
        const int64_t place = room.take(found.count * static_cast<int>(sizeof(T)));
        if (place >= 0) {
          Raw<T>* const escaped = reinterpret_cast<Raw<T>*>(journal.to.begin + place);
          for_escapes(
              escapes, found.before, [](int) {},
              [&](int j, int at, int number) {
                escaped[number] = *reinterpret_cast<const Raw<T>*>(stage_element<T>(j ? stage[1] : stage[0], at));
              });
#pragma unroll
          for (int j = 0; j < kHalves; ++j) write_half(stage[j], half[j].half);
          __stcs(reinterpret_cast<uint2*>(journal.codes) + at * 32 + lane, make_uint2(half[0].code, half[1].code));
          if (lane == 0) store_record(journal.records + at, {place + journal.to.mark, checksum});
        } else if (!kBack) {
          return;
        }
      }

      __syncwarp();
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        if (!whole) {
          store_half<T>(stage[j], s, row + j * stride, walk.col);
          continue;
        }
        uint4 vector[S::kLaneVectors];
#pragma unroll
        for (int i = 0; i < S::kLaneVectors; ++i)
          vector[i] = *reinterpret_cast<const uint4*>(stage[j] +
                                                      S::place(lane / S::kAcross + i * S::kRowStep, lane % S::kAcross));
#pragma unroll
        for (int i = 0; i < S::kLaneVectors; ++i)
          __stcs(reinterpret_cast<uint4*>(to + (j * stride + i * S::kRowStep) * row_bytes), vector[i]);
      }
    };

#pragma unroll 1
    for (int step = 0; step < walk.steps; step += kHalves) {
      const TrackedRecord record = next_record;
      const uint2 codes = next_code;
      ask(at + advance, step + kHalves);
      const bool whole = step + kHalves <= staged;
      char* const stage[kHalves] = {stages + slot, stages + after(slot)};
      wait_async_all_but<-1>(whole ? launch.stages - kHalves : 0);
      __syncwarp();  // what the other lanes staged
      run(step, at, record, codes, whole, stage);
      __syncwarp();  // all has been read: the slots are free
      at += advance;
      to += kHalves * stride * row_bytes;
#pragma unroll
      for (int j = 0; j < kHalves; ++j) {
        slot = after(slot);
        stream.push();
      }
    }
  }
  if (kThere && lane == 0 && room.missing > 0)
    atomicAdd(journal.counter + 1, static_cast<unsigned long long>(room.missing));
  units.close();
}

template <typename T, typename Adapter, int Turn>
cudaError_t launch_typed(const Launch& launch, const TrackedJournal& journal, cudaStream_t stream) {
  int device = 0, processors = 0, per_block = 0, resident = 0;
  const Shape shape = shape_of(launch);
  const int shared = static_cast<int>(shared_bytes(shape, launch.max_rank, kPlanes<Adapter>, sizeof(T)));
  const auto kernel = tracked_kernel<T, Adapter, Turn>;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess && !accepts(shape, launch.max_rank, kPlanes<Adapter>, sizeof(T), per_block))
    error = cudaErrorInvalidConfiguration;
  if (error == cudaSuccess) error = allow_shared(kernel, shared);
  if (error == cudaSuccess) error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared);
  if (error != cudaSuccess) return error;
  const int blocks = processors * (resident > 0 ? resident : 1);
  const int grid = launch.n_units < blocks ? launch.n_units : blocks;
  kernel<<<grid, kThreads, shared, stream>>>(launch, journal);
  return cudaGetLastError();
}

template <typename T, typename Adapter>
cudaError_t launch_way(int way, const Launch& launch, const TrackedJournal& journal, cudaStream_t stream) {
  switch (way) {
    case kTrackMerge: return launch_typed<T, Adapter, kTrackMerge>(launch, journal, stream);
    case kTrackUnmerge: return launch_typed<T, Adapter, kTrackUnmerge>(launch, journal, stream);
    default: return launch_typed<T, Adapter, kTrackRemerge>(launch, journal, stream);
  }
}

}  // namespace

int launch_tracked(int dtype, int adapters, int way, const Launch& launch, const TrackedJournal& journal,
                   void* stream) {
  return with_dtype(dtype, [&](auto w) {
    using T = decltype(w);
    return with_adapters<T, T>(adapters, [&](auto adapter) {
      return launch_way<T, decltype(adapter)>(way, launch, journal, static_cast<cudaStream_t>(stream));
    });
  });
}

}  // namespace lora_merge
