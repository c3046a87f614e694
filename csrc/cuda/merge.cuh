// The merge kernel: one persistent grid over all tiles of a segment table.
//
//   W    global -> shared by cp.async, one to two tiles ahead. Every thread stages the very elements that it will
//        finish, so the stage needs no barrier, only the thread's own wait.
//   A    a strip of 128 columns stays in shared memory while the block walks down the rows of its unit.
//   B    64 rows a tile, double buffered, fetched to registers one step ahead.
//   mma  bf16 products, float32 sums; each chunk of the rank is summed apart and then added (round to nearest), which
//        keeps the error of the matrix unit's truncating adder from growing with the rank.
//   out  registers -> global, 16 bytes a thread.
//
// The columns of A are permuted on their way into shared memory so that the matrix unit hands every thread eight
// adjacent columns of a row: 16 bytes of bf16. Bits of an element depend on its row of B, its column of A, the rank and
// W alone: tiles, edges and alignment choose only how data is loaded and stored.
//
// Wide: adapters that are not both bf16 are split into three bf16 parts, and the six products above 2^-26 are summed,
// small ones first, so float32 adapters keep float32 accuracy.
#pragma once
#include "device.cuh"

namespace lora_merge {

constexpr int kThreads = 256;
constexpr int kWarpRows = 32, kWarpCols = 32;  // 2 x 4 warps
// Descriptors held in shared memory, and how many units ahead they are fetched: the stream of W looks at most three
// units ahead, and a descriptor is there for all threads three units after it was asked for.
constexpr int kRing = 8, kAhead = 6;
constexpr int kSharedForTwo = 113 * 1024;      // shared memory with which two blocks fit on an sm_90 or sm_100

template <typename Source, bool Wide>
struct Layout {
  static constexpr int kPlanes = Wide ? 3 : 1;
  static constexpr int kChunk = Wide ? 32 : 64;  // ranks a step
  static constexpr int kStages = sizeof(Source) == 4 ? 2 : 3;
  static constexpr int kBPitch = kChunk + 8;  // elements; odd in 16-byte units, so ldmatrix has no bank conflicts
  static constexpr int kAPitch = kTileCols + 8;
  static constexpr int kBPlane = kTileRows * kBPitch;
  static constexpr int kAPlane = kChunk * kAPitch;
  static constexpr int kRingBytes = kRing * sizeof(Segment);
  static constexpr int kWBytes = kStages * kTileRows * kTileCols * sizeof(Source);
  static constexpr int kBBytes = 2 * kPlanes * kBPlane * sizeof(bf16);
  static constexpr int kABytes = kPlanes * kAPlane * sizeof(bf16);  // a slot
  static constexpr int kFixed = kRingBytes + kWBytes + kBBytes;
};

__device__ __forceinline__ int segment_of(const Launch& launch, int unit) {
  if (launch.unit_segment != nullptr) return launch.unit_segment[unit];
  int s = 0;
  while (s + 1 < launch.n_segments && unit >= launch.inline_segments[s + 1].unit_begin) ++s;
  return s;
}

__device__ __forceinline__ const Segment* segments_of(const Launch& launch) {
  return launch.segments != nullptr ? launch.segments : launch.inline_segments;
}

// Where a unit lies in its segment: a strip of kTileCols columns and rows_per_unit rows.
struct Strip {
  int row, row_end, col;
  __device__ __forceinline__ Strip(const Segment& s, int unit, int rows_per_unit) {
    const uint32_t local = static_cast<uint32_t>(unit - s.unit_begin), across = static_cast<uint32_t>(s.units_across);
    const uint32_t down = local / across;
    row = down * rows_per_unit;
    row_end = min(row + rows_per_unit, static_cast<int>(s.rows));
    col = (local - down * across) * kTileCols;
  }
};

// Whether rows of a view can be touched 16 bytes at a time (edges aside).
template <typename T>
__device__ __forceinline__ bool aligned16(int64_t address, const int64_t (&stride)[2]) {
  return stride[1] == 1 && ((address | (stride[0] * static_cast<int64_t>(sizeof(T)))) & 15) == 0;
}

// ---- loading adapters into shared memory ---------------------------------------------------------------------------

__device__ __forceinline__ bool plain_bf16(const Segment& s) { return ((s.dtypes >> 16) & 0xffff) == 0; }

// Eight values of B: row `row`, ranks k .. k+7 (zeros outside), as they lie in memory: loads in flight, not yet used.
struct Piece {
  uint32_t word[8];
};

template <bool Wide>
__device__ __forceinline__ void fetch_B(Piece& piece, const Segment& s, int row, int k) {
  const int dtype = (s.dtypes >> 24) & 0xff;
  const int64_t at = row * s.lora_B_stride[0] + k * s.lora_B_stride[1];
  const bool inside = row < s.rows && k + 8 <= s.rank;
  const int size = dtype == kFloat32 ? 4 : 2;
  const bool vector = s.lora_B_stride[1] == 1 && ((s.lora_B | (s.lora_B_stride[0] * size)) & 15) == 0;
  if (vector && inside && (Wide ? dtype == kFloat32 : true)) {
    const uint4* from = reinterpret_cast<const uint4*>(s.lora_B + at * size);
    const uint4 low = __ldg(from);
    piece.word[0] = low.x, piece.word[1] = low.y, piece.word[2] = low.z, piece.word[3] = low.w;
    if constexpr (Wide) {
      const uint4 high = __ldg(from + 1);
      piece.word[4] = high.x, piece.word[5] = high.y, piece.word[6] = high.z, piece.word[7] = high.w;
    }
    return;
  }
  float value[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    value[i] = row < s.rows && k + i < s.rank ? load_as_float(s.lora_B, at + i * s.lora_B_stride[1], dtype) : 0.0f;
#pragma unroll
  for (int i = 0; i < (Wide ? 8 : 4); ++i)
    piece.word[i] = Wide ? __float_as_uint(value[i])
                         : pack2(__float2bfloat16_rn(value[2 * i]), __float2bfloat16_rn(value[2 * i + 1]));
}

// Writes a piece to shared memory (row-major, kBPitch), split into its planes.
template <bool Wide, int Pitch, int Plane>
__device__ __forceinline__ void store_B(const Piece& piece, bf16* shared, int row, int k) {
  uint4* to = reinterpret_cast<uint4*>(shared + row * Pitch + k);
  if constexpr (Wide) {
    uint32_t packed[3][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bf16 even[3], odd[3];
      split3(__uint_as_float(piece.word[2 * i]), even);
      split3(__uint_as_float(piece.word[2 * i + 1]), odd);
#pragma unroll
      for (int p = 0; p < 3; ++p) packed[p][i] = pack2(even[p], odd[p]);
    }
#pragma unroll
    for (int p = 0; p < 3; ++p) to[p * (Plane / 8)] = make_uint4(packed[p][0], packed[p][1], packed[p][2], packed[p][3]);
  } else {
    *to = make_uint4(piece.word[0], piece.word[1], piece.word[2], piece.word[3]);
  }
}

// A chunk of A, ranks [k0, k0 + kChunk) and columns [col, col + 128), to shared memory with permuted columns: within
// 32, column 8q + 2t + e goes to place 8t + 2q + e.
template <typename L, bool Wide>
__device__ __forceinline__ void load_A(bf16* shared, const Segment& s, int col, int k0) {
  const int dtype = (s.dtypes >> 16) & 0xff, size = dtype == kFloat32 ? 4 : 2;
  const bool vector = s.lora_A_stride[1] == 1 && ((s.lora_A | (s.lora_A_stride[0] * size)) & 15) == 0;
  const int ranks = min(L::kChunk, static_cast<int>((s.rank - k0 + 15) & ~15));  // the matrix unit takes 16 at a time
  for (int i = threadIdx.x; i < ranks * (kTileCols / 8); i += kThreads) {
    const int k = i / (kTileCols / 8), piece = i % (kTileCols / 8), j = col + piece * 8;
    const int64_t at = (k0 + k) * s.lora_A_stride[0] + j * s.lora_A_stride[1];
    uint32_t packed[L::kPlanes][4];
    const bool here = k0 + k < s.rank;
    if (!Wide && vector && here && j + 8 <= s.cols) {
      const uint4 v = __ldg(reinterpret_cast<const uint4*>(s.lora_A + at * 2));
      packed[0][0] = v.x, packed[0][1] = v.y, packed[0][2] = v.z, packed[0][3] = v.w;
    } else {
      float value[8];
      if (vector && here && j + 8 <= s.cols && dtype == kFloat32) {
        const float4* from = reinterpret_cast<const float4*>(s.lora_A + at * 4);
        const float4 low = __ldg(from), high = __ldg(from + 1);
        value[0] = low.x, value[1] = low.y, value[2] = low.z, value[3] = low.w;
        value[4] = high.x, value[5] = high.y, value[6] = high.z, value[7] = high.w;
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e)
          value[e] = here && j + e < s.cols ? load_as_float(s.lora_A, at + e * s.lora_A_stride[1], dtype) : 0.0f;
      }
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if constexpr (Wide) {
          bf16 even[3], odd[3];
          split3(value[2 * t], even);
          split3(value[2 * t + 1], odd);
#pragma unroll
          for (int p = 0; p < L::kPlanes; ++p) packed[p][t] = pack2(even[p], odd[p]);
        } else {
          packed[0][t] = pack2(__float2bfloat16_rn(value[2 * t]), __float2bfloat16_rn(value[2 * t + 1]));
        }
      }
    }
    uint32_t* to = reinterpret_cast<uint32_t*>(shared + k * L::kAPitch + (piece / 4) * 32 + (piece % 4) * 2);
#pragma unroll
    for (int p = 0; p < L::kPlanes; ++p)
#pragma unroll
      for (int t = 0; t < 4; ++t) to[p * (L::kAPlane / 2) + t * 4] = packed[p][t];
  }
}

