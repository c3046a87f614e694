// Merging quantised bases: a second walk over units, whose source is codes (lora_merge/kernels/packed.py says what they
// stand for). Bits are those of the merge kernel on the decoded weight.
//
// It works as merge.cuh does, but without stages: codes are a quarter of what is moved, or less. A lane's eight columns
// of a row are one word of codes of 4 bits, or two of int8, which it asks for one step ahead, with what scales them;
// values come out of a table of 16 in shared memory, where no two of them share a bank; and eight results leave as
// whole vectors.
#pragma once
#include "tiles.cuh"

namespace lora_merge {

// A source of codes that stand for elements of T.
template <typename T>
struct Coded {};

// How codes are found and scaled.
struct Scales {
  const float *absmax, *code, *scale;
  float offset;
  int64_t place, stride, block, first;  // of element (0, 0), to the next row; of blocks, the first row's
  int shift, outer_shift;               // blocks' size as a power of two; -1: it is none
  int64_t outer;
  bool by_row;  // a block is a row

  __device__ __forceinline__ explicit Scales(const Segment& s)
      : absmax(reinterpret_cast<const float*>(s.absmax)),
        code(reinterpret_cast<const float*>(s.absmax_code)),
        scale(reinterpret_cast<const float*>(s.absmax_scale)),
        offset(s.absmax_code != 0 ? __ldg(reinterpret_cast<const float*>(s.absmax_offset)) : 0.0f),
        place(s.place),
        stride(s.source_stride[0]),
        block(s.block),
        first(s.place / s.block),
        shift(log2_of(s.block)),
        outer_shift(log2_of(s.absmax_block)),
        outer(s.absmax_block),
        by_row(s.source_stride[0] == s.block && s.source_stride[1] == 1 && s.place % s.block + s.cols <= s.block) {}

  static __device__ __forceinline__ int log2_of(int64_t n) {
    return n > 0 && (n & (n - 1)) == 0 ? __ffsll(static_cast<long long>(n)) - 1 : -1;
  }
  __device__ __forceinline__ int64_t number(int row, int64_t at) const {
    return by_row ? first + row : shift >= 0 ? at >> shift : at / block;
  }
  // What memory holds of a block's scale, and what it is then.
  __device__ __forceinline__ uint32_t ask(int64_t number) const {
    if (code == nullptr) return __float_as_uint(__ldg(absmax + number));
    return __ldg(reinterpret_cast<const uint8_t*>(absmax) + number);
  }
  __device__ __forceinline__ float of(uint32_t asked, int64_t number) const {
    if (code == nullptr) return __uint_as_float(asked);
    const float outer_scale = __ldg(scale + (outer_shift >= 0 ? number >> outer_shift : number / outer));
    return __fadd_rn(__fmul_rn(__ldg(code + asked), outer_scale), offset);
  }
};

// To T and back, two at a time.
template <typename T>
__device__ __forceinline__ void through(float& x, float& y) {
  if constexpr (std::is_same_v<T, bf16>) {
    const float2 both = __bfloat1622float2(__floats2bfloat162_rn(x, y));
    x = both.x, y = both.y;
  } else if constexpr (std::is_same_v<T, __half>) {
    const float2 both = __half22float2(__floats2half2_rn(x, y));
    x = both.x, y = both.y;
  }
}

// Eight codes side by side.
template <typename T, bool Int8>
__device__ __forceinline__ Eight decode8(uint2 codes, float scale, const float* table) {
  Eight w;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float &x = w.value[2 * i], &y = w.value[2 * i + 1];
    if constexpr (Int8) {
      const uint32_t word = (i < 2 ? codes.x : codes.y) >> (16 * (i % 2));
      x = __fmul_rn(__fmul_rn(static_cast<float>(static_cast<int8_t>(word)), scale), kInt8Step);
      y = __fmul_rn(__fmul_rn(static_cast<float>(static_cast<int8_t>(word >> 8)), scale), kInt8Step);
    } else {
      const uint32_t byte = codes.x >> (8 * i);
      x = __fmul_rn(table[(byte >> 4) & 15], scale);
      y = __fmul_rn(table[byte & 15], scale);
    }
    through<T>(x, y);
  }
  return w;
}

