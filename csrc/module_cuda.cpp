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

// A table on the device comes with `unit_segment`; one on the CPU is small enough to travel as an argument.
template <typename AnyLaunch>
AnyLaunch make_launch(const operators::Placed& placed, const operators::Units& units, int64_t max_rank) {
  const int64_t n_units = units.n_units, n_raw_units = units.n_raw_units;
  check(n_units >= 0 && n_raw_units >= 0 && n_units + n_raw_units <= INT32_MAX, "a launch has up to ", INT32_MAX,
        " units of work, got ", n_units, " and ", n_raw_units, "; cut the segments into several plans");
  check(units.rows_per_unit % 64 == 0 && max_rank >= 0 && max_rank <= kMaxRank, "units of ", units.rows_per_unit,
        " rows, rank ", max_rank);
  AnyLaunch launch{};
  launch.counter = placed.counter;
  launch.n_segments = static_cast<int32_t>(placed.segments);
  launch.n_units = static_cast<int32_t>(n_units);
  launch.n_raw_units = static_cast<int32_t>(n_raw_units);
  launch.rows_per_unit = static_cast<int32_t>(units.rows_per_unit);
  launch.max_rank = static_cast<int32_t>(max_rank);
  if (placed.on_device) {
    check(placed.n_unit_segment >= n_units + n_raw_units, "unit_segment must have ", n_units + n_raw_units,
          " elements or more, got ", placed.n_unit_segment);
    launch.segments = placed.table;
    launch.unit_segment = placed.unit_segment;
  } else {
    check_words(placed.table, placed.segments);
    check(placed.segments <= kInlineSegments, "a table on the CPU holds at most ", kInlineSegments, " segments, got ",
          placed.segments);
    std::memcpy(launch.inline_segments, placed.table, placed.segments * sizeof(Segment));
  }
  return launch;
}

// Of the kernel for any GPU.
Launch make_launch(const operators::Placed& placed, const operators::Units& units, const operators::Blocks& blocks) {
  Launch launch = make_launch<Launch>(placed, units, blocks.max_rank);
  launch.stages = static_cast<int32_t>(blocks.stages);
  launch.col_warps = static_cast<int32_t>(blocks.col_warps);
  launch.staged_B = blocks.staged_B;
  launch.pad = static_cast<int32_t>(blocks.pad);
  return launch;
}

// Of the kernel for compute capability 9. Maps lie where the table does.
HopperLaunch make_launch(const operators::Placed& placed, const operators::Units& units,
                         const operators::Tiles& tiles) {
  HopperLaunch launch = make_launch<HopperLaunch>(placed, units, tiles.max_rank);
  launch.stages = static_cast<int32_t>(tiles.stages);
  launch.strip_cols = static_cast<int32_t>(tiles.strip_cols);
  launch.held = static_cast<int32_t>(tiles.held);
  check(placed.maps != nullptr, "tensor maps are missing");
  if (placed.on_device) {
    check(reinterpret_cast<uintptr_t>(placed.maps) % alignof(Maps) == 0, "maps must begin at a multiple of ",
          alignof(Maps), " bytes");
    launch.maps = reinterpret_cast<const Maps*>(placed.maps);
  } else {
    std::memcpy(launch.inline_maps, placed.maps, launch.n_segments * sizeof(Maps));
  }
  return launch;
}

void set_rounding(Launch& launch, const operators::Rounding& rounding) {
  launch.stochastic = rounding.stochastic;
  launch.seed = static_cast<uint64_t>(rounding.seed);
}

void check_scaling(int64_t group, int64_t part) {
  check(group >= kTensor && group <= kCompiled && part >= kScaleMeasure && part <= kScaleWhole, "unknown group ", group,
        " or part ", part);
  const bool block = group == kBlock || group == kCompiled;
  check(block || part != kScaleWhole, "blocks alone are scaled in one pass of merging, got group ", group);
}

// What else launches have in these is for `CudaTracked` to know.
TrackedJournal make_journal(int64_t n_units, int64_t way, const operators::Journal& j, int64_t chunk,
                            const operators::Arena& before) {
  check(j.n_codes >= n_units * kCodeBytes, "codes must have ", n_units * kCodeBytes, " elements or more, got ",
        j.n_codes);
  check(j.n_records >= n_units * kRecordBytes / 8, "records must have ", n_units * kRecordBytes / 8,
        " elements or more, got ", j.n_records);
  check(way >= kTrackMerge && way <= kTrackRemerge, "unknown way ", way);
  const TrackedArena to{reinterpret_cast<char*>(j.arena), j.room, j.mark};
  const TrackedArena other{reinterpret_cast<char*>(before.before), before.room_before, kSecondArena - j.mark};
  return {reinterpret_cast<uint32_t*>(j.codes),
          reinterpret_cast<TrackedRecord*>(j.records),
          way == kTrackRemerge ? other : to,
          to,
          reinterpret_cast<unsigned long long*>(j.asked),
          static_cast<int32_t>(chunk)};
}

}  // namespace

