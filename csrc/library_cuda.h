// What the operators of the CUDA kernels share: a launch from their arguments.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "cuda/launch.h"

namespace lora_merge {

inline void check(int error) {
  TORCH_CHECK(error == 0, "lora_merge: launching a CUDA kernel failed: ", error_name(error));
}

// `table` is on the device together with `unit_segment`, or on the CPU, small enough to travel as an argument; without
// elements, `counter` is none.
template <typename AnyLaunch>
AnyLaunch make_launch(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter,
                      int64_t n_units, int64_t n_raw_units, int64_t rows_per_unit, int64_t deep, int64_t max_rank) {
  AnyLaunch launch{};
  launch.n_segments = static_cast<int32_t>(table.size(0));
  launch.n_units = static_cast<int32_t>(n_units);
  launch.n_raw_units = static_cast<int32_t>(n_raw_units);
  launch.rows_per_unit = static_cast<int32_t>(rows_per_unit);
  launch.deep = static_cast<int32_t>(deep);
  launch.max_rank = static_cast<int32_t>(max_rank);
  if (table.is_cuda()) {
    launch.segments = static_cast<const Segment*>(table.data_ptr());
    launch.unit_segment = unit_segment.data_ptr<int32_t>();
  } else {
    TORCH_CHECK(table.size(0) <= kInlineSegments, "a table on the CPU holds at most ", kInlineSegments, " segments");
    std::memcpy(launch.inline_segments, table.data_ptr(), table.nbytes());
  }
  if (counter.defined() && counter.numel() > 0) launch.counter = counter.data_ptr<int32_t>();
  return launch;
}

inline void set_shape(Launch& launch, int64_t col_warps, bool staged_B, int64_t margin) {
  launch.col_warps = static_cast<int32_t>(col_warps);
  launch.staged_B = staged_B;
  launch.margin = static_cast<int32_t>(margin);
}

inline void set_tiles(HopperLaunch& launch, const at::Tensor& maps, int64_t strip_cols, int64_t held) {
  launch.strip_cols = static_cast<int32_t>(strip_cols);
  launch.held = static_cast<int32_t>(held);
  if (maps.is_cuda()) launch.maps = static_cast<const Maps*>(maps.data_ptr());
  else std::memcpy(launch.inline_maps, maps.data_ptr(), maps.nbytes());
}

}  // namespace lora_merge
