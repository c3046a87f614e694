// The operators of tracked merges on a GPU; compiled only where torch has CUDA. Internal, as those of library_cuda.cpp.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "cuda/tracked.h"
#include "library_cuda.h"

namespace lora_merge {
namespace {

TrackedJournal make_journal(const at::Device& device, int64_t n_units, const at::Tensor& codes,
                            const at::Tensor& records, const at::Tensor& arena, int64_t chunk,
                            const at::Tensor& asked) {
  // What else launches have in these is for `CudaTracked` to know.
  check_tensor(codes, "codes", at::kByte, device, n_units * kCodeBytes);
  check_tensor(records, "records", at::kLong, device, n_units * kRecordBytes / 8);
  check_tensor(arena, "arena", at::kByte, device);
  check_tensor(asked, "asked", at::kLong, device, 3);
  return {reinterpret_cast<uint32_t*>(codes.mutable_data_ptr<uint8_t>()),
          reinterpret_cast<TrackedRecord*>(records.mutable_data_ptr<int64_t>()),
          reinterpret_cast<char*>(arena.mutable_data_ptr<uint8_t>()),
          arena.numel(),
          reinterpret_cast<unsigned long long*>(asked.mutable_data_ptr<int64_t>()),
          static_cast<int32_t>(chunk)};
}

void track_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter, int64_t device,
                int64_t dtype, bool wide, int64_t n_units, int64_t rows_per_unit, int64_t col_warps, int64_t stages,
                bool staged_B, int64_t pad, int64_t max_rank, bool undo, const at::Tensor& codes,
                const at::Tensor& records, const at::Tensor& arena, int64_t chunk, const at::Tensor& asked) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Launch launch = make_launch<Launch>(table, unit_segment, counter, guard.current_device(), n_units, 0, rows_per_unit,
                                      stages, max_rank);
  set_shape(launch, col_warps, staged_B, pad);
  check(launch_tracked(check_dtype(dtype), wide, undo, launch,
                       make_journal(guard.current_device(), n_units, codes, records, arena, chunk, asked),
                       c10::cuda::getCurrentCUDAStream().stream()));
}

void track_hopper_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& maps,
                       const at::Tensor& counter, int64_t device, int64_t dtype, bool wide, int64_t n_units,
                       int64_t rows_per_unit, int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank,
                       bool undo, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
                       int64_t chunk, const at::Tensor& asked) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  HopperLaunch launch = make_launch<HopperLaunch>(table, unit_segment, counter, guard.current_device(), n_units, 0,
                                                  rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, guard.current_device(), strip_cols, held);
  check(launch_hopper_tracked(check_dtype(dtype), wide, undo, launch,
                              make_journal(guard.current_device(), n_units, codes, records, arena, chunk, asked),
                              c10::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace

void define_cuda_tracked(torch::Library& m) {
  m.def(schema::track_cuda, track_cuda);
  m.def(schema::track_hopper, track_hopper_cuda);
}

}  // namespace lora_merge
