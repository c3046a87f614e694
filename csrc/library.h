// What the operators share: checks of the tensors that they are given.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "segments.h"

namespace torch {
class Library;
}

namespace lora_merge {

// The operators of GPUs, where they are compiled.
void define_cuda(torch::Library& library);
void define_cuda_tracked(torch::Library& library);

inline void check_tensor(const at::Tensor& t, const char* label, at::ScalarType dtype, const at::Device& device) {
  TORCH_CHECK(t.scalar_type() == dtype && t.is_contiguous() && t.device() == device, "lora_merge: ", label,
              " must be contiguous ", dtype, " on ", device, ", got ", t.toString(), " ", t.sizes(), " with strides ",
              t.strides(), " on ", t.device());
}

// At least `numel` elements.
inline void check_tensor(const at::Tensor& t, const char* label, at::ScalarType dtype, const at::Device& device,
                         int64_t numel) {
  check_tensor(t, label, dtype, device);
  TORCH_CHECK(t.numel() >= numel, "lora_merge: ", label, " must have ", numel, " elements or more, got ", t.numel());
}

// Whether the words of a segment are ones that a kernel may trust.
inline void check_words(const Segment& s, int64_t index) {
  const auto code = [&](int half) { return s.dtypes >> 8 * half & 0xff; };
  const bool raw = code(0) >= kRaw1 && code(0) <= kRaw8 && code(1) == code(0);
  const bool floats = code(0) <= kFloat32 && code(1) <= kFloat32 && code(2) <= kFloat32 && code(3) <= kFloat32;
  TORCH_CHECK((raw || floats) && s.dtypes >> 32 == 0, "lora_merge: segment ", index, ": unknown dtypes ", s.dtypes);
  TORCH_CHECK(s.rank >= 0 && s.rank <= kMaxRank && (s.rank == 0 || floats), "lora_merge: segment ", index,
              ": the rank must be between 0 and ", int{kMaxRank}, ", got ", s.rank);
  TORCH_CHECK(s.rows > 0 && s.cols > 0 && (raw || (s.rows <= kMaxSide && s.cols <= kMaxSide)), "lora_merge: segment ",
              index, ": rows and columns must be between 1 and ", int{kMaxSide}, ", got ", s.rows, " and ", s.cols);
  TORCH_CHECK(s.source != 0 && s.destination != 0 && (s.rank == 0 || (s.lora_A != 0 && s.lora_B != 0)),
              "lora_merge: segment ", index, ": an address is missing");
}

// `table` as segments; their words are checked where the CPU can read them.
inline const Segment* segments_of_table(const at::Tensor& table) {
  constexpr int64_t kWords = sizeof(Segment) / sizeof(int64_t);
  TORCH_CHECK(table.scalar_type() == at::kLong && table.is_contiguous() && table.dim() == 2 && table.size(1) == kWords,
              "lora_merge: a segment table must be contiguous int64 [segments, ", kWords, "], got ", table.toString(),
              " ", table.sizes());
  const auto* all = reinterpret_cast<const Segment*>(table.const_data_ptr<int64_t>());
  if (table.is_cpu())
    for (int64_t i = 0; i < table.size(0); ++i) check_words(all[i], i);
  return all;
}

}  // namespace lora_merge
