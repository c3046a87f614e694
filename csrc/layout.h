// What Python and C++ must agree on. Written by `python lora_merge/kernels/layout.py`: change it there.
// clang-format off
#pragma once
#include <cstdint>

namespace lora_merge {

enum Dtype : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kRaw1 = 3, kRaw2 = 4, kRaw4 = 5, kRaw8 = 6 };

struct Segment {
  int64_t source;  // addresses
  int64_t destination;
  int64_t lora_A;  // [rank, cols]
  int64_t lora_B;  // [rows, rank]
  int64_t row_scale;  // float32 [rows] (DoRA), 0 = none
  int64_t rows;
  int64_t cols;
  int64_t rank;  // 0 = a copy; a raw dtype copies bits, the others convert
  int64_t source_stride[2];  // in elements: per row, per column
  int64_t destination_stride[2];
  int64_t lora_A_stride[2];  // per rank, per column
  int64_t lora_B_stride[2];  // per row, per rank
  double scaling;
  int64_t dtypes;  // source | destination << 8 | lora_A << 16 | lora_B << 24
  uint64_t key;  // hash of the weight's name: stochastic rounding
  int64_t first;  // index in the whole weight of element (0, 0)
  int64_t pitch[2];  // what a row and a column add to that index
  int64_t unit_begin;  // first work unit of this segment within its launch (set by the backend)
  int64_t units_across;  // work units side by side in a row of units (set by the backend)
};
static_assert(sizeof(Segment) == 24 * 8, "a segment is 24 words");

constexpr int kMaxRank = 512;
constexpr int kMaxSide = 2147479552;
constexpr int kChunk = 32;
constexpr int kInlineSegments = 8;
constexpr int kWarps = 8;
constexpr int kWarpCols = 64;
constexpr int kNormRows = 64;
constexpr int kRawRows = 64;
constexpr int kRawCols = 2048;
constexpr int kRawCols1 = 131072;
constexpr int kTileRows = 64;
constexpr int kBoxCols = 64;
constexpr int kHopperCols = 33554432;
constexpr int kMapBytes = 512;
constexpr int kUnitElements = 1024;
constexpr int kRecordBytes = 16;
constexpr int kCodeBytes = 256;

namespace schema {
constexpr const char* layout_hash = "layout_hash() -> str";
constexpr const char* cuda_architectures = "cuda_architectures() -> str[]";
constexpr const char* cpu_isas = "cpu_isas() -> str[]";
constexpr const char* launch_cpu = "launch_cpu(Tensor table, bool stochastic, int seed) -> ()";
constexpr const char* row_norms_cpu = "row_norms_cpu(Tensor table, Tensor out) -> ()";
constexpr const char* tracked_sizes_cpu = "tracked_sizes_cpu(Tensor table) -> (Tensor, int)";
constexpr const char* track_cpu = "track_cpu(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()";
constexpr const char* untrack_cpu = "untrack_cpu(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()";
constexpr const char* merge_shape = "merge_shape(int max_rank, bool wide, int element_bytes, int widest, int per_block, int per_processor) -> int[]";
constexpr const char* accepts_shape = "accepts_shape(int[] shape, int max_rank, bool wide, int element_bytes, int per_block) -> bool";
constexpr const char* hopper_tiles = "hopper_tiles(int max_rank, bool wide, int beside, int per_block) -> int[]";
constexpr const char* accepts_tiles = "accepts_tiles(int[] tiles, int max_rank, bool wide, int beside, int per_block) -> bool";
constexpr const char* launch_cuda = "launch_cuda(Tensor table, Tensor unit_segment, Tensor counter, int device, int source_dtype, int destination_dtype, bool wide, int n_units, int n_raw_units, int rows_per_unit, int col_warps, int stages, bool staged_B, int pad, int max_rank, bool stochastic, int seed) -> ()";
constexpr const char* launch_hopper = "launch_hopper(Tensor table, Tensor unit_segment, Tensor maps, Tensor counter, int device, int dtype, bool wide, int n_units, int n_raw_units, int rows_per_unit, int strip_cols, int held, int stages, int max_rank, bool stochastic, int seed) -> ()";
constexpr const char* tensor_maps = "tensor_maps(Tensor table, bool wide) -> Tensor";
constexpr const char* row_norms_cuda = "row_norms_cuda(Tensor table, Tensor unit_segment, int source_dtype, int n_units, int max_rank, Tensor out) -> ()";
constexpr const char* track_cuda = "track_cuda(Tensor table, Tensor unit_segment, Tensor counter, int device, int dtype, bool wide, int n_units, int rows_per_unit, int col_warps, int stages, bool staged_B, int pad, int max_rank, bool undo, Tensor codes, Tensor records, Tensor arena, int chunk, Tensor asked) -> ()";
constexpr const char* track_hopper = "track_hopper(Tensor table, Tensor unit_segment, Tensor maps, Tensor counter, int device, int dtype, bool wide, int n_units, int rows_per_unit, int strip_cols, int held, int stages, int max_rank, bool undo, Tensor codes, Tensor records, Tensor arena, int chunk, Tensor asked) -> ()";
}  // namespace schema

constexpr const char* kLayoutHash = "296dfaef11e80027";

}  // namespace lora_merge
