// Numbers of 16 bits into 8: e4m3 elements of which a group (the whole weight, a row, a block of 128 x 128) shares a
// scale (scales.cuh).
//
// A scale needs the largest magnitude of its group first. A block of threads has all of a block, or of some rows, in
// its registers, so each number is read once; of tensors the first launch measures, the second converts.
#include "scales.cuh"

namespace lora_merge {
namespace {

constexpr int kScaleThreads = 256, kScaleWarps = kScaleThreads / 32;
constexpr int kTileVectors = kScaledBlock / 8;           // of eight columns, side by side in a tile
constexpr int kTileStep = kScaleThreads / kTileVectors;  // rows from a thread's vector to its next
constexpr int kTileHeld = kScaledBlock / kTileStep;      // vectors of a thread
constexpr int kRowHeld = 10;                             // vectors of a row that a lane keeps; others are read again

// Warps that share a row: few, so that each lane has several vectors to wait for at a time.
__host__ __device__ constexpr int warps_of_row(int64_t cols) {
  const int64_t vectors = (cols + 7) / 8;
  int warps = 1;
  while (warps < kScaleWarps && vectors > 32 * kRowHeld * warps) warps *= 2;
  return warps;
}

// One job's matrices, in vectors of eight columns.
template <typename T>
struct Matrices {
  const T* source;
  uint8_t* destination;
  int64_t source_pitch, destination_pitch;
  int rows, cols;
  bool reads, writes;  // whole vectors

  __device__ __forceinline__ explicit Matrices(const Rounded& job)
      : source(reinterpret_cast<const T*>(job.source)),
        destination(reinterpret_cast<uint8_t*>(job.destination)),
        source_pitch(job.source_pitch),
        destination_pitch(job.destination_pitch),
        rows(static_cast<int>(job.rows)),
        cols(static_cast<int>(job.cols)),
        reads((job.source & 15) == 0 && job.source_pitch % 8 == 0),
        writes(((job.destination | job.destination_pitch) & 7) == 0) {}

  // What is outside is zeros.
  __device__ __forceinline__ Packed<T> load(int row, int col) const {
    Packed<T> x{};
    if (row >= rows || col >= cols) return x;
    const T* const from = source + row * source_pitch + col;
    if (reads && col + 8 <= cols) {
      x.word[0] = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (col + i < cols) reinterpret_cast<T*>(x.word)[i] = from[i];
    }
    return x;
  }

  template <bool Odd, bool Divides = false>
  __device__ __forceinline__ void store(const Packed<T>& x, const Divisor& by, int row, int col) const {
    if (row >= rows || col >= cols) return;
    uint32_t pair[4];
    divide8<Odd, Divides>(pair, unpack(x), by);
    const uint2 bytes = make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16);
    uint8_t* const to = destination + row * destination_pitch + col;
    if (writes && col + 8 <= cols) {
      __stcs(reinterpret_cast<uint2*>(to), bytes);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (col + i < cols) to[i] = static_cast<uint8_t>((i < 4 ? bytes.x : bytes.y) >> (8 * (i % 4)));
    }
  }
};

// The job that a unit of work belongs to; all lanes of a warp call it.
__device__ __forceinline__ const Rounded& job_of(const ScaleLaunch& launch, int unit) {
  static_assert(kInlineRounded <= 32, "a lane each");
  const int lane = threadIdx.x % 32;
  const bool begun = lane < launch.n_jobs && launch.job[lane].unit_begin <= unit;
  return launch.job[31 - __clz(__ballot_sync(~0u, begun))];
}

// A unit is a tile of 128 x 128: a block that shares a scale, or a part of a tensor that does.
template <typename T, int Group, int Part>
__global__ void __launch_bounds__(kScaleThreads) scale_tiles(const __grid_constant__ ScaleLaunch launch) {
  const Rounded& job = job_of(launch, blockIdx.x);
  const Matrices<T> matrices(job);
  const int tile = static_cast<int>(blockIdx.x - job.unit_begin), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles_across = (matrices.cols + kScaledBlock - 1) / kScaledBlock;
  const int tile_row = tile / tiles_across, tile_col = tile % tiles_across;
  const int row = tile_row * kScaledBlock + static_cast<int>(threadIdx.x) / kTileVectors;
  const int col = tile_col * kScaledBlock + static_cast<int>(threadIdx.x) % kTileVectors * 8;
  __shared__ uint32_t met[kScaleWarps];

  Packed<T> held[kTileHeld];
#pragma unroll
  for (int i = 0; i < kTileHeld; ++i) held[i] = matrices.load(row + i * kTileStep, col);
  uint32_t largest = 0;
  if constexpr (Group != kTensor || Part == kScaleMeasure) {
#pragma unroll
    for (int i = 0; i < kTileHeld; ++i) largest = larger2<T>(largest, largest2(held[i]));
    largest = largest_of_warp<T>(largest);
    if (lane == 0) met[warp] = largest;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kScaleWarps; ++w) largest = max(largest, met[w]);
  }
  uint32_t* const of_tensor = reinterpret_cast<uint32_t*>(job.largest);
  if constexpr (Part == kScaleMeasure) {
    if (threadIdx.x == 0) atomicMax(of_tensor, largest);
    return;
  }
  if constexpr (Group == kTensor) largest = *of_tensor;
  const Divisor by(__uint_as_float(largest), Group);
  if (threadIdx.x == 0 && (Group != kTensor || tile == 0))
    reinterpret_cast<float*>(job.scale)[Group != kTensor ? tile_row * job.across + tile_col : 0] = by.scale;
  if (by.odd) {  // what is rare takes no registers of what is not
#pragma unroll 1
    for (int i = 0; i < kTileHeld; ++i)
      matrices.template store<true>(matrices.load(row + i * kTileStep, col), by, row + i * kTileStep, col);
    return;
  }
#pragma unroll
  for (int i = 0; i < kTileHeld; ++i) matrices.template store<false>(held[i], by, row + i * kTileStep, col);
}