// ---- a chunk of the rank: sum[row block of 16][column block][4] += B A ------------------------------------------------

template <typename L, bool Wide>
__device__ __forceinline__ void multiply_chunk(float (&sum)[2][4][4], const bf16* B, const bf16* A, int ranks) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = (warp / 4) * kWarpRows, warp_col = (warp % 4) * kWarpCols;
  const uint32_t b_at = shared_address(B + (warp_row + lane % 16) * L::kBPitch + lane / 16 * 8);
  const uint32_t a_at = shared_address(A + (lane % 16) * L::kAPitch + warp_col + lane / 16 * 8);
  float part[2][4][4] = {};
  for (int k = 0; k < ranks; k += 16) {
    uint32_t b[L::kPlanes][2][4], a[L::kPlanes][2][4];
#pragma unroll
    for (int p = 0; p < L::kPlanes; ++p)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ldmatrix4(b[p][h], b_at + (p * L::kBPlane + h * 16 * L::kBPitch + k) * 2);
        ldmatrix4_trans(a[p][h], a_at + (p * L::kAPlane + k * L::kAPitch + h * 16) * 2);
      }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int h = j / 2, w = (j % 2) * 2;
        if constexpr (Wide) {
          constexpr int kB[6] = {2, 1, 0, 1, 0, 0}, kA[6] = {0, 1, 2, 0, 1, 0};  // planes of the six products
#pragma unroll
          for (int p = 0; p < 6; ++p) mma(part[i][j], b[kB[p]][i], a[kA[p]][h][w], a[kA[p]][h][w + 1]);
        } else {
          mma(part[i][j], b[0][i], a[0][h][w], a[0][h][w + 1]);
        }
      }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] += part[i][j][e];
}

