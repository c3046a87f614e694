// Merging quantised bases: a second loop over units, whose source is codes (codes.cuh). Bits are those of the merge
// kernel on the decoded weight.
//
// It works as merge.cuh does, but without stages: codes are a quarter of what is moved, or less. What a lane needs of
// the next steps it asks for one turn ahead and keeps in registers: its eight columns of a row, one word of codes of 4
// bits or two of int8, what scales them, and its piece of B. Values come out of a table of 16 in shared memory, where
// no two of them share a bank; eight results leave as whole vectors. Instructions are what this kernel is short of: in
// its loop nothing is read of the segment, and places are a multiplication away.
#pragma once
#include "codes.cuh"
#include "merge.cuh"

namespace lora_merge {

// A warp's part of a unit.
template <typename T, typename Destination, typename Adapter>
struct PackedUnit {
  static constexpr int kGroup = kPlanes<Adapter> > 1 ? 1 : 2;  // steps that share a load of A
  static constexpr int kSize = kWide<Adapter> ? 4 : 2;         // bytes of an element of B
  static constexpr int kMostPitch = 1 << 22;  // of a row: then a unit's rows are 2^31 apart at the most

  // What a lane asks memory for ahead of its use, of two rows a step.
  struct Asked {
    uint2 codes[kGroup][2];
    uint32_t scale[kGroup][2];  // a float, or a byte that stands for one, ...
    float outer[kGroup][2];     // ... times this
  };

  const Launch& launch;
  const Segment& s;
  const Walk& walk;
  const CodeTables& tables;
  const uint32_t a_address;
  const int pitch;

  const int quad, group, stride, rank, chunks, plane_bytes;
  const bool over, special, int8, nested, vector, words;
  const float scaling;
  [[maybe_unused]] ColumnFactors columns;  // of pairs

  // Of this lane's first row and column; what a row adds, and a step, in bytes and in blocks of codes.
  const char *codes, *piece_B;
  uint32_t block, row_codes, step_codes, row_blocks, step_blocks, step_B;

  __device__ __forceinline__ PackedUnit(const Launch& l, const Segment& of, const Walk& w, const CodeTables& t,
                                        uint32_t address, int a_pitch)
      : launch(l),
        s(of),
        walk(w),
        tables(t),
        a_address(address),
        pitch(a_pitch),
        quad(threadIdx.x % 4),
        group(threadIdx.x % 32 / 4),
        stride(Walk::row_stride(l)),
        rank(static_cast<int>(of.rank)),
        chunks((rank + kChunk - 1) / kChunk),
        plane_bytes(up_to_chunk(rank) * a_pitch * 2),
        over(turned(of)),
        special(l.stochastic || of.row_scale != 0),
        int8((of.dtypes >> 32) == kInt8),
        nested(of.absmax_code != 0),
        vector(vector_B<Adapter>(of) && of.lora_B_stride[0] * kSize < kMostPitch),
        words(by_words(of)),
        scaling(static_cast<float>(of.scaling)) {
    if constexpr (kPaired<Adapter>) columns = column_factors(s, walk.col);
    if (!words) return;
    const int64_t row = of.source_stride[0], place = of.place + row_of(0, 0) * row + w.col;
    codes = reinterpret_cast<const char*>(of.source + (int8 ? place : place >> 1));
    row_codes = static_cast<uint32_t>(int8 ? row : row >> 1), step_codes = row_codes * stride;
    const int shift = log2_of(of.block);
    block = static_cast<uint32_t>(shift >= 0 ? place >> shift : place / of.block);
    row_blocks = static_cast<uint32_t>(row) / static_cast<uint32_t>(of.block), step_blocks = row_blocks * stride;
    step_B = static_cast<uint32_t>(of.lora_B_stride[0]) * kSize * stride;
    piece_B = reinterpret_cast<const char*>(of.lora_B) +
              ((w.first_row + group) * of.lora_B_stride[0] + quad * 8) * static_cast<int64_t>(kSize);
  }

  // Whether a lane's columns are words that share a scale, rows are whole blocks, and results whole vectors. What is
  // not, and int8 with a quantised absmax, goes element by element.
  static __device__ __forceinline__ bool by_words(const Segment& of) {
    const int64_t row = of.source_stride[0];
    const bool scales = of.absmax_code == 0 || ((of.dtypes >> 32) != kInt8 && log2_of(of.absmax_block) >= 0);
    return in_words(of) && scales && row < kMostPitch && of.block <= row &&
           static_cast<uint32_t>(row) % static_cast<uint32_t>(of.block) == 0 &&
           (of.place + of.rows * row) / 8 < int64_t{1} << 31 &&  // numbers of blocks: they are of eight codes or more
           aligned16(of.destination, of.destination_stride, sizeof(Destination)) &&
           of.destination_stride[0] * static_cast<int64_t>(sizeof(Destination)) < kMostPitch;
  }

  __device__ __forceinline__ int row_of(int step, int e) const { return walk.first_row + step * stride + 2 * quad + e; }

