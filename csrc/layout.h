// What Python and C++ must agree on. Written by `python lora_merge/kernels/bindings/layout.py`: change it there.
// clang-format off
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace lora_merge {

enum Dtype : int { kBFloat16 = 0, kFloat16 = 1, kFloat32 = 2, kRaw1 = 3, kRaw2 = 4, kRaw4 = 5, kRaw8 = 6 };
enum Format : int { kPlain = 0, kCodes4 = 1, kInt8 = 2 };
enum Groups : int { kTensor = 0, kChannel = 1, kBlock = 2, kCompiled = 3 };

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
  int64_t dtypes;  // source | destination << 8 | lora_A << 16 | lora_B << 24 | format of the source << 32
  uint64_t key;  // hash of the weight's name: stochastic rounding
  int64_t first;  // index in the whole weight of element (0, 0)
  int64_t pitch[2];  // what a row and a column add to that index
  int64_t unit_begin;  // first work unit of this segment within its launch (set by the backend)
  int64_t units_across;  // work units side by side in a row of units (set by the backend)
  int64_t parts_A;  // lora_A as pairs of fp16, and its factors: csrc/parts.h (set by the backend), 0 = none
  int64_t parts_B;  // lora_B likewise
  int64_t scale;  // float32: of the first group, where the result has 8 bits (set by the backend), 0 = none; ...
  int64_t largest;  // ... uint32: bits of the first group's largest magnitude; ...
  int64_t scales_across;  // ... and groups side by side in the whole weight
  int64_t place;  // of a packed source: number among the weight's codes of element (0, 0); `source` is where 0 lies
  int64_t code;  // float32 [16]: what codes of 4 bits stand for
  int64_t absmax;  // float32, or bytes where absmax_code is not 0: one a block
  int64_t block;  // codes that share one
  int64_t absmax_code;  // float32 [256]: what a byte of absmax stands for, ...
  int64_t absmax_scale;  // ... float32: times this, one for each ...
  int64_t absmax_block;  // ... so many bytes, ...
  int64_t absmax_offset;  // ... plus this float32
};
static_assert(sizeof(Segment) == 37 * 8, "a segment is 37 words");

struct Rounded {
  int64_t source;  // addresses: numbers of 16 bits, columns side by side,
  int64_t destination;  // what becomes of them, e4m3, likewise,
  int64_t scale;  // float32: of the first group, and those after it,
  int64_t largest;  // and uint32: bits of the largest magnitude, where groups are tensors
  int64_t rows;
  int64_t cols;
  int64_t source_pitch;  // elements from one row to the next
  int64_t destination_pitch;
  int64_t across;  // groups side by side in the whole weight
  int64_t unit_begin;  // its first unit of work within the launch (set in C++)
};
static_assert(sizeof(Rounded) == 10 * 8, "what is scaled is 10 words");

constexpr int kPairs = 3;
constexpr int kMaxRank = 512;
constexpr int kMaxSide = 2147479552;
constexpr int kPackedSource = 256;
constexpr int kChunk = 32;
constexpr int kInlineSegments = 8;
constexpr int kWarps = 8;
constexpr int kWarpCols = 64;
constexpr int kNormRows = 64;
constexpr int kPartVectors = 256;
constexpr int kRawRows = 64;
constexpr int kRawCols = 2048;
constexpr int kRawCols1 = 131072;
constexpr int kTileRows = 64;
constexpr int kBoxCols = 64;
constexpr int kHopperCols = 33554432;
constexpr int kMapBytes = 512;
constexpr int kScaledBlock = 128;
constexpr int kInlineRounded = 32;
constexpr int kScaleMeasure = 0;
constexpr int kScaleConvert = 1;
constexpr int kScaleWhole = 2;
constexpr int kUnitElements = 1024;
constexpr int kRecordBytes = 16;
constexpr int kCodeBytes = 256;
constexpr int kTrackMerge = 0;
constexpr int kTrackUnmerge = 1;
constexpr int kTrackRemerge = 2;
constexpr int64_t kSecondArena = 4611686018427387904;
constexpr int kWatchAdd = 4;
constexpr int kWatchTensors = 2;