// ---- the base and the result -----------------------------------------------------------------------------------------

// The eight elements of W at (row, col .. col+7), from the stage or straight from memory.
template <typename Source>
__device__ __forceinline__ void load_W(float (&w)[8], const Segment& s, const Source* staged, bool is_staged, int row, int col) {
  alignas(16) Source raw[8];
  if (is_staged) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Source)) / 2; ++i)
      reinterpret_cast<uint4*>(raw)[i] = reinterpret_cast<const uint4*>(staged)[i * kThreads];
  } else {
    const Source* from = reinterpret_cast<const Source*>(s.source) + row * s.source_stride[0] + col * s.source_stride[1];
#pragma unroll
    for (int e = 0; e < 8; ++e) raw[e] = row < s.rows && col + e < s.cols ? from[e * s.source_stride[1]] : Source(0.0f);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) w[e] = to_float(raw[e]);
}

template <typename Destination>
__device__ __forceinline__ void store_row(const float (&value)[8], const Segment& s, bool vector, int row, int col,
                                          bool stochastic, uint64_t seed) {
  alignas(16) Destination out[8];
  if (stochastic) {
    const uint64_t index = s.first + row * s.pitch[0] + col * s.pitch[1];
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = round_stochastic<Destination>(value[e], random_bits(s.key ^ seed, index + e * s.pitch[1]));
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e) out[e] = round_nearest<Destination>(value[e]);
  }
  Destination* to = reinterpret_cast<Destination*>(s.destination) + row * s.destination_stride[0] + col * s.destination_stride[1];
  if (vector && col + 8 <= s.cols) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(Destination)) / 2; ++i)
      __stcs(reinterpret_cast<uint4*>(to) + i, reinterpret_cast<const uint4*>(out)[i]);
  } else {
#pragma unroll
    for (int e = 0; e < 8; ++e)
      if (col + e < s.cols) to[e * s.destination_stride[1]] = out[e];
  }
}