  // Codes and scales of the steps from one on.
  __device__ __forceinline__ void ask(Asked& asked, int step, bool are_int8, bool are_nested, const Segment& of,
                                      int outer_shift) const {
    const char* const from = codes + static_cast<uint32_t>(step) * step_codes;
    const uint32_t first = block + static_cast<uint32_t>(step) * step_blocks;
#pragma unroll
    for (int j = 0; j < kGroup; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const char* const at = from + (j * step_codes + e * row_codes);
        if (are_int8) asked.codes[j][e] = __ldcs(reinterpret_cast<const uint2*>(at));
        else asked.codes[j][e].x = __ldcs(reinterpret_cast<const unsigned int*>(at));
        const uint32_t number = first + (j * step_blocks + e * row_blocks);
        if (are_nested) {
          asked.scale[j][e] = __ldg(reinterpret_cast<const uint8_t*>(of.absmax) + number);
          asked.outer[j][e] = __ldg(reinterpret_cast<const float*>(of.absmax_scale) + (number >> outer_shift));
        } else {
          asked.scale[j][e] = __ldg(reinterpret_cast<const unsigned int*>(of.absmax) + number);
        }
      }
  }

  // Eight ranks of B from `k` on, for this lane's row of a step.
  template <bool Usual>
  __device__ __forceinline__ Piece<Adapter> ask_B(int step, int k) const {
    if constexpr (kPaired<Adapter>) return pairs_of_B(s, walk.first_row + step * stride + group, k + quad * 8);
    if (!Usual && !vector) return fetch_B<Adapter>(s, walk.first_row + step * stride + group, k + quad * 8);
    Piece<Adapter> piece{};
    if (k + quad * 8 < rank) {
      const uint4* from = reinterpret_cast<const uint4*>(
          piece_B + (static_cast<uint32_t>(step) * step_B + static_cast<uint32_t>(k * kSize)));
#pragma unroll
      for (int i = 0; i < kSize / 2; ++i) {
        const uint4 v = __ldg(from + i);
        piece.word[4 * i] = v.x, piece.word[4 * i + 1] = v.y, piece.word[4 * i + 2] = v.z, piece.word[4 * i + 3] = v.w;
      }
    }
    return piece;
  }