// A unit is as many rows as the warps can share.
template <typename T>
__global__ void __launch_bounds__(kScaleThreads) scale_rows(const __grid_constant__ ScaleLaunch launch) {
  const Rounded& job = job_of(launch, blockIdx.x);
  const Matrices<T> matrices(job);
  const int unit = static_cast<int>(blockIdx.x - job.unit_begin), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sharing = warps_of_row(job.cols), first_warp = warp / sharing * sharing;
  const int row = unit * (kScaleWarps / sharing) + warp / sharing;
  const int begin = ((warp - first_warp) * 32 + lane) * 8, step = sharing * 32 * 8;
  __shared__ uint32_t met[kScaleWarps];

  Packed<T> held[kRowHeld];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRowHeld; ++i) held[i] = matrices.load(row, begin + i * step);
#pragma unroll
  for (int i = 0; i < kRowHeld; ++i) largest = larger2<T>(largest, largest2(held[i]));
#pragma unroll 1
  for (int col = begin + kRowHeld * step; col < matrices.cols; col += step)
    largest = larger2<T>(largest, largest2(matrices.load(row, col)));
  largest = largest_of_warp<T>(largest);
  if (lane == 0) met[warp] = largest;
  __syncthreads();
  for (int w = 0; w < sharing; ++w) largest = max(largest, met[first_warp + w]);
  const Divisor by(__uint_as_float(largest), kChannel);
  if (begin == 0 && row < matrices.rows) reinterpret_cast<float*>(job.scale)[row] = by.scale;
  if (by.odd) {
#pragma unroll 1
    for (int col = begin; col < matrices.cols; col += step)
      matrices.template store<true>(matrices.load(row, col), by, row, col);
    return;
  }
#pragma unroll
  for (int i = 0; i < kRowHeld; ++i) matrices.template store<false, true>(held[i], by, row, begin + i * step);
#pragma unroll 1
  for (int col = begin + kRowHeld * step; col < matrices.cols; col += step)
    matrices.template store<false, true>(matrices.load(row, col), by, row, col);
}

// Each job's units follow those of the one before it.
template <typename Units>
cudaError_t launch_units(void (*kernel)(ScaleLaunch), ScaleLaunch launch, cudaStream_t stream, Units units) {
  int64_t all = 0;
  for (int i = 0; i < launch.n_jobs; ++i) {
    launch.job[i].unit_begin = all;
    all += units(launch.job[i]);
  }
  if (all > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<static_cast<unsigned>(all), kScaleThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_scale_of(int group, int part, const ScaleLaunch& launch, cudaStream_t stream) {
  const auto ceil = [](int64_t count, int64_t size) { return (count + size - 1) / size; };
  if (group == kChannel)
    return launch_units(scale_rows<T>, launch, stream,
                        [&](const Rounded& job) { return ceil(job.rows, kScaleWarps / warps_of_row(job.cols)); });
  const auto tiles = [&](const Rounded& job) { return ceil(job.rows, kScaledBlock) * ceil(job.cols, kScaledBlock); };
  if (group == kBlock) return launch_units(scale_tiles<T, kBlock, kScaleConvert>, launch, stream, tiles);
  if (group == kCompiled) return launch_units(scale_tiles<T, kCompiled, kScaleConvert>, launch, stream, tiles);
  if (part == kScaleMeasure) return launch_units(scale_tiles<T, kTensor, kScaleMeasure>, launch, stream, tiles);
  return launch_units(scale_tiles<T, kTensor, kScaleConvert>, launch, stream, tiles);
}

}  // namespace

int launch_scale(int dtype, int group, int part, const ScaleLaunch& launch, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  return dtype == kBFloat16 ? launch_scale_of<bf16>(group, part, launch, on)
                            : launch_scale_of<__half>(group, part, launch, on);
}

}  // namespace lora_merge