// Whether eight columns of a row are whole words of codes that share a scale, at every eighth column.
__device__ __forceinline__ bool in_words(const Segment& s) {
  const int64_t aligned = (s.dtypes >> 32) == kInt8 ? 7 : 3;
  return s.source_stride[1] == 1 && ((s.place | s.source_stride[0] | s.block) & 7) == 0 && (s.source & aligned) == 0;
}

// Eight columns of a row, whatever their place: at edges, for codes that are no runs of words, for norms.
template <typename T>
__device__ __noinline__ Eight decode_elements(const Segment& s, int row, int col) {
  const auto scale_at = [&](int64_t at) {
    const int shift = Scales::log2_of(s.block);
    const int64_t number = shift >= 0 ? at >> shift : at / s.block;
    if (s.absmax_code == 0) return __ldg(reinterpret_cast<const float*>(s.absmax) + number);
    const int byte = __ldg(reinterpret_cast<const uint8_t*>(s.absmax) + number);
    const int outer = Scales::log2_of(s.absmax_block);
    const float factor = __ldg(reinterpret_cast<const float*>(s.absmax_scale) +
                               (outer >= 0 ? number >> outer : number / s.absmax_block));
    return __fadd_rn(__fmul_rn(__ldg(reinterpret_cast<const float*>(s.absmax_code) + byte), factor),
                     __ldg(reinterpret_cast<const float*>(s.absmax_offset)));
  };
  const bool int8 = (s.dtypes >> 32) == kInt8;
  const float* const table = reinterpret_cast<const float*>(s.code);
  const int64_t first = s.place + row * s.source_stride[0] + col * s.source_stride[1];
  if (col + 8 <= s.cols && in_words(s)) {
    if (int8) return decode8<T, true>(__ldg(reinterpret_cast<const uint2*>(s.source + first)), scale_at(first), table);
    const uint32_t word = __ldg(reinterpret_cast<const unsigned int*>(s.source + (first >> 1)));
    return decode8<T, false>(make_uint2(word, 0), scale_at(first), table);
  }
  Eight w;
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float x = 0.0f, unused = 0.0f;
    if (col + e < s.cols) {
      const int64_t at = first + e * s.source_stride[1];
      const float scale = scale_at(at);
      if (int8) {
        const int q = __ldg(reinterpret_cast<const signed char*>(s.source) + at);
        x = __fmul_rn(__fmul_rn(static_cast<float>(q), scale), kInt8Step);
      } else {
        const int byte = __ldg(reinterpret_cast<const uint8_t*>(s.source) + (at >> 1));
        x = __fmul_rn(__ldg(table + (at & 1 ? byte & 15 : byte >> 4)), scale);
      }
      through<T>(x, unused);
    }
    w.value[e] = x;
  }
  return w;
}

template <>
__device__ __forceinline__ Eight load_elements<Coded<bf16>>(const Segment& s, int row, int col) {
  return decode_elements<bf16>(s, row, col);
}
template <>
__device__ __forceinline__ Eight load_elements<Coded<__half>>(const Segment& s, int row, int col) {
  return decode_elements<__half>(s, row, col);
}
template <>
__device__ __forceinline__ Eight load_elements<Coded<float>>(const Segment& s, int row, int col) {
  return decode_elements<float>(s, row, col);
}

}  // namespace lora_merge

#include "merge.cuh"

namespace lora_merge {

// Eight ranks of a row of B, straight from memory.
template <typename Adapter>
__device__ __forceinline__ Piece<Adapter> piece_of_B(const Segment& s, int row, int k, bool vector) {
  if constexpr (kPaired<Adapter>) {
    return pairs_of_B(s, row, k);
  } else {
    if (!vector) return fetch_B<Adapter>(s, row, k);
    Piece<Adapter> piece{};
    if (k < s.rank && row < s.rows) {
      const int64_t at = row * s.lora_B_stride[0] + k;
      const uint4* from = reinterpret_cast<const uint4*>(s.lora_B + at * (kWide<Adapter> ? 4 : 2));
#pragma unroll
      for (int i = 0; i < kPieces<Adapter>; ++i) {
        const uint4 v = __ldg(from + i);
        piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
      }
    }
    return piece;
  }
}

// A warp's part of a unit.
template <typename T, typename Destination, typename Adapter>
struct PackedUnit {
  static constexpr int kGroup = kPlanes<Adapter> > 1 ? 1 : 2;  // steps that share a load of A

