// Operators of the CUDA kernels; compiled only where torch has CUDA. The mutation goes through addresses in the table,
// so these are internal: lora_merge/kernels/ops.py holds the public operators with their schemas.
#include "library_cuda.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

namespace lora_merge {
namespace {

void launch_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter, int64_t device,
                 int64_t source_dtype, int64_t destination_dtype, bool wide, int64_t n_units, int64_t n_raw_units,
                 int64_t rows_per_unit, int64_t col_warps, int64_t deep, bool staged_B, int64_t margin,
                 int64_t max_rank, bool stochastic, int64_t seed) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Launch launch =
      make_launch<Launch>(table, unit_segment, counter, n_units, n_raw_units, rows_per_unit, deep, max_rank);
  set_shape(launch, col_warps, staged_B, margin);
  launch.stochastic = stochastic;
  launch.seed = static_cast<uint64_t>(seed);
  check(launch_merge(static_cast<int>(source_dtype), static_cast<int>(destination_dtype), wide, launch,
                     at::cuda::getCurrentCUDAStream().stream()));
}

void launch_hopper_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& maps,
                        const at::Tensor& counter, int64_t device, int64_t dtype, bool wide, int64_t n_units,
                        int64_t n_raw_units, int64_t rows_per_unit, int64_t strip_cols, int64_t held, int64_t stages,
                        int64_t max_rank, bool stochastic, int64_t seed) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  HopperLaunch launch =
      make_launch<HopperLaunch>(table, unit_segment, counter, n_units, n_raw_units, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, strip_cols, held);
  launch.stochastic = stochastic;
  launch.seed = static_cast<uint64_t>(seed);
  check(launch_hopper(static_cast<int>(dtype), wide, launch, at::cuda::getCurrentCUDAStream().stream()));
}

at::Tensor tensor_maps(const at::Tensor& table, bool wide) {
  at::Tensor maps = at::zeros({table.size(0), static_cast<int64_t>(sizeof(Maps))}, at::kByte);
  check(encode_maps(static_cast<const Segment*>(table.data_ptr()), static_cast<int>(table.size(0)), wide,
                    static_cast<Maps*>(maps.data_ptr())));
  return maps;
}

void row_norms_cuda(const at::Tensor& table, const at::Tensor& unit_segment, int64_t source_dtype, int64_t n_units,
                    int64_t max_rank, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(out.device());
  const Launch launch = make_launch<Launch>(table, unit_segment, at::Tensor(), n_units, 0, 0, 0, max_rank);
  check(launch_row_norms(static_cast<int>(source_dtype), launch, out.data_ptr<double>(),
                         at::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace
}  // namespace lora_merge

TORCH_LIBRARY_FRAGMENT(lora_merge_native, m) {
  m.def(
      "launch_cuda(Tensor table, Tensor unit_segment, Tensor counter, int device, int source_dtype, int "
      "destination_dtype, bool wide, "
      "int n_units, int n_raw_units, int rows_per_unit, int col_warps, int deep, bool staged_B, int margin, int "
      "max_rank, bool stochastic, int seed) -> ()",
      lora_merge::launch_cuda);
  m.def(
      "launch_hopper(Tensor table, Tensor unit_segment, Tensor maps, Tensor counter, int device, int dtype, bool wide, "
      "int n_units, int n_raw_units, int rows_per_unit, int strip_cols, int held, int stages, int max_rank, bool "
      "stochastic, int "
      "seed) -> ()",
      lora_merge::launch_hopper_cuda);
  m.def("tensor_maps(Tensor table, bool wide) -> Tensor", lora_merge::tensor_maps);
  m.def("has_hopper() -> bool", lora_merge::has_hopper);
  m.def(
      "row_norms_cuda(Tensor table, Tensor unit_segment, int source_dtype, int n_units, int max_rank, Tensor out) -> "
      "()",
      lora_merge::row_norms_cuda);
}