  // All ranks of some steps. `ahead`: pieces of B of the first chunk, and then of that of the steps from `next` on.
  template <bool Usual>
  __device__ __forceinline__ void multiply(float (&sum)[kGroup][kSums<Adapter>][4], Piece<Adapter> (&ahead)[kGroup],
                                           int step, int next) const {
    const auto products = [&](int c) {
      uint32_t b[kGroup][kPlanes<Adapter>][4];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) operand_B<Adapter>(b[j], ahead[j]);
      multiply_chunk<Adapter, kRoundedSums<T, Destination, Adapter>, kGroup>(
          sum, a_address + c * kChunk * pitch * 2, pitch, plane_bytes, b, Usual ? false : over);
    };
    int c = 0;
#pragma unroll 1
    for (; c + 1 < chunks; ++c) {
      Piece<Adapter> after[kGroup];
#pragma unroll
      for (int j = 0; j < kGroup; ++j) after[j] = ask_B<Usual>(step + j, (c + 1) * kChunk);
      products(c);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) ahead[j] = after[j];
    }
    if (rank > 0) {
      products(c);
#pragma unroll
      for (int j = 0; j < kGroup; ++j) ahead[j] = ask_B<Usual>(next + j, 0);
      scale_back(sum, step);
    }
  }

  // Sums of pairs, whose rows and columns have factors.
  __device__ __forceinline__ void scale_back(float (&sum)[kGroup][kSums<Adapter>][4], int step) const {
    if constexpr (kPaired<Adapter>) {
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
        if (rank > 0) unscale(sum[j], s, columns, row_of(step + j, 0), walk.col);
    }
  }

  __device__ __forceinline__ void add(Eight& x, const float (&sum)[kSums<Adapter>][4], int e) const {
    if (rank > 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x.value[i] = fmaf(scaling, sum[i / 2][i % 2 * 2 + e], x.value[i]);
    }
  }

  // Whole steps, codes by words. Returns the first one that is left. Usual: no calls in the loop, which take registers.
  template <bool Int8, bool Nested, bool Usual>
  __device__ __forceinline__ int run_words(Asked next, int outer_shift) const {
    const int steps = walk.full_steps;
    const float offset = Nested ? __ldg(reinterpret_cast<const float*>(s.absmax_offset)) : 0.0f;
    const uint32_t row_bytes =
                       static_cast<uint32_t>(s.destination_stride[0] * static_cast<int64_t>(sizeof(Destination))),
                   step_bytes = row_bytes * stride;
    char* const to = reinterpret_cast<char*>(s.destination) + row_of(0, 0) * static_cast<int64_t>(row_bytes) +
                     walk.col * static_cast<int64_t>(sizeof(Destination));
    Segment scales;  // so that it stays in registers
    scales.absmax = s.absmax, scales.absmax_scale = s.absmax_scale;
    Piece<Adapter> ahead[kGroup];
    if (rank > 0)
#pragma unroll
      for (int j = 0; j < kGroup; ++j) ahead[j] = ask_B<Usual>(j, 0);
    int step = 0;
#pragma unroll 1
    for (; step + kGroup <= steps; step += kGroup) {
      const Asked now = next;
      const int after = step + 2 * kGroup <= steps ? step + kGroup : step;  // the last one asks for its own again
      ask(next, after, Int8, Nested, scales, outer_shift);
      float sum[kGroup][kSums<Adapter>][4] = {};
      multiply<Usual>(sum, ahead, step, after);
      char* const out_step = to + static_cast<uint32_t>(step) * step_bytes;
#pragma unroll
      for (int j = 0; j < kGroup; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float factor = Nested ? __fadd_rn(__fmul_rn(tables.absmax[now.scale[j][e]], now.outer[j][e]), offset)
                                      : __uint_as_float(now.scale[j][e]);
          Eight x = decode8<T, Int8>(now.codes[j][e], factor, tables.value);
          add(x, sum[j], e);
          Packed<Destination> out;
          if (!Usual && special)
            out = round_special<Destination>(x, s, row_of(step + j, e), walk.col, 2, launch.stochastic, launch.seed);
          else round_nearest8(reinterpret_cast<Destination(&)[8]>(out), x.value);
          uint4* const at = reinterpret_cast<uint4*>(out_step + (j * step_bytes + e * row_bytes));
#pragma unroll
          for (int i = 0; i < static_cast<int>(sizeof(Destination)) / 2; ++i) __stcs(at + i, out.word[i]);
        }
    }
    return step;
  }
  template <bool Usual>
  __device__ __forceinline__ int run_words(const Asked& first, int outer_shift) const {
    if (int8) return run_words<true, false, Usual>(first, outer_shift);
    return nested ? run_words<false, true, Usual>(first, outer_shift)
                  : run_words<false, false, Usual>(first, outer_shift);
  }

  // `load_A` brings A, and what tables hold, and waits for it: after the first codes have been asked for.
  template <typename Load>
  __device__ __forceinline__ void run(Load load_A) const {
    const int outer_shift = log2_of(s.absmax_block);
    const bool whole = words && walk.full_steps >= kGroup;
    Asked first{};
    if (whole) ask(first, 0, int8, nested, s, outer_shift);
    load_A();
    int step = 0;
    if (whole)
      step = vector && !special && !over ? run_words<true>(first, outer_shift) : run_words<false>(first, outer_shift);
#pragma unroll 1
    for (; walk.first_row + step * stride < walk.row_end; step += kGroup) {
      float sum[kGroup][kSums<Adapter>][4] = {};
      __syncwarp();
#pragma unroll 1
      for (int c = 0; c < chunks; ++c) {
        uint32_t b[kGroup][kPlanes<Adapter>][4];
#pragma unroll
        for (int j = 0; j < kGroup; ++j)
          operand_B<Adapter>(b[j],
                             fetch_B<Adapter>(s, walk.first_row + (step + j) * stride + group, c * kChunk + quad * 8));
        multiply_chunk<Adapter, kRoundedSums<T, Destination, Adapter>, kGroup>(sum, a_address + c * kChunk * pitch * 2,
                                                                               pitch, plane_bytes, b, over);
      }
      scale_back(sum, step);
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
  __shared__ CodeTables tables;
  __shared__ int unit_ring[4];
  const int width = launch.col_warps * 64, pitch = width + launch.pad;
  const uint32_t a_address = operand_A_address(shared_A, threadIdx.x / 32 % launch.col_warps, pitch);
  const Units units{launch, unit_ring};
  if (threadIdx.x == 0) units.fetch(0);
  __syncthreads();
  int n = 0, unit = units[0];
  for (; unit < launch.n_units; unit = units[++n]) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    const Walk walk(launch, s, unit);
    PackedUnit<T, Destination, Adapter>(launch, s, walk, tables, a_address, pitch).run([&] {
      __syncthreads();  // the last unit's A and tables are no longer read
      if (threadIdx.x == 0) units.fetch(n + 1);
      tables.load(s);
      if (s.rank > 0) load_A<Adapter>(shared_A, s, walk.strip, width, pitch);
      __syncthreads();
    });
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
  if (shared + kStatic + static_cast<int>(sizeof(CodeTables)) > per_block) return cudaErrorInvalidConfiguration;
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

template <typename T>
int launch_packed_from(int destination_dtype, int adapters, const Launch& launch, cudaStream_t stream) {
  return with_dtype(destination_dtype, [&](auto destination) {
    using Destination = decltype(destination);
    return with_adapters<T, Destination>(adapters, [&](auto adapter) {
      return launch_packed<T, Destination, decltype(adapter)>(launch, stream);
    });
  });
}

}  // namespace lora_merge