  const Launch& launch;
  const Segment& s;
  const Walk& walk;
  const float* table;
  const uint32_t a_address;
  const int pitch;

  const int quad, group, stride, chunks, plane_bytes;
  const bool over, vector, special;
  const float scaling;
  [[maybe_unused]] ColumnFactors columns;  // of pairs

  __device__ __forceinline__ PackedUnit(const Launch& l, const Segment& of, const Walk& w, const float* values,
                                        uint32_t address, int a_pitch)
      : launch(l),
        s(of),
        walk(w),
        table(values),
        a_address(address),
        pitch(a_pitch),
        quad(threadIdx.x % 4),
        group(threadIdx.x % 32 / 4),
        stride(Walk::row_stride(l)),
        chunks((static_cast<int>(of.rank) + kChunk - 1) / kChunk),
        plane_bytes(up_to_chunk(of.rank) * a_pitch * 2),
        over(turned(of)),
        vector(vector_B<Adapter>(of)),
        special(l.stochastic || of.row_scale != 0),
        scaling(static_cast<float>(of.scaling)) {
    if constexpr (kPaired<Adapter>) columns = column_factors(s, walk.col);
  }

  __device__ __forceinline__ int row_of(int step, int e) const { return walk.first_row + step * stride + 2 * quad + e; }

  __device__ __forceinline__ void multiply(float (&sum)[kGroup][4][4], int step) const {
#pragma unroll 1
    for (int c = 0; c < chunks; ++c) {
      uint32_t b[kGroup][kPlanes<Adapter>][4];
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        operand_B<Adapter>(
            b[j], piece_of_B<Adapter>(s, walk.first_row + (step + j) * stride + group, c * kChunk + quad * 8, vector));
      multiply_chunk<Adapter, kRoundedSums<T, Destination, Adapter>, kGroup>(
          sum, a_address + c * kChunk * pitch * 2, pitch, plane_bytes, b, over);
    }
    if constexpr (kPaired<Adapter>) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (s.rank > 0) unscale(sum[j], s, columns, row_of(step + j, 0), walk.col);
    }
  }

  __device__ __forceinline__ void add(Eight& x, const float (&sum)[4][4], int e) const {
    if (s.rank > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x.value[i] = fmaf(scaling, sum[i / 2][i % 2 * 2 + e], x.value[i]);
    }
  }

  // Whole steps, codes by words. Returns the first one that is left.
  template <bool Int8>
  __device__ __forceinline__ int run_words(int steps) const {
    struct Asked {
      uint2 codes[kGroup][2];
      uint32_t scale[kGroup][2];
    };
    const Scales scales(s);
    const auto at = [&](int row) { return scales.place + row * scales.stride + walk.col; };
    const auto ask = [&](Asked& asked, int step) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = row_of(step + j, e);
          const int64_t place = at(row);
          if constexpr (Int8) asked.codes[j][e] = __ldcs(reinterpret_cast<const uint2*>(s.source + place));
          else asked.codes[j][e].x = __ldcs(reinterpret_cast<const unsigned int*>(s.source + (place >> 1)));
          asked.scale[j][e] = scales.ask(scales.number(row, place));
        }
    };
    Asked next;
    if (kGroup <= steps) ask(next, 0);
    int step = 0;
