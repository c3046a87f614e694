// Tracked merges in one pass each way: W is read once and written once, and the codes, 2 bits an element.
//
// `estimate = round(W' - D)` lies a step or so from W. A code says bits(W) - bits(estimate): -1, 0 or 1 as 0, 1 or 2, or
// 3, an escape, whose raw bits are kept in the arena. W comes back bit for bit whatever the values are: an unmerge
// computes the same estimate from the same W' and adapters. How it is rounded is free, as long as it is always the same:
// bf16 is cut. NaN that is computed has the same bits each time on these GPUs. Whether it is the same W' is told by a
// checksum of each unit: one that was written meanwhile is left as it is.
//
// Warps walk down strips on their own, with W and B on their way several steps ahead, and their products are summed as in
// merge.cuh, so W' is what a merge writes. A unit of the journal is two steps of a warp. W stays in its stage until there
// is room for what escapes; then the result takes its place, and goes out as in merge.cuh.
#include <cuda_runtime.h>

#include <type_traits>

#include "stream.cuh"
#include "tracked.h"

namespace lora_merge {
namespace {

constexpr int kSteps = 2;  // of a unit

template <typename T>
using Raw = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;

// ---- words: of one element, or of two --------------------------------------------------------------------------------

template <typename T>
constexpr int kPerWord = 4 / sizeof(T);
template <typename T>
constexpr int kWords = 8 / kPerWord<T>;  // that a lane has of a row
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
  __device__ __forceinline__ uint32_t estimate() const {
    if constexpr (std::is_same_v<T, bf16>) return __byte_perm(__float_as_uint(x[0]), __float_as_uint(x[1]), 0x7632);
    else return rounded();
  }
};

// Two elements are subtracted at once. The low one borrows from the high one only where it escapes (no estimate is 0xffff,
// and where one is 0 the base is no NaN); `repair` knows that.
template <typename T>
__device__ __forceinline__ uint32_t encode(uint32_t base, uint32_t estimate) {
  const uint32_t away = base - estimate + kOnes<T>;
  return sizeof(T) == 4 ? min(away, 3u) : __vminu2(away, 3 * kOnes<T>);
}

template <typename T>
__device__ __forceinline__ uint32_t decode(uint32_t estimate, uint32_t codes) {
  return estimate + (codes & (3 * kOnes<T>)) - kOnes<T>;
}

// Puts an escaped element where the result of `decode` lies; low ones before high ones.
template <typename T>
__device__ __forceinline__ void repair(char* at, Raw<T> raw) {
  Raw<T>* const element = reinterpret_cast<Raw<T>*>(at);
  if constexpr (sizeof(T) == 2) {
    // A low one is the estimate + 2 here. Where base - estimate + 1 was negative, it had borrowed.
    if (reinterpret_cast<uintptr_t>(at) % 4 == 0 && raw + 3 < *element) ++element[1];
  }
  *element = raw;
}

// ---- a lane's part of a step: eight elements of two rows -------------------------------------------------------------

template <typename T>
struct Part {
  uint32_t word[2][kWords<T>];
};

// Codes of a part lie in one word: those of word w of row e this far up, and of its high element 16 bits further.
template <typename T>
__device__ __forceinline__ constexpr int shift_of(int e, int w) {
  return 2 * (e * kWords<T> + w);
}

// Vector i of row e.
template <typename T>
__device__ __forceinline__ uint4* stage_vector(char* stage, int e, int i) {
  const int quad = threadIdx.x % 4, group = threadIdx.x % 32 / 4;
  return reinterpret_cast<uint4*>(stage + Stage<T>::place(2 * quad + e, group * (sizeof(T) / 2) + i));
}

template <typename T>
__device__ __forceinline__ char* stage_element(char* stage, int e, int i) {
  const int byte = i * sizeof(T);
  return reinterpret_cast<char*>(stage_vector<T>(stage, e, byte / 16)) + byte % 16;
}

template <typename T>
__device__ __forceinline__ Part<T> read_part(char* stage) {
  Part<T> part;
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; w += 4) {
      const uint4 v = *stage_vector<T>(stage, e, w / 4);
      part.word[e][w] = v.x, part.word[e][w + 1] = v.y, part.word[e][w + 2] = v.z, part.word[e][w + 3] = v.w;
    }
  return part;
}

