// Entry points of the CUDA kernels: plain C++, no torch headers, so that nvcc alone can compile them.
#pragma once
#include <cstdint>
#include <string>

#include "shapes.h"

namespace lora_merge {

// One launch: segments of one combination of dtypes, then copies of raw bits.
struct Launch {
  const Segment* segments;      // on the device; null = inline_segments
  const int32_t* unit_segment;  // on the device: index of the segment of every unit of work; null with inline_segments
  int32_t* counter;             // on the device, [2], zeroed; the kernel resets it. Null: units go round the blocks
  int32_t n_segments;
  int32_t n_units;        // of merging, numbered first
  int32_t n_raw_units;    // of copying, numbered after them
  int32_t rows_per_unit;  // a multiple of 64
  int32_t col_warps;      // a unit is 64 columns times this wide: 1, 2 or 4
  int32_t stages;         // steps of W (and B) in flight; at least as many as share a load of A
  int32_t staged_B;       // whether B is staged in shared memory
  int32_t pad;            // elements added to a row of A in shared memory: 8, no bank conflicts, or 0, more room
  int32_t max_rank;
  int32_t stochastic;
  uint64_t seed;
  Segment inline_segments[kInlineSegments];
};

inline Shape shape_of(const Launch& launch) { return {launch.col_warps, launch.stages, launch.staged_B, launch.pad}; }

// A tensor map of the driver: how the copies of compute capability 9 see a matrix.
struct alignas(128) TensorMap {
  uint64_t word[16];
};
struct Maps {
  TensorMap source, destination, lora_B, lora_A;
};
static_assert(sizeof(Maps) == kMapBytes);

// A launch of the kernel for compute capability 9; col_warps, staged_B, pad: unused.
struct HopperLaunch : Launch {
  int32_t strip_cols;  // of a unit: 256 or 128
  int32_t held;        // boxes of lora_A that are there, or on their way
  const Maps* maps;    // on the device, one for each segment; null = inline_maps
  Maps inline_maps[kInlineSegments];
};

// Whole groups of numbers that become 8 bits and share scales; units of work are counted as it is launched.
struct ScaleLaunch {
  int32_t n_jobs;
  Rounded job[kInlineRounded];
};

// Numbers that become three bf16 ones each: row r of the result has the first thirds of row r, its second, its third.
struct ThirdsLaunch {
  const float* source;  // planes of columns side by side, which are summed
  uint16_t* destination;
  int64_t rows, columns, planes, row_stride, column_stride;
};

// Each returns a cudaError_t. `stream` is a cudaStream_t of the current device. `adapters`: what products are made of,
// kBFloat16, kFloat16 (where all is fp16), kFloat32 (three bf16 parts: any adapters), or kPairs where weights and
// results have 16 bits (of any adapters; their pairs are there: `launch_parts`).
int launch_merge(int source_dtype, int destination_dtype, int adapters, const Launch& launch, void* stream);
int launch_hopper(int dtype, int adapters, const HopperLaunch& launch, void* stream);
// Results of 8 bits: strips of 256 columns, units of whole blocks. `group`, `part`: layout.h.
int launch_hopper_scaled(int dtype, int adapters, int group, int part, const HopperLaunch& launch, void* stream);
int encode_maps(const Segment* segments, int n_segments, int adapters, Maps* maps);
// Makes pairs (csrc/parts.h) of halves of adapters. A segment is one: `source`, its vectors as rows and its ranks as
// columns; `destination` is where the pairs go; `key` is 0 for lora_A, 1 for lora_B.
int launch_parts(const Launch& launch, void* stream);
int launch_scale(int dtype, int group, int part, const ScaleLaunch& launch, void* stream);
int launch_thirds(const ThirdsLaunch& launch, void* stream);
int launch_row_norms(int source_dtype, const Launch& launch, double* out, void* stream);
const char* error_name(int error);

// Why nothing can be launched in this process: the driver is older than this library's runtime, say; empty: it can.
std::string runtime_problem();

// Makes a device the thread's, by this library's own runtime, and notes the context that was the thread's before;
// torch's runtime, another copy, finds that one again after `leave_device`.
int enter_device(int device, void** before);
void leave_device(void* before);

}  // namespace lora_merge