namespace operators {
struct Placed { const Segment* table; int64_t segments; bool on_device; const int32_t* unit_segment; int64_t n_unit_segment; int32_t* counter; const uint8_t* maps; auto all() { return std::tie(table, segments, on_device, unit_segment, n_unit_segment, counter, maps); } };
struct Units { int64_t n_units; int64_t n_raw_units; int64_t rows_per_unit; auto all() { return std::tie(n_units, n_raw_units, rows_per_unit); } };
struct Blocks { int64_t col_warps; int64_t stages; bool staged_B; int64_t pad; int64_t max_rank; auto all() { return std::tie(col_warps, stages, staged_B, pad, max_rank); } };
struct Tiles { int64_t strip_cols; int64_t held; int64_t stages; int64_t max_rank; auto all() { return std::tie(strip_cols, held, stages, max_rank); } };
struct Rounding { bool stochastic; int64_t seed; auto all() { return std::tie(stochastic, seed); } };
struct Journal { uint8_t* codes; int64_t n_codes; int64_t* records; int64_t n_records; uint8_t* arena; int64_t room; int64_t mark; int64_t* asked; auto all() { return std::tie(codes, n_codes, records, n_records, arena, room, mark, asked); } };
struct Arena { uint8_t* before; int64_t room_before; auto all() { return std::tie(before, room_before); } };
struct Where { int64_t device; void* stream; auto all() { return std::tie(device, stream); } };
std::string layout_hash();
std::vector<std::string> cuda_architectures();
std::vector<std::string> cpu_isas();
void use_threads(void* parallel_for, void* num_threads);
bool launch_cpu(const Segment* table, int64_t segments, Rounding rounding);
void row_norms_cpu(const Segment* table, int64_t segments, double* out, int64_t n_out);
int64_t tracked_sizes_cpu(const Segment* table, int64_t segments, int64_t* first_unit);
void track_cpu(const Segment* table, int64_t segments, Journal journal);
void untrack_cpu(const Segment* table, int64_t segments, Journal journal);
void retrack_cpu(const Segment* table, int64_t segments, const Segment* table_before, int64_t segments_before, Journal journal, uint8_t* before);
std::vector<int64_t> merge_shape(int64_t max_rank, int64_t planes, int64_t element_bytes, int64_t narrowest, int64_t widest, int64_t per_block, int64_t per_processor);
bool accepts_shape(Blocks blocks, int64_t planes, int64_t element_bytes, int64_t per_block);
std::vector<int64_t> hopper_tiles(int64_t max_rank, int64_t planes, int64_t extra, int64_t per_block, bool ahead);
bool accepts_tiles(int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank, int64_t planes, int64_t extra, bool ahead, int64_t per_block);
std::string cuda_problem();
void launch_cuda(Placed placed, int64_t source_dtype, int64_t destination_dtype, int64_t adapters, Units units, Blocks blocks, Rounding rounding, Where where);
void scale_cuda(const Rounded* jobs, int64_t n_jobs, int64_t dtype, int64_t group, int64_t part, Where where);
void launch_hopper(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, Rounding rounding, Where where);
void launch_hopper_scaled(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, int64_t group, int64_t part, Rounding rounding, Where where);
void tensor_maps(const Segment* table, int64_t segments, int64_t adapters, uint8_t* maps);
void split_adapters(Placed placed, int64_t n_units, Where where);
void thirds_cuda(const float* source, int64_t rows, int64_t columns, int64_t planes, int64_t row_stride, int64_t column_stride, uint16_t* destination, Where where);
void row_norms_cuda(Placed placed, int64_t source_dtype, int64_t n_units, int64_t max_rank, double* out, Where where);
void track_cuda(Placed placed, int64_t dtype, int64_t adapters, Units units, Blocks blocks, int64_t way, Journal journal, int64_t chunk, Arena before, Where where);
void track_hopper(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, int64_t way, Journal journal, int64_t chunk, Arena before, Where where);
}  // namespace operators
#define LORA_MERGE_OPERATORS(X) X(layout_hash) X(cuda_architectures) X(cpu_isas) X(use_threads) X(launch_cpu) X(row_norms_cpu) X(tracked_sizes_cpu) X(track_cpu) X(untrack_cpu) X(retrack_cpu) X(merge_shape) X(accepts_shape) X(hopper_tiles) X(accepts_tiles)
#define LORA_MERGE_CUDA_OPERATORS(X) X(cuda_problem) X(launch_cuda) X(scale_cuda) X(launch_hopper) X(launch_hopper_scaled) X(tensor_maps) X(split_adapters) X(thirds_cuda) X(row_norms_cuda) X(track_cuda) X(track_hopper)

constexpr const char* kLayoutHash = "cb983712aa5d7693";

}  // namespace lora_merge
