// The functions of lora_merge._C for GPUs; compiled only where there is nvcc. Plain C++: the kernels behind it take
// care of CUDA.
#include <cstring>
#include <vector>

#include "check.h"
#include "cuda/launch.h"
#include "cuda/tracked.h"
#include "table.h"

namespace lora_merge {
namespace {

void must(int error) { check(error == 0, "launching a CUDA kernel failed: ", error_name(error)); }

// Work goes to this device; afterwards the thread's context is what it was.
class OnDevice {
 public:
  explicit OnDevice(int64_t device) { must(enter_device(static_cast<int>(device), &before_)); }
  ~OnDevice() { leave_device(before_); }
  OnDevice(const OnDevice&) = delete;

 private:
  void* before_ = nullptr;
};

int dtype_code(int64_t dtype) {
  check(dtype >= 0 && dtype <= kFloat32, "unknown dtype code ", dtype);
  return static_cast<int>(dtype);
}

// Of what a launch reads: elements, or codes that stand for them.
int source_code(int64_t dtype) { return dtype_code(dtype & ~int64_t{kPackedSource}) | (dtype & kPackedSource); }

int products_code(int64_t adapters) {
  check(adapters >= 0 && adapters <= kPairs, "unknown code of products ", adapters);
  return static_cast<int>(adapters);
}

// A table on the device has `unit_segment` beside it; one on the CPU is small enough to travel as an argument.
template <typename AnyLaunch>
AnyLaunch make_launch(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                      int64_t n_unit_segment, int32_t* counter, int64_t n_units, int64_t n_raw_units,
                      int64_t rows_per_unit, int64_t stages, int64_t max_rank) {
  check(n_units >= 0 && n_raw_units >= 0 && n_units + n_raw_units <= INT32_MAX, "a launch has up to ", INT32_MAX,
        " units of work, got ", n_units, " and ", n_raw_units, "; cut the segments into several plans");
  check(rows_per_unit % 64 == 0 && max_rank >= 0 && max_rank <= kMaxRank, "units of ", rows_per_unit, " rows, rank ",
        max_rank);
  AnyLaunch launch{};
  launch.n_segments = static_cast<int32_t>(segments);
  launch.n_units = static_cast<int32_t>(n_units);
  launch.n_raw_units = static_cast<int32_t>(n_raw_units);
  launch.rows_per_unit = static_cast<int32_t>(rows_per_unit);
  launch.stages = static_cast<int32_t>(stages);
  launch.max_rank = static_cast<int32_t>(max_rank);
  launch.counter = counter;
  if (on_device) {
    check(n_unit_segment >= n_units + n_raw_units, "unit_segment must have ", n_units + n_raw_units,
          " elements or more, got ", n_unit_segment);
    launch.segments = table;
    launch.unit_segment = unit_segment;
  } else {
    check_words(table, segments);
    check(segments <= kInlineSegments, "a table on the CPU holds at most ", kInlineSegments, " segments, got ",
          segments);
    std::memcpy(launch.inline_segments, table, segments * sizeof(Segment));
  }
  return launch;
}

void set_shape(Launch& launch, int64_t col_warps, bool staged_B, int64_t pad) {
  launch.col_warps = static_cast<int32_t>(col_warps);
  launch.staged_B = staged_B;
  launch.pad = static_cast<int32_t>(pad);
}

void set_rounding(Launch& launch, bool stochastic, int64_t seed) {
  launch.stochastic = stochastic;
  launch.seed = static_cast<uint64_t>(seed);
}

// Maps lie where the table does.
void set_tiles(HopperLaunch& launch, const uint8_t* maps, int64_t strip_cols, int64_t held) {
  launch.strip_cols = static_cast<int32_t>(strip_cols);
  launch.held = static_cast<int32_t>(held);
  if (launch.segments != nullptr) {
    check(reinterpret_cast<uintptr_t>(maps) % alignof(Maps) == 0, "maps must begin at a multiple of ", alignof(Maps),
          " bytes");
    launch.maps = reinterpret_cast<const Maps*>(maps);
  } else {
    std::memcpy(launch.inline_maps, maps, launch.n_segments * sizeof(Maps));
  }
}

void check_scaling(int64_t group, int64_t part) {
  check(group >= kTensor && group <= kCompiled && part >= kScaleMeasure && part <= kScaleWhole, "unknown group ", group,
        " or part ", part);
  const bool block = group == kBlock || group == kCompiled;
  check(block || part != kScaleWhole, "blocks alone are scaled in one pass of merging, got group ", group);
}

// What else launches have in these is for `CudaTracked` to know.
TrackedJournal make_journal(int64_t n_units, int64_t way, uint8_t* codes, int64_t n_codes, int64_t* records,
                            int64_t n_records, uint8_t* arena, int64_t room, int64_t mark, int64_t* asked,
                            int64_t chunk, uint8_t* before, int64_t room_before) {
  check(n_codes >= n_units * kCodeBytes, "codes must have ", n_units * kCodeBytes, " elements or more, got ", n_codes);
  check(n_records >= n_units * kRecordBytes / 8, "records must have ", n_units * kRecordBytes / 8,
        " elements or more, got ", n_records);
  check(way >= kTrackMerge && way <= kTrackRemerge, "unknown way ", way);
  const TrackedArena to{reinterpret_cast<char*>(arena), room, mark};
  const TrackedArena other{reinterpret_cast<char*>(before), room_before, kSecondArena - mark};
  return {reinterpret_cast<uint32_t*>(codes),
          reinterpret_cast<TrackedRecord*>(records),
          way == kTrackRemerge ? other : to,
          to,
          reinterpret_cast<unsigned long long*>(asked),
          static_cast<int32_t>(chunk)};
}

}  // namespace

namespace operators {

std::string cuda_problem() { return runtime_problem(); }

void launch_cuda(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                 int64_t n_unit_segment, int32_t* counter, int64_t source_dtype, int64_t destination_dtype,
                 int64_t adapters, int64_t n_units, int64_t n_raw_units, int64_t rows_per_unit, int64_t col_warps,
                 int64_t stages, bool staged_B, int64_t pad, int64_t max_rank, bool stochastic, int64_t seed,
                 int64_t device, void* stream) {
  Launch launch = make_launch<Launch>(table, segments, on_device, unit_segment, n_unit_segment, counter, n_units,
                                      n_raw_units, rows_per_unit, stages, max_rank);
  set_shape(launch, col_warps, staged_B, pad);
  set_rounding(launch, stochastic, seed);
  const OnDevice here(device);
  must(launch_merge(source_code(source_dtype), dtype_code(destination_dtype), products_code(adapters), launch, stream));
}

void scale_cuda(const Rounded* jobs, int64_t n_jobs, int64_t dtype, int64_t group, int64_t part, int64_t device,
                void* stream) {
  check(n_jobs > 0 && n_jobs <= kInlineRounded, "a launch takes 1 to ", kInlineRounded, " jobs, got ", n_jobs);
  check(dtype == kBFloat16 || dtype == kFloat16, "numbers of 16 bits are scaled, got dtype code ", dtype);
  check_scaling(group, part);
  check(part == kScaleConvert || (part == kScaleMeasure && group == kTensor), "tensors are measured alone");
  for (int64_t i = 0; i < n_jobs; ++i) {
    const Rounded& job = jobs[i];
    check(job.rows > 0 && job.cols > 0 && job.rows <= kMaxSide && job.cols <= kMaxSide, "job ", i,
          ": rows and columns must be between 1 and ", kMaxSide, ", got ", job.rows, " and ", job.cols);
    check(job.source != 0 && job.destination != 0 && job.scale != 0 && (group != kTensor || job.largest != 0), "job ",
          i, ": an address is missing");
  }
  ScaleLaunch launch{};
  launch.n_jobs = static_cast<int32_t>(n_jobs);
  std::memcpy(launch.job, jobs, n_jobs * sizeof(Rounded));
  const OnDevice here(device);
  must(launch_scale(static_cast<int>(dtype), static_cast<int>(group), static_cast<int>(part), launch, stream));
}

void launch_hopper(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                   int64_t n_unit_segment, int32_t* counter, int64_t dtype, int64_t adapters, int64_t n_units,
                   int64_t n_raw_units, int64_t rows_per_unit, const uint8_t* maps, int64_t strip_cols, int64_t held,
                   int64_t stages, int64_t max_rank, bool stochastic, int64_t seed, int64_t device, void* stream) {
  HopperLaunch launch = make_launch<HopperLaunch>(table, segments, on_device, unit_segment, n_unit_segment, counter,
                                                  n_units, n_raw_units, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, strip_cols, held);
  set_rounding(launch, stochastic, seed);
  const OnDevice here(device);
  must(lora_merge::launch_hopper(dtype_code(dtype), products_code(adapters), launch, stream));
}

void launch_hopper_scaled(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                          int64_t n_unit_segment, int32_t* counter, int64_t dtype, int64_t adapters, int64_t n_units,
                          int64_t n_raw_units, int64_t rows_per_unit, const uint8_t* maps, int64_t strip_cols,
                          int64_t held, int64_t stages, int64_t max_rank, int64_t group, int64_t part, bool stochastic,
                          int64_t seed, int64_t device, void* stream) {
  check_scaling(group, part);
  HopperLaunch launch = make_launch<HopperLaunch>(table, segments, on_device, unit_segment, n_unit_segment, counter,
                                                  n_units, n_raw_units, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, strip_cols, held);
  set_rounding(launch, stochastic, seed);
  const OnDevice here(device);
  must(lora_merge::launch_hopper_scaled(dtype_code(dtype), products_code(adapters), static_cast<int>(group),
                                        static_cast<int>(part), launch, stream));
}

// The driver wants maps where they are aligned, which the memory that Python has for them need not be.
void tensor_maps(const Segment* table, int64_t segments, int64_t adapters, uint8_t* maps) {
  check_words(table, segments);
  std::vector<Maps> encoded(segments);
  must(encode_maps(table, static_cast<int>(segments), products_code(adapters), encoded.data()));
  std::memcpy(maps, encoded.data(), encoded.size() * sizeof(Maps));
}

void split_adapters(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                    int64_t n_unit_segment, int64_t n_units, int64_t device, void* stream) {
  const Launch launch =
      make_launch<Launch>(table, segments, on_device, unit_segment, n_unit_segment, nullptr, n_units, 0, 0, 0, 0);
  const OnDevice here(device);
  must(launch_parts(launch, stream));
}

void row_norms_cuda(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                    int64_t n_unit_segment, int64_t source_dtype, int64_t n_units, int64_t max_rank, double* out,
                    int64_t device, void* stream) {
  const Launch launch = make_launch<Launch>(table, segments, on_device, unit_segment, n_unit_segment, nullptr, n_units,
                                            0, 0, 0, max_rank);
  const OnDevice here(device);
  must(launch_row_norms(source_code(source_dtype), launch, out, stream));
}

void track_cuda(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                int64_t n_unit_segment, int32_t* counter, int64_t dtype, int64_t adapters, int64_t n_units,
                int64_t n_raw_units, int64_t rows_per_unit, int64_t col_warps, int64_t stages, bool staged_B,
                int64_t pad, int64_t max_rank, int64_t way, uint8_t* codes, int64_t n_codes, int64_t* records,
                int64_t n_records, uint8_t* arena, int64_t room, int64_t mark, int64_t* asked, int64_t chunk,
                uint8_t* before, int64_t room_before, int64_t device, void* stream) {
  Launch launch = make_launch<Launch>(table, segments, on_device, unit_segment, n_unit_segment, counter, n_units,
                                      n_raw_units, rows_per_unit, stages, max_rank);
  set_shape(launch, col_warps, staged_B, pad);
  const TrackedJournal journal = make_journal(n_units, way, codes, n_codes, records, n_records, arena, room, mark,
                                              asked, chunk, before, room_before);
  const OnDevice here(device);
  must(launch_tracked(dtype_code(dtype), products_code(adapters), static_cast<int>(way), launch, journal, stream));
}

void track_hopper(const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment,
                  int64_t n_unit_segment, int32_t* counter, int64_t dtype, int64_t adapters, int64_t n_units,
                  int64_t n_raw_units, int64_t rows_per_unit, const uint8_t* maps, int64_t strip_cols, int64_t held,
                  int64_t stages, int64_t max_rank, int64_t way, uint8_t* codes, int64_t n_codes, int64_t* records,
                  int64_t n_records, uint8_t* arena, int64_t room, int64_t mark, int64_t* asked, int64_t chunk,
                  uint8_t* before, int64_t room_before, int64_t device, void* stream) {
  HopperLaunch launch = make_launch<HopperLaunch>(table, segments, on_device, unit_segment, n_unit_segment, counter,
                                                  n_units, n_raw_units, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, strip_cols, held);
  const TrackedJournal journal = make_journal(n_units, way, codes, n_codes, records, n_records, arena, room, mark,
                                              asked, chunk, before, room_before);
  const OnDevice here(device);
  must(launch_hopper_tracked(dtype_code(dtype), products_code(adapters), static_cast<int>(way), launch, journal,
                             stream));
}

}  // namespace operators
}  // namespace lora_merge