// Where this thread's pieces lie in a tile: rows row + 8i for i in 0..3, columns col .. col+7.
__device__ __forceinline__ int thread_row() { return (threadIdx.x / 128) * kWarpRows + (threadIdx.x % 32) / 4; }
__device__ __forceinline__ int thread_col() { return (threadIdx.x / 32 % 4) * kWarpCols + (threadIdx.x % 4) * 8; }

// ---- copies of raw bits ------------------------------------------------------------------------------------------------

template <typename T>
__device__ void copy_elements(const Segment& s, int row, int rows, int64_t col, int64_t cols) {
  for (int64_t i = threadIdx.x; i < rows * cols; i += kThreads) {
    const int64_t r = row + i / cols, c = col + i % cols;
    reinterpret_cast<T*>(s.destination)[r * s.destination_stride[0] + c * s.destination_stride[1]] =
        reinterpret_cast<const T*>(s.source)[r * s.source_stride[0] + c * s.source_stride[1]];
  }
}

__device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (((reinterpret_cast<int64_t>(to) ^ reinterpret_cast<int64_t>(from)) & 15) == 0) {
    const int64_t head = min(bytes, static_cast<int64_t>(-reinterpret_cast<int64_t>(to) & 15));
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    const int64_t vectors = (bytes - head) / 16;
    uint4* v_to = reinterpret_cast<uint4*>(to + head);
    const uint4* v_from = reinterpret_cast<const uint4*>(from + head);
    int64_t i = threadIdx.x;
    for (; i + 7 * kThreads < vectors; i += 8 * kThreads) {
      uint4 v[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = __ldcs(v_from + i + u * kThreads);
#pragma unroll
      for (int u = 0; u < 8; ++u) __stcs(v_to + i + u * kThreads, v[u]);
    }
    for (; i < vectors; i += kThreads) __stcs(v_to + i, __ldcs(v_from + i));
    for (int64_t t = head + vectors * 16 + threadIdx.x; t < bytes; t += kThreads) to[t] = from[t];
  } else {
    for (int64_t t = threadIdx.x; t < bytes; t += kThreads) to[t] = from[t];
  }
}

__device__ void copy_unit(const Segment& s, int unit) {
  const int64_t width = s.rows == 1 ? kRawCols1 : kRawCols;
  const int64_t local = unit - s.unit_begin, down = local / s.units_across;
  const int64_t col = (local - down * s.units_across) * width, cols = min(width, s.cols - col);
  const int row = down * kRawRows, rows = min(static_cast<int64_t>(kRawRows), s.rows - row);
  switch (s.dtypes & 0xff) {
    case kRaw1:
      for (int r = row; r < row + rows; ++r)
        copy_bytes(reinterpret_cast<char*>(s.destination) + r * s.destination_stride[0] + col,
                   reinterpret_cast<const char*>(s.source) + r * s.source_stride[0] + col, cols);
      return;
    case kRaw2: return copy_elements<uint16_t>(s, row, rows, col, cols);
    case kRaw4: return copy_elements<uint32_t>(s, row, rows, col, cols);
    default: return copy_elements<uint64_t>(s, row, rows, col, cols);
  }
}

// ---- the kernel --------------------------------------------------------------------------------------------------------

