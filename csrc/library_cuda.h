// What the operators of the CUDA kernels share: a launch from their arguments.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "cuda/launch.h"
#include "library.h"

namespace lora_merge {

inline void check(int error) {
  TORCH_CHECK(error == 0, "lora_merge: launching a CUDA kernel failed: ", error_name(error));
}

// `table` is on the device together with `unit_segment`, or on the CPU, small enough to travel as an argument; without
// elements, `counter` is none.
template <typename AnyLaunch>
AnyLaunch make_launch(const at::Tensor& table, const at::Tensor& unit_segment, const at::Tensor& counter,
                      const at::Device& device, int64_t n_units, int64_t n_raw_units, int64_t rows_per_unit,
                      int64_t stages, int64_t max_rank) {
  const Segment* const all = segments_of_table(table);
  TORCH_CHECK(n_units >= 0 && n_raw_units >= 0 && n_units + n_raw_units <= INT32_MAX,
              "lora_merge: a launch has up to ", INT32_MAX, " units of work, got ", n_units, " and ", n_raw_units,
              "; cut the segments into several plans");
  TORCH_CHECK(rows_per_unit % 64 == 0 && max_rank >= 0 && max_rank <= kMaxRank, "lora_merge: units of ", rows_per_unit,
              " rows, rank ", max_rank);
  AnyLaunch launch{};
  launch.n_segments = static_cast<int32_t>(table.size(0));
  launch.n_units = static_cast<int32_t>(n_units);
  launch.n_raw_units = static_cast<int32_t>(n_raw_units);
  launch.rows_per_unit = static_cast<int32_t>(rows_per_unit);
  launch.stages = static_cast<int32_t>(stages);
  launch.max_rank = static_cast<int32_t>(max_rank);
  if (table.is_cpu()) {
    TORCH_CHECK(table.size(0) <= kInlineSegments, "lora_merge: a table on the CPU holds at most ",
                int{kInlineSegments}, " segments, got ", table.size(0));
    std::memcpy(launch.inline_segments, all, table.nbytes());
  } else {
    check_tensor(table, "table", at::kLong, device);
    check_tensor(unit_segment, "unit_segment", at::kInt, device, n_units + n_raw_units);
    launch.segments = all;
    launch.unit_segment = unit_segment.const_data_ptr<int32_t>();
  }
  if (counter.defined() && counter.numel() > 0) {
    check_tensor(counter, "counter", at::kInt, device, 2);
    launch.counter = counter.mutable_data_ptr<int32_t>();
  }
  return launch;
}

inline void set_shape(Launch& launch, int64_t col_warps, bool staged_B, int64_t pad) {
  launch.col_warps = static_cast<int32_t>(col_warps);
  launch.staged_B = staged_B;
  launch.pad = static_cast<int32_t>(pad);
}

// Maps lie where the table does.
inline void set_tiles(HopperLaunch& launch, const at::Tensor& maps, const at::Device& device, int64_t strip_cols,
                      int64_t held) {
  const bool on_device = launch.segments != nullptr;
  check_tensor(maps, "maps", at::kByte, on_device ? device : at::Device(at::kCPU), launch.n_segments * kMapBytes);
  launch.strip_cols = static_cast<int32_t>(strip_cols);
  launch.held = static_cast<int32_t>(held);
  const void* const bytes = maps.const_data_ptr<uint8_t>();
  if (on_device) {
    TORCH_CHECK(reinterpret_cast<uintptr_t>(bytes) % alignof(Maps) == 0,
                "lora_merge: maps must begin at a multiple of ", alignof(Maps), " bytes");
    launch.maps = static_cast<const Maps*>(bytes);
  } else {
    std::memcpy(launch.inline_maps, bytes, launch.n_segments * sizeof(Maps));
  }
}

inline int check_dtype(int64_t dtype) {
  TORCH_CHECK(dtype >= 0 && dtype <= kFloat32, "lora_merge: unknown dtype code ", dtype);
  return static_cast<int>(dtype);
}

}  // namespace lora_merge