#pragma unroll 1
    for (; step + kGroup <= steps; step += kGroup) {
      const Asked now = next;
      if (step + 2 * kGroup <= steps) ask(next, step + kGroup);
      float sum[kGroup][4][4] = {};
      multiply(sum, step);
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = row_of(step + j, e);
          Eight x = decode8<T, Int8>(now.codes[j][e], scales.of(now.scale[j][e], scales.number(row, at(row))), table);
          add(x, sum[j], e);
          Packed<Destination> out;
          if (special) out = round_special<Destination>(x, s, row, walk.col, 2, launch.stochastic, launch.seed);
          else round_nearest8(reinterpret_cast<Destination(&)[8]>(out), x.value);
          uint4* to = reinterpret_cast<uint4*>(
              s.destination +
              (row * s.destination_stride[0] + walk.col) * static_cast<int64_t>(sizeof(Destination)));
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(Destination)) / 2; ++i) __stcs(to + i, out.word[i]);
        }
    }
    return step;
  }

  __device__ __forceinline__ void run() const {
    int step = 0;
    if (in_words(s) && aligned16(s.destination, s.destination_stride, sizeof(Destination)))
      step = (s.dtypes >> 32) == kInt8 ? run_words<true>(walk.full_steps) : run_words<false>(walk.full_steps);
#pragma unroll 1
    for (; walk.first_row + step * stride < walk.row_end; step += kGroup) {
      float sum[kGroup][4][4] = {};
      __syncwarp();
      multiply(sum, step);
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int row = row_of(step + j, e);
          if (row >= walk.row_end || walk.col >= s.cols) continue;
          Eight x = decode_elements<T>(s, row, walk.col);
          add(x, sum[j], e);
          store_elements<Destination>(x, s, row, walk.col, launch.stochastic, launch.seed);
        }
    }
  }
};

template <typename T, typename Destination, typename Adapter>
__global__ void __launch_bounds__(kThreads, 2) packed_kernel(const __grid_constant__ Launch launch) {
  extern __shared__ __align__(128) char memory[];
  bf16* shared_A = reinterpret_cast<bf16*>(memory);
  __shared__ float table[16];
  __shared__ int unit_ring[4];
  const int width = launch.col_warps * 64, pitch = width + launch.pad;
  const uint32_t a_address = operand_A_address(shared_A, threadIdx.x / 32 % launch.col_warps, pitch);
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  int n = 0, unit = units[0];
  for (; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    __syncthreads();  // the last unit's A and table are no longer read
    if (threadIdx.x == 0) units.fetch(n + 1);
    if (threadIdx.x < 16 && s.code != 0)
      table[threadIdx.x] = __ldg(reinterpret_cast<const float*>(s.code) + threadIdx.x);
    const Walk walk(launch, s, unit);
    if (s.rank > 0) load_A<Adapter>(shared_A, s, walk.strip, width, pitch);
    __syncthreads();
    PackedUnit<T, Destination, Adapter>(launch, s, walk, table, a_address, pitch).run();
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

template <typename T, typename Destination, typename Adapter>
int launch_packed(const Launch& launch, cudaStream_t stream) {
  int device = 0, processors = 0, per_block = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int64_t ranks = int64_t{chunks_of(launch.max_rank)} * kChunk * kPlanes<Adapter>;
  const int64_t shared = ranks * (kWarpCols * launch.col_warps + launch.pad) * 2;
  if (shared + kStatic > per_block) return cudaErrorInvalidConfiguration;
  const auto kernel = packed_kernel<T, Destination, Adapter>;
  error = allow_shared(kernel, static_cast<int>(shared));
  int blocks_each = 0;
  if (error == cudaSuccess)
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_each, kernel, kThreads, static_cast<size_t>(shared));
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  const int64_t blocks = static_cast<int64_t>(processors) * (blocks_each > 0 ? blocks_each : 1);
  kernel<<<static_cast<unsigned>(units < blocks ? units : blocks), kThreads, shared, stream>>>(launch);
  return cudaGetLastError();
}

template <typename T, typename Destination>
int launch_packed_to(int adapters, const Launch& launch, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2 && sizeof(Destination) == 2)
    if (adapters == kPairs) return launch_packed<T, Destination, Pair>(launch, stream);
  if (adapters == kFloat32) return launch_packed<T, Destination, float>(launch, stream);
  if (adapters == kBFloat16) return launch_packed<T, Destination, bf16>(launch, stream);
  if constexpr (std::is_same_v<T, __half> && std::is_same_v<Destination, __half>)
    return launch_packed<T, Destination, __half>(launch, stream);
  return cudaErrorInvalidConfiguration;
}

template <typename T>
int launch_packed_from(int destination_dtype, int adapters, const Launch& launch, cudaStream_t stream) {
  switch (destination_dtype) {
    case kBFloat16: return launch_packed_to<T, bf16>(adapters, launch, stream);
    case kFloat16: return launch_packed_to<T, __half>(adapters, launch, stream);
    default: return launch_packed_to<T, float>(adapters, launch, stream);
  }
}

}  // namespace lora_merge