template <typename T>
__device__ __forceinline__ void write_part(char* stage, const Part<T>& part) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; w += 4)
      *stage_vector<T>(stage, e, w / 4) =
          make_uint4(part.word[e][w], part.word[e][w + 1], part.word[e][w + 2], part.word[e][w + 3]);
}

// At edges, and of segments that are no runs of aligned vectors; what lies outside is loaded as zeros. Calls, as they are
// rare.
template <typename T>
__device__ __noinline__ void load_part(char* stage, const Segment& s, int row, int col) {
  const Raw<T>* const from = reinterpret_cast<const Raw<T>*>(s.source);
#pragma unroll 1
  for (int e = 0; e < 2; ++e)
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      *reinterpret_cast<Raw<T>*>(stage_element<T>(stage, e, i)) =
          row + e < s.rows && col + i < s.cols
              ? from[(row + e) * s.source_stride[0] + (col + i) * s.source_stride[1]] : Raw<T>{0};
}

template <typename T>
__device__ __noinline__ void store_part(char* stage, const Segment& s, int row, int col) {
  Raw<T>* const to = reinterpret_cast<Raw<T>*>(s.source);
#pragma unroll 1
  for (int e = 0; e < 2; ++e)
#pragma unroll 1
    for (int i = 0; i < 8; ++i)
      if (row + e < s.rows && col + i < s.cols)
        to[(row + e) * s.source_stride[0] + (col + i) * s.source_stride[1]] =
            *reinterpret_cast<const Raw<T>*>(stage_element<T>(stage, e, i));
}

// What lies outside is zeros in the result, as it is loaded again, and no escape.
template <typename T>
__device__ __forceinline__ void cut_part(Part<T>& part, uint32_t& code, const Segment& s, int row, int col) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w)
#pragma unroll
      for (int h = 0; h < kPerWord<T>; ++h)
        if (row + e >= s.rows || col + w * kPerWord<T> + h >= s.cols) {
          part.word[e][w] &= sizeof(T) == 4 ? 0u : 0xffffu << 16 * (1 - h);
          code &= ~(3u << (shift_of<T>(e, w) + 16 * h));
        }
}

// W to W' and codes, or (Undo) W' and codes to W. `part` is what was read, and becomes the result.
template <typename T, bool Undo, bool Scaled>
__device__ __forceinline__ void convert(Part<T>& part, uint32_t& code, const float (&sum)[4][4], float scaling,
                                        bool adapted, const float (&factor)[2]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float inverse = Scaled ? 1.0f / factor[e] : 1.0f;
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const auto product = [&](int h) {
        const int i = w * kPerWord<T> + h;
        return sum[i / 2][i % 2 * 2 + e];
      };
      const uint32_t word = part.word[e][w];
      uint32_t merged = word;
      if constexpr (!Undo) {
        Values<T> value(word);
#pragma unroll
        for (int h = 0; h < kPerWord<T>; ++h) {
          if (!Scaled || adapted) value.x[h] = fmaf(scaling, product(h), value.x[h]);
          if (Scaled) value.x[h] *= factor[e];
        }
        merged = value.rounded();
      }
      Values<T> value(merged);
#pragma unroll
      for (int h = 0; h < kPerWord<T>; ++h) {
        if (Scaled) value.x[h] *= inverse;
        if (!Scaled || adapted) value.x[h] = fmaf(-scaling, product(h), value.x[h]);
      }
      const uint32_t estimate = value.estimate();
      if constexpr (Undo) {
        part.word[e][w] = decode<T>(estimate, code >> shift_of<T>(e, w));
      } else {
        part.word[e][w] = merged;
        code += encode<T>(word, estimate) << shift_of<T>(e, w);
      }
    }
  }
}

// Checksum of a unit: every word times an odd number that depends on its place in a lane, every lane's sum times another.
template <typename T>
__device__ __forceinline__ void add_to(unsigned long long& sum, const Part<T>& part, int step) {
#pragma unroll
  for (int e = 0; e < 2; ++e)
#pragma unroll
    for (int w = 0; w < kWords<T>; ++w) {
      const uint32_t place = (step * 2 + e) * kWords<T> + w;
      sum += static_cast<unsigned long long>(part.word[e][w]) * ((0x9e3779b9u * (2 * place + 1)) ^ 0x5bd1e994u);
    }
}