template <typename Source, typename Destination, bool Wide>
__global__ void __launch_bounds__(kThreads, 2) merge_kernel(const __grid_constant__ Launch launch, int a_slots) {
  using L = Layout<Source, Wide>;
  extern __shared__ __align__(128) char memory[];
  Segment* ring = reinterpret_cast<Segment*>(memory);
  Source* stage = reinterpret_cast<Source*>(memory + L::kRingBytes) + threadIdx.x * (16 / sizeof(Source));
  bf16* shared_B = reinterpret_cast<bf16*>(memory + L::kRingBytes + L::kWBytes);
  bf16* shared_A = reinterpret_cast<bf16*>(memory + L::kFixed);

  const int tid = threadIdx.x, step_units = gridDim.x;
  const int b_row = tid / 4, b_col = (tid % 4) * 8;
  constexpr int kPieces = L::kChunk / 32;                 // pieces of B that a thread moves in a step
  constexpr int kStageElements = kTileRows * kTileCols;   // of W, a stage
  constexpr int kVectors = 4 * sizeof(Source) / 2;        // 16-byte vectors of a thread in a stage

  // Descriptors: slot of the n-th unit of this block is n % kRing.
  const auto fetch_descriptor = [&](int n) {
    const int64_t unit = blockIdx.x + static_cast<int64_t>(n) * step_units;
    if (tid < static_cast<int>(sizeof(Segment) / 16) && unit < launch.n_units) {
      const Segment* from = segments_of(launch) + segment_of(launch, unit);
      if (launch.segments != nullptr)
        copy_async16(shared_address(reinterpret_cast<uint4*>(&ring[n % kRing]) + tid), reinterpret_cast<const uint4*>(from) + tid);
      else  // kernel arguments are not global memory
        reinterpret_cast<uint4*>(&ring[n % kRing])[tid] = reinterpret_cast<const uint4*>(from)[tid];
    }
  };
  for (int n = 0; n < kAhead; ++n) fetch_descriptor(n);
  commit_async();
  wait_async<0>();
  __syncthreads();

  // The stream of W: which tile is staged next. It runs kStages - 1 tiles ahead of the tile at work.
  int ahead_n = 0, ahead_row = 0;
  bool ahead_valid = blockIdx.x < launch.n_units;
  if (ahead_valid) ahead_row = Strip(ring[0], blockIdx.x, launch.rows_per_unit).row;
  int ahead_stage = 0;
  const auto stage_next = [&]() {
    if (ahead_valid) {
      const int unit = blockIdx.x + ahead_n * step_units;
      const Segment& s = ring[ahead_n % kRing];
      const Strip strip(s, unit, launch.rows_per_unit);
      if (aligned16<Source>(s.source, s.source_stride)) {
        const int col = strip.col + thread_col();
        const Source* from = reinterpret_cast<const Source*>(s.source) + (ahead_row + thread_row()) * s.source_stride[0] + col;
        const uint32_t to = shared_address(stage + ahead_stage * kStageElements);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (ahead_row + thread_row() + 8 * i < s.rows && col + 8 <= s.cols)
#pragma unroll
            for (int v = 0; v < kVectors / 4; ++v)
              copy_async16(to + (i * (kVectors / 4) + v) * kThreads * 16,
                           reinterpret_cast<const uint4*>(from + 8 * i * s.source_stride[0]) + v);
      }
      ahead_row += kTileRows;
      if (ahead_row >= strip.row_end) {
        ++ahead_n;
        const int64_t next = blockIdx.x + static_cast<int64_t>(ahead_n) * step_units;
        ahead_valid = next < launch.n_units;
        if (ahead_valid) ahead_row = Strip(ring[ahead_n % kRing], next, launch.rows_per_unit).row;
      }
    }
    ahead_stage = ahead_stage + 1 == L::kStages ? 0 : ahead_stage + 1;
    commit_async();
  };
#pragma unroll
  for (int i = 0; i + 1 < L::kStages; ++i) stage_next();

  Piece next_B[kPieces];
  const auto fetch_next_B = [&](const Segment& s, int row, int k0) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (k0 + b_col + 32 * i < ((s.rank + 15) & ~15)) fetch_B<Wide>(next_B[i], s, row + b_row, k0 + b_col + 32 * i);
  };
  int unit = blockIdx.x;
  if (unit < launch.n_units) fetch_next_B(ring[0], Strip(ring[0], unit, launch.rows_per_unit).row, 0);

  int step = 0, work_stage = 0;
  for (int n = 0; unit < launch.n_units; ++n, unit += step_units) {
    const Segment& s = ring[n % kRing];
    const Strip strip(s, unit, launch.rows_per_unit);
    const int rank = s.rank, chunks = (rank + L::kChunk - 1) / L::kChunk;
    const bool source_vector = aligned16<Source>(s.source, s.source_stride);
    const bool destination_vector = aligned16<Destination>(s.destination, s.destination_stride);
    const int64_t next_unit = static_cast<int64_t>(unit) + step_units;

    for (int row = strip.row; row < strip.row_end; row += kTileRows) {
      float sum[2][4][4] = {};
      for (int c = 0; c == 0 || c < chunks; ++c, ++step) {
        const int k0 = c * L::kChunk, ranks = min(L::kChunk, rank - k0);
        bf16* tile_B = shared_B + (step & 1) * L::kPlanes * L::kBPlane;
        bf16* chunk_A = shared_A + (c % a_slots) * L::kPlanes * L::kAPlane;
#pragma unroll
        for (int i = 0; i < kPieces; ++i)
          if (b_col + 32 * i < ((ranks + 15) & ~15))
            store_B<Wide, L::kBPitch, L::kBPlane>(next_B[i], tile_B, b_row, b_col + 32 * i);
        if (row == strip.row || chunks > a_slots) {
          __syncthreads();  // the last step may still read this slot
          if (rank > 0) load_A<L, Wide>(chunk_A, s, strip.col, k0);
        }
        __syncthreads();
        if (row == strip.row && c == 0) fetch_descriptor(n + kAhead);
        if (c == 0) stage_next();
        if (c + 1 < chunks) {
          fetch_next_B(s, row, k0 + L::kChunk);
        } else if (row + kTileRows < strip.row_end) {
          fetch_next_B(s, row + kTileRows, 0);
        } else if (next_unit < launch.n_units) {
          const Segment& following = ring[(n + 1) % kRing];
          fetch_next_B(following, Strip(following, next_unit, launch.rows_per_unit).row, 0);
        }
        if (rank > 0) multiply_chunk<L, Wide>(sum, tile_B, chunk_A, ranks);
      }

      wait_async<L::kStages - 1>();  // this tile's own stage has landed; later ones may be in flight
      const float scaling = static_cast<float>(s.scaling);
      const int col = strip.col + thread_col();
      if (col < s.cols) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int r = row + thread_row() + 8 * i;
          if (r >= s.rows) continue;
          float value[8];
          load_W<Source>(value, s, stage + work_stage * kStageElements + i * (kVectors / 4) * kThreads * (16 / sizeof(Source)),
                         source_vector && col + 8 <= s.cols, r, col);
          if (rank > 0) {
#pragma unroll
            for (int e = 0; e < 8; ++e) value[e] = fmaf(scaling, sum[i / 2][e / 2][(i % 2) * 2 + e % 2], value[e]);
          }
          if (s.row_scale != 0) {
            const float factor = __ldg(reinterpret_cast<const float*>(s.row_scale) + r);
#pragma unroll
            for (int e = 0; e < 8; ++e) value[e] *= factor;
          }
          store_row<Destination>(value, s, destination_vector, r, col, launch.stochastic, launch.seed);
        }
      }
      work_stage = work_stage + 1 == L::kStages ? 0 : work_stage + 1;
    }
  }

  const int n_all = launch.n_units + launch.n_raw_units;
  for (int u = launch.n_units + blockIdx.x; u < n_all; u += step_units) copy_unit(segments_of(launch)[segment_of(launch, u)], u);
}

