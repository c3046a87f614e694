// The operator of tracked merges on a GPU; compiled only where torch has CUDA. Internal, as those of library_cuda.cpp.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstring>

#include "cuda/tracked.h"

namespace lora_merge {
namespace {

// `table` is on the device together with `unit_segment` and `counter`, or on the CPU, small enough to be an argument.
void track_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter, int64_t device,
                int64_t dtype, bool wide, int64_t n_units, int64_t rows_per_unit, int64_t col_warps, int64_t deep,
                bool staged_B, int64_t margin, int64_t max_rank, bool undo, const at::Tensor& codes,
                const at::Tensor& records, const at::Tensor& arena, int64_t chunk, const at::Tensor& asked) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Launch launch{};
  launch.n_segments = static_cast<int32_t>(table.size(0));
  launch.n_units = static_cast<int32_t>(n_units);
  launch.rows_per_unit = static_cast<int32_t>(rows_per_unit);
  launch.col_warps = static_cast<int32_t>(col_warps);
  launch.deep = static_cast<int32_t>(deep);
  launch.staged_B = staged_B;
  launch.margin = static_cast<int32_t>(margin);
  launch.max_rank = static_cast<int32_t>(max_rank);
  if (table.is_cuda()) {
    launch.segments = static_cast<const Segment*>(table.data_ptr());
    launch.unit_segment = unit_segment.data_ptr<int32_t>();
    launch.counter = counter.data_ptr<int32_t>();
  } else {
    TORCH_CHECK(table.size(0) <= kInlineSegments, "a table on the CPU holds at most ", kInlineSegments, " segments");
    std::memcpy(launch.inline_segments, table.data_ptr(), table.nbytes());
  }
  const TrackedJournal journal{static_cast<uint32_t*>(codes.data_ptr()),
                               static_cast<TrackedRecord*>(records.data_ptr()),
                               static_cast<char*>(arena.data_ptr()),
                               arena.numel(),
                               static_cast<unsigned long long*>(asked.data_ptr()),
                               static_cast<int32_t>(chunk)};
  const int error = launch_tracked(static_cast<int>(dtype), wide, undo, launch, journal,
                                   at::cuda::getCurrentCUDAStream().stream());
  TORCH_CHECK(error == 0, "lora_merge: launching a CUDA kernel failed: ", error_name(error));
}

}  // namespace
}  // namespace lora_merge

TORCH_LIBRARY_FRAGMENT(lora_merge_native, m) {
  m.def(
      "track_cuda(Tensor table, Tensor unit_segment, Tensor counter, int device, int dtype, bool wide, int n_units, int "
      "rows_per_unit, int col_warps, int deep, bool staged_B, int margin, int max_rank, bool undo, Tensor codes, Tensor "
      "records, Tensor arena, int chunk, Tensor asked) -> ()",
      lora_merge::track_cuda);
}