__device__ __forceinline__ unsigned long long checksum_of(unsigned long long sum) {
  sum *= 2 * (threadIdx.x % 32) * 0x85ebca6bu + 1;
  return static_cast<unsigned long long>(__reduce_add_sync(~0u, static_cast<uint32_t>(sum >> 32))) << 32 |
         __reduce_add_sync(~0u, static_cast<uint32_t>(sum));
}

// ---- escapes ---------------------------------------------------------------------------------------------------------

// Of a lane: bit k + step for what its code of that step has at bits k and k + 1.
__device__ __forceinline__ uint32_t escapes_of(const uint32_t (&code)[kSteps]) {
  return (code[0] & code[0] >> 1 & 0x55555555u) | (code[1] & code[1] << 1 & 0xaaaaaaaau);
}

// Turn by turn the next escape of every lane that has one. `all(place, mine)` is called by all lanes, `place` being among
// the unit's escapes and `mine` whether this lane has one; then `each(element in its stage, place)` by those.
template <typename T, typename All, typename Each>
__device__ __forceinline__ void for_escapes(uint32_t escapes, char* const (&stage)[kSteps], const All& all,
                                            const Each& each) {
  int first = 0;
  uint32_t lanes;
#pragma unroll 1
  while ((lanes = __ballot_sync(~0u, escapes != 0)) != 0) {
    const int place = first + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
    first += __popc(lanes);
    all(place, escapes != 0);
    if (escapes != 0) {
      const int bit = __ffs(escapes) - 1, at = bit / 2;
      escapes &= escapes - 1;
      const int e = at / kWords<T> % 2, i = at % kWords<T> * kPerWord<T> + at / (2 * kWords<T>);
      each(stage_element<T>(bit % 2 ? stage[1] : stage[0], e, i), place);
    }
  }
}

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
  int64_t next = 0, end = 0;
  bool closed = false;   // the arena had no more
  uint32_t missing = 0;  // bytes for which there was no room

  // Where a unit may write; negative: nowhere.
  __device__ __forceinline__ int64_t take(int bytes) {
    int64_t from = next;
    if (bytes <= end - next) {
      next += bytes;
      return from;
    }
    const int need = (bytes + 3) & ~3;
    if (!closed) {
      const bool alone = need * 8 >= journal.chunk;  // else a chunk would be left with much of it unused
      const int ask = alone ? need : journal.chunk;
      if (threadIdx.x % 32 == 0)
        from = static_cast<int64_t>(atomicAdd(journal.counter, static_cast<unsigned long long>(ask)));
      from = __shfl_sync(~0u, from, 0);
      closed = from + need > journal.room;
      if (!closed) {
        if (!alone) next = from + bytes, end = min(from + ask, journal.room);
        return from;
      }
    }
    missing += need;
    return -1;
  }
};