namespace operators {

std::string cuda_problem() { return runtime_problem(); }

void launch_cuda(Placed placed, int64_t source_dtype, int64_t destination_dtype, int64_t adapters, Units units,
                 Blocks blocks, Rounding rounding, Where where) {
  Launch launch = make_launch(placed, units, blocks);
  set_rounding(launch, rounding);
  const OnDevice here(where.device);
  must(launch_merge(source_code(source_dtype), dtype_code(destination_dtype), products_code(adapters), launch,
                    where.stream));
}

void scale_cuda(const Rounded* jobs, int64_t n_jobs, int64_t dtype, int64_t group, int64_t part, Where where) {
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
  const OnDevice here(where.device);
  must(launch_scale(static_cast<int>(dtype), static_cast<int>(group), static_cast<int>(part), launch, where.stream));
}

void launch_hopper(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, Rounding rounding,
                   Where where) {
  HopperLaunch launch = make_launch(placed, units, tiles);
  set_rounding(launch, rounding);
  const OnDevice here(where.device);
  must(lora_merge::launch_hopper(dtype_code(dtype), products_code(adapters), launch, where.stream));
}

void launch_hopper_scaled(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, int64_t group,
                          int64_t part, Rounding rounding, Where where) {
  check_scaling(group, part);
  HopperLaunch launch = make_launch(placed, units, tiles);
  set_rounding(launch, rounding);
  const OnDevice here(where.device);
  must(lora_merge::launch_hopper_scaled(dtype_code(dtype), products_code(adapters), static_cast<int>(group),
                                        static_cast<int>(part), launch, where.stream));
}

// The driver wants maps where they are aligned, which the memory that Python has for them need not be.
void tensor_maps(const Segment* table, int64_t segments, int64_t adapters, uint8_t* maps) {
  check_words(table, segments);
  std::vector<Maps> encoded(segments);
  must(encode_maps(table, static_cast<int>(segments), products_code(adapters), encoded.data()));
  std::memcpy(maps, encoded.data(), encoded.size() * sizeof(Maps));
}

void split_adapters(Placed placed, int64_t n_units, Where where) {
  const Launch launch = make_launch<Launch>(placed, {n_units, 0, 0}, 0);
  const OnDevice here(where.device);
  must(launch_parts(launch, where.stream));
}

void thirds_cuda(const float* source, int64_t rows, int64_t columns, int64_t planes, int64_t row_stride,
                 int64_t column_stride, uint16_t* destination, Where where) {
  check(rows > 0 && columns > 0 && planes > 0 && rows <= INT32_MAX / columns, "thirds of ", rows, " x ", columns,
        " numbers in ", planes, " planes");
  const OnDevice here(where.device);
  must(launch_thirds({source, destination, rows, columns, planes, row_stride, column_stride}, where.stream));
}

void row_norms_cuda(Placed placed, int64_t source_dtype, int64_t n_units, int64_t max_rank, double* out, Where where) {
  const Launch launch = make_launch<Launch>(placed, {n_units, 0, 0}, max_rank);
  const OnDevice here(where.device);
  must(launch_row_norms(source_code(source_dtype), launch, out, where.stream));
}

void track_cuda(Placed placed, int64_t dtype, int64_t adapters, Units units, Blocks blocks, int64_t way,
                Journal journal, int64_t chunk, Arena before, Where where) {
  const Launch launch = make_launch(placed, units, blocks);
  const TrackedJournal tracked = make_journal(units.n_units, way, journal, chunk, before);
  const OnDevice here(where.device);
  must(
      launch_tracked(dtype_code(dtype), products_code(adapters), static_cast<int>(way), launch, tracked, where.stream));
}

void track_hopper(Placed placed, int64_t dtype, int64_t adapters, Units units, Tiles tiles, int64_t way,
                  Journal journal, int64_t chunk, Arena before, Where where) {
  const HopperLaunch launch = make_launch(placed, units, tiles);
  const TrackedJournal tracked = make_journal(units.n_units, way, journal, chunk, before);
  const OnDevice here(where.device);
  must(launch_hopper_tracked(dtype_code(dtype), products_code(adapters), static_cast<int>(way), launch, tracked,
                             where.stream));
}

}  // namespace operators
}  // namespace lora_merge
