// Operators of the CUDA kernels; compiled only where torch has CUDA. The mutation goes through addresses in the table,
// so these are internal: lora_merge/kernels/ops.py holds the public operators with their schemas.
#include "library_cuda.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <vector>

namespace lora_merge {
namespace {

void launch_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter, int64_t device,
                 int64_t source_dtype, int64_t destination_dtype, bool wide, int64_t n_units, int64_t n_raw_units,
                 int64_t rows_per_unit, int64_t col_warps, int64_t stages, bool staged_B, int64_t pad,
                 int64_t max_rank, bool stochastic, int64_t seed) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  Launch launch = make_launch<Launch>(table, unit_segment, counter, guard.current_device(), n_units, n_raw_units,
                                      rows_per_unit, stages, max_rank);
  set_shape(launch, col_warps, staged_B, pad);
  launch.stochastic = stochastic;
  launch.seed = static_cast<uint64_t>(seed);
  check(launch_merge(check_dtype(source_dtype), check_dtype(destination_dtype), wide, launch,
                     c10::cuda::getCurrentCUDAStream().stream()));
}

void launch_hopper_cuda(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& maps,
                        const at::Tensor& counter, int64_t device, int64_t dtype, bool wide, int64_t n_units,
                        int64_t n_raw_units, int64_t rows_per_unit, int64_t strip_cols, int64_t held, int64_t stages,
                        int64_t max_rank, bool stochastic, int64_t seed) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device));
  HopperLaunch launch = make_launch<HopperLaunch>(table, unit_segment, counter, guard.current_device(), n_units,
                                                  n_raw_units, rows_per_unit, stages, max_rank);
  set_tiles(launch, maps, guard.current_device(), strip_cols, held);
  launch.stochastic = stochastic;
  launch.seed = static_cast<uint64_t>(seed);
  check(launch_hopper(check_dtype(dtype), wide, launch, c10::cuda::getCurrentCUDAStream().stream()));
}

// The driver wants maps where they are aligned, which memory of a CPU tensor need not be.
at::Tensor tensor_maps(const at::Tensor& table, bool wide) {
  TORCH_CHECK(table.is_cpu(), "lora_merge: the table to make tensor maps of must be on the CPU, got ", table.device());
  const Segment* const all = segments_of_table(table);
  std::vector<Maps> encoded(table.size(0));
  check(encode_maps(all, static_cast<int>(table.size(0)), wide, encoded.data()));
  at::Tensor maps = at::empty({table.size(0), static_cast<int64_t>(sizeof(Maps))}, at::kByte);
  std::memcpy(maps.mutable_data_ptr<uint8_t>(), encoded.data(), encoded.size() * sizeof(Maps));
  return maps;
}

void row_norms_cuda(const at::Tensor& table, const at::Tensor& unit_segment, int64_t source_dtype, int64_t n_units,
                    int64_t max_rank, const at::Tensor& out) {
  TORCH_CHECK(out.is_cuda(), "lora_merge: out must be on a GPU, got ", out.device());
  check_tensor(out, "out", at::kDouble, out.device());
  const c10::cuda::CUDAGuard guard(out.device());
  const Launch launch =
      make_launch<Launch>(table, unit_segment, at::Tensor(), out.device(), n_units, 0, 0, 0, max_rank);
  check(launch_row_norms(check_dtype(source_dtype), launch, out.mutable_data_ptr<double>(),
                         c10::cuda::getCurrentCUDAStream().stream()));
}

}  // namespace

void define_cuda(torch::Library& m) {
  m.def(schema::launch_cuda, launch_cuda);
  m.def(schema::launch_hopper, launch_hopper_cuda);
  m.def(schema::tensor_maps, tensor_maps);
  m.def(schema::row_norms_cuda, row_norms_cuda);
}

}  // namespace lora_merge