template <typename T, bool Wide, bool Undo>
__global__ void __launch_bounds__(kThreads, 2)
    tracked_kernel(const __grid_constant__ Launch launch, const __grid_constant__ TrackedJournal journal) {
  using S = Stage<T>;
  extern __shared__ __align__(128) char memory[];
  const uint32_t slot_bytes = slot_bytes_of<T, T, Wide>(launch), ring_bytes = launch.deep * slot_bytes;
  bf16* shared_A = reinterpret_cast<bf16*>(memory + ring_bytes);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane % 4, group = lane / 4;
  const int width = launch.col_warps * 64, pitch = width + launch.margin, stride = Walk::row_stride(launch);
  const uint32_t a_address = operand_A_address(shared_A, warp % launch.col_warps, pitch);
  char* const stages = memory + warp * kStageBytes<T, T>;
  const char* const pieces = memory + kWarps * kStageBytes<T, T> + threadIdx.x * 16;
  __shared__ int unit_ring[4];
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  Stream<T, T, Wide ? Mode::kWide : Mode::kNarrow> stream(launch, units, memory);
  Room room{journal};
  uint32_t slot = 0;
  const auto after = [&](uint32_t at) { return at + slot_bytes == ring_bytes ? 0 : at + slot_bytes; };

  int n = 0;
  for (int unit = units[0]; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    __syncthreads();  // the last unit's A is no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    const Walk walk(launch, s, unit);
    const int rank = s.rank, chunks = (rank + kChunk - 1) / kChunk;
    const int staged = staged_steps<T, T>(s, walk);
    const bool staged_B = launch.staged_B && vector_B<Wide>(s);
    const float scaling = static_cast<float>(s.scaling);
    const float* const row_scale = reinterpret_cast<const float*>(s.row_scale);
    const int row_bytes = s.source_stride[0] * sizeof(T);
    char* to = reinterpret_cast<char*>(s.source) +
               (walk.first_row + lane / S::kAcross) * s.source_stride[0] * static_cast<int64_t>(sizeof(T)) +
               (walk.col - group * 8) * static_cast<int64_t>(sizeof(T)) + lane % S::kAcross * 16;

    // Units of the journal: one for each warp, along a row of tiles, row after row.
    const int advance = static_cast<int>(s.units_across) * kWarps;
    int64_t at = (static_cast<int64_t>(s.key) + walk.strip / width) * kWarps + warp +
                 static_cast<int64_t>(walk.first_row / (kSteps * stride)) * advance;
    TrackedRecord next_record{};
    uint2 next_code{};
    const auto ask = [&](int64_t at, int step) {
      if (walk.first_row + step * stride >= walk.row_end) return;
      next_record = load_record(journal.records + at);
      if (Undo) next_code = __ldcs(reinterpret_cast<const uint2*>(journal.codes) + at * 32 + lane);
    };
    ask(at, 0);
    if (rank > 0) load_A<Wide>(shared_A, s, walk.strip, width, pitch);
    __syncthreads();
    const int plane_bytes = up_to_chunk(rank) * pitch * 2;

    // Brings a unit there or back; nothing, if it stays as it is.
    const auto run = [&](int step, int64_t at, const TrackedRecord& record, uint2 codes, bool whole,
                         char* const(&stage)[kSteps]) {
      const int first_row = walk.first_row + step * stride, row = first_row + 2 * quad;
      if (first_row >= walk.row_end || (record.place >= 0) != Undo) return;
      Raw<T> early{};  // escape number `lane`, asked for before it is known whether there is one
      if (Undo && record.place + (lane + 1) * static_cast<int>(sizeof(T)) <= journal.room)
        early = __ldcs(reinterpret_cast<const Raw<T>*>(journal.arena + record.place) + lane);
      if (!whole) {
#pragma unroll
        for (int j = 0; j < kSteps; ++j) load_part<T>(stage[j], s, row + j * stride, walk.col);
      }

      float sum[kSteps][4][4] = {};
      const auto multiply = [&](auto first, int c) {
        uint32_t b[kSteps][Wide ? 3 : 1][4], from = slot;
#pragma unroll
        for (int j = 0; j < kSteps; ++j, from = after(from)) {
          Piece<Wide> piece{};
          if (!whole || !staged_B) piece = fetch_B<Wide>(s, first_row + j * stride + group, c * kChunk + quad * 8);
          else if (c * kChunk + quad * 8 < rank) piece = staged_piece<Wide>(pieces + from + c * (Wide ? 2 : 1) * kVector);
          operand_B<Wide>(b[j], piece);
        }
        multiply_chunk<Wide, kSteps, decltype(first)::value>(sum, a_address + c * kChunk * pitch * 2, pitch, plane_bytes,
                                                             b);
      };
      if (rank > 0) multiply(std::true_type{}, 0);
#pragma unroll 1
      for (int c = 1; c < chunks; ++c) multiply(std::false_type{}, c);

      Part<T> part[kSteps];
      uint32_t code[kSteps] = {codes.x, codes.y};
      unsigned long long checksum = 0;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        part[j] = read_part<T>(stage[j]);
        if (Undo) add_to(checksum, part[j], j);
        float factor[2] = {1.0f, 1.0f};
        if (row_scale == nullptr) {
          convert<T, Undo, false>(part[j], code[j], sum[j], scaling, true, factor);
        } else {
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (row + j * stride + e < s.rows) factor[e] = __ldg(row_scale + row + j * stride + e);
          convert<T, Undo, true>(part[j], code[j], sum[j], scaling, rank > 0, factor);
        }
        if (!Undo && !whole) cut_part(part[j], code[j], s, row + j * stride, walk.col);
        if (!Undo) add_to(checksum, part[j], j);
      }
      checksum = checksum_of(checksum);
      const uint32_t escapes = escapes_of(code);

      if constexpr (Undo) {
        if (checksum != record.checksum) {  // others wrote it
          if (lane == 0) atomicAdd(journal.counter + 2, 1ull);
          return;
        }
#pragma unroll
        for (int j = 0; j < kSteps; ++j) write_part(stage[j], part[j]);
        const Raw<T>* const escaped = reinterpret_cast<const Raw<T>*>(journal.arena + record.place);
        Raw<T> raw{};
        const auto fetch = [&](int place, bool mine) {
          raw = static_cast<Raw<T>>(__shfl_sync(~0u, static_cast<uint32_t>(early), place & 31));
          if (mine && place >= 32) raw = __ldcs(escaped + place);
        };
        for_escapes<T>(escapes, stage, fetch, [&](char* element, int) { repair<T>(element, raw); });
        if (lane == 0) journal.records[at].place = -1;
      } else {
        const int count = __reduce_add_sync(~0u, static_cast<uint32_t>(__popc(escapes)));
        const int64_t place = room.take(count * static_cast<int>(sizeof(T)));
        if (place < 0) return;
        Raw<T>* const escaped = reinterpret_cast<Raw<T>*>(journal.arena + place);
        const auto keep = [&](char* element, int place) { escaped[place] = *reinterpret_cast<const Raw<T>*>(element); };
        for_escapes<T>(escapes, stage, [](int, bool) {}, keep);
#pragma unroll
        for (int j = 0; j < kSteps; ++j) write_part(stage[j], part[j]);
        __stcs(reinterpret_cast<uint2*>(journal.codes) + at * 32 + lane, make_uint2(code[0], code[1]));
        if (lane == 0) store_record(journal.records + at, {place, checksum});
      }

      __syncwarp();
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        if (!whole) {
          store_part<T>(stage[j], s, row + j * stride, walk.col);
          continue;
        }
        uint4 vector[S::kLaneVectors];
#pragma unroll
        for (int i = 0; i < S::kLaneVectors; ++i)
          vector[i] = *reinterpret_cast<const uint4*>(
              stage[j] + S::place(lane / S::kAcross + i * S::kRowStep, lane % S::kAcross));
#pragma unroll
        for (int i = 0; i < S::kLaneVectors; ++i)
          __stcs(reinterpret_cast<uint4*>(to + (j * stride + i * S::kRowStep) * row_bytes), vector[i]);
      }
    };