// ---- norms of rows -----------------------------------------------------------------------------------------------------

// Sum over the columns of (W + scaling B A)^2, for 64 rows a block, in float64 and in one fixed order.
template <typename Source>
__global__ void __launch_bounds__(kThreads) row_norms_kernel(const __grid_constant__ Launch launch, double* out) {
  using L = Layout<Source, true>;
  extern __shared__ __align__(128) char memory[];
  bf16* shared_B = reinterpret_cast<bf16*>(memory);
  bf16* shared_A = shared_B + L::kPlanes * L::kBPlane;
  __shared__ double partial[4][kTileRows];
  const int tid = threadIdx.x, b_row = tid / 4, b_col = (tid % 4) * 8;

  for (int unit = blockIdx.x; unit < launch.n_units; unit += gridDim.x) {
    const Segment& s = segments_of(launch)[segment_of(launch, unit)];
    const int row = (unit - static_cast<int>(s.unit_begin)) * kTileRows, rank = s.rank;
    const float scaling = static_cast<float>(s.scaling);
    double total[4] = {};
    for (int col = 0; col < s.cols; col += kTileCols) {
      float sum[2][4][4] = {};
      for (int k0 = 0; k0 < rank; k0 += L::kChunk) {
        Piece piece;
        fetch_B<true>(piece, s, row + b_row, k0 + b_col);
        __syncthreads();
        store_B<true, L::kBPitch, L::kBPlane>(piece, shared_B, b_row, b_col);
        load_A<L, true>(shared_A, s, col, k0);
        __syncthreads();
        multiply_chunk<L, true>(sum, shared_B, shared_A, min(L::kChunk, rank - k0));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float w[8];
        load_W<Source>(w, s, nullptr, false, row + thread_row() + 8 * i, col + thread_col());
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const double value = fmaf(scaling, sum[i / 2][e / 2][(i % 2) * 2 + e % 2], w[e]);
          total[i] += value * value;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      total[i] += __shfl_xor_sync(~0u, total[i], 1);
      total[i] += __shfl_xor_sync(~0u, total[i], 2);
      if (tid % 4 == 0) partial[tid / 32 % 4][thread_row() + 8 * i] = total[i];
    }
    __syncthreads();
    if (tid < kTileRows && row + tid < s.rows)
      out[s.units_across + row + tid] = (partial[0][tid] + partial[1][tid]) + (partial[2][tid] + partial[3][tid]);
    __syncthreads();
  }
}

// ---- launching ---------------------------------------------------------------------------------------------------------

// Slots of A: all chunks of the rank where they fit on the chip, so that a unit reads its strip once; else one.
template <typename L>
int slots_for(int max_rank, int shared_limit) {
  const int chunks = max_rank > 0 ? (max_rank + L::kChunk - 1) / L::kChunk : 1;
  return L::kFixed + chunks * L::kABytes <= shared_limit ? chunks : 1;
}

template <typename Source, typename Destination, bool Wide>
cudaError_t launch_typed(const Launch& launch, cudaStream_t stream) {
  using L = Layout<Source, Wide>;
  int device = 0, processors = 0, shared_limit = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error != cudaSuccess) return error;
  const int slots = slots_for<L>(launch.max_rank, shared_limit), shared = L::kFixed + slots * L::kABytes;
  const auto kernel = merge_kernel<Source, Destination, Wide>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  const int64_t units = static_cast<int64_t>(launch.n_units) + launch.n_raw_units;
  const int64_t blocks = static_cast<int64_t>(processors) * (shared <= kSharedForTwo ? 2 : 1);
  kernel<<<static_cast<unsigned>(units < blocks ? units : blocks), kThreads, shared, stream>>>(launch, slots);
  return cudaGetLastError();
}

