// The operators of tracked merges on a GPU; compiled only where torch has CUDA. Internal, as those of library_cuda.cpp.
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include "cuda/tracked.h"
#include "library_cuda.h"

namespace lora_merge {
namespace {

TrackedJournal make_journal(const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena, int64_t chunk,
                            const at::Tensor& asked) {
  return {static_cast<uint32_t*>(codes.data_ptr()),
          static_cast<TrackedRecord*>(records.data_ptr()),
          static_cast<char*>(arena.data_ptr()),
          arena.numel(),
          static_cast<unsigned long long*>(asked.data_ptr()),
          static_cast<int32_t>(chunk)};
}

void track_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter, int64_t device,
                int64_t dtype, bool wide, int64_t n_units, int64_t rows_per_unit, int64_t col_warps, int64_t deep,
                bool staged_B, int64_t margin, int64_t max_rank, bool undo, const at::Tensor& codes,
                const at::Tensor& records, const at::Tensor& arena, int64_t chunk, const at::Tensor& asked) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Launch launch = make_launch<Launch>(table, unit_segment, counter, n_units, 0, rows_per_unit, deep, max_rank);
  set_shape(launch, col_warps, staged_B, margin);
  check(launch_tracked(static_cast<int>(dtype), wide, undo, launch, make_journal(codes, records, arena, chunk, asked),
                       at::cuda::getCurrentCUDAStream().stream()));
}

void track_hopper_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& maps,
                       const at::Tensor& counter, int64_t device, int64_t dtype, bool wide, int64_t n_units,
                       int64_t rows_per_unit, int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank,
                       bool undo, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
                       int64_t chunk, const at::Tensor& asked) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  HopperLaunch launch =
      make_launch<HopperLaunch>(table, unit_segment, counter, n_units, 0, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, strip_cols, held);
  check(launch_hopper_tracked(static_cast<int>(dtype), wide, undo, launch,
                              make_journal(codes, records, arena, chunk, asked),
                              at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace
}  // namespace lora_merge

TORCH_LIBRARY_FRAGMENT(lora_merge_native, m) {
  m.def(
      "track_cuda(Tensor table, Tensor unit_segment, Tensor counter, int device, int dtype, bool wide, int n_units, "
      "int "
      "rows_per_unit, int col_warps, int deep, bool staged_B, int margin, int max_rank, bool undo, Tensor codes, "
      "Tensor "
      "records, Tensor arena, int chunk, Tensor asked) -> ()",
      lora_merge::track_cuda);
  m.def(
      "track_hopper(Tensor table, Tensor unit_segment, Tensor maps, Tensor counter, int device, int dtype, bool wide, "
      "int n_units, int rows_per_unit, int strip_cols, int held, int stages, int max_rank, bool undo, Tensor codes, "
      "Tensor "
      "records, Tensor arena, int chunk, Tensor asked) -> ()",
      lora_merge::track_hopper_cuda);
}