#pragma unroll 1
    for (int step = 0; step < walk.steps; step += kSteps) {
      const TrackedRecord record = next_record;
      const uint2 codes = next_code;
      ask(at + advance, step + kSteps);
      const bool whole = step + kSteps <= staged;
      char* const stage[kSteps] = {stages + slot, stages + after(slot)};
      wait_async_all_but<-1>(whole ? launch.deep - kSteps : 0);
      __syncwarp();  // what the other lanes staged
      run(step, at, record, codes, whole, stage);
      __syncwarp();  // all has been read: the slots are free
      at += advance;
      to += kSteps * stride * row_bytes;
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        slot = after(slot);
        stream.push();
      }
    }
  }
  if (!Undo && lane == 0 && room.missing > 0)
    atomicAdd(journal.counter + 1, static_cast<unsigned long long>(room.missing));
  units.close();
}

template <typename T, bool Wide, bool Undo>
cudaError_t launch_typed(const Launch& launch, const TrackedJournal& journal, cudaStream_t stream) {
  int device = 0, processors = 0, resident = 0;
  const int planes = Wide ? 3 : 1, ranks = (launch.max_rank + kChunk - 1) / kChunk * kChunk;
  const int shared = launch.deep * slot_bytes_of<T, T, Wide>(launch) +
                     ranks * (launch.col_warps * 64 + launch.margin) * planes * static_cast<int>(sizeof(bf16));
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