// The segments' `units_across` holds the place of their first row in `out`.
template <typename Source>
int row_norms_from(const Launch& launch, double* out, cudaStream_t stream) {
  using L = Layout<Source, true>;
  constexpr int kShared = L::kPlanes * (L::kBPlane + L::kAPlane) * sizeof(bf16);
  const cudaError_t error =
      cudaFuncSetAttribute(row_norms_kernel<Source>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  row_norms_kernel<Source><<<launch.n_units < 65535 ? launch.n_units : 65535, kThreads, kShared, stream>>>(launch, out);
  return cudaGetLastError();
}

template <typename Source>
int launch_from(int destination_dtype, bool wide, const Launch& launch, cudaStream_t stream) {
  switch (destination_dtype * 2 + wide) {
    case kBFloat16 * 2: return launch_typed<Source, bf16, false>(launch, stream);
    case kBFloat16 * 2 + 1: return launch_typed<Source, bf16, true>(launch, stream);
    case kFloat16 * 2: return launch_typed<Source, __half, false>(launch, stream);
    case kFloat16 * 2 + 1: return launch_typed<Source, __half, true>(launch, stream);
    case kFloat32 * 2: return launch_typed<Source, float, false>(launch, stream);
    default: return launch_typed<Source, float, true>(launch, stream);
  }
}

}  // namespace lora_merge
