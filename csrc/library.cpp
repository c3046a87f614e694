// The operators behind lora_merge/kernels: a segment table in, memory behind its addresses written.
//
// They are internal: what they write is not in their schemas, so that no graph may hold them. The public operators
// (lora_merge/kernels/ops.py) are registered in Python and know what they mutate. The dispatcher releases the GIL around them.
#include <torch/library.h>

#include "cpu/launch.h"

namespace lora_merge {
namespace {

const Segment* segments(const at::Tensor& table) {
  constexpr int64_t kWords = sizeof(Segment) / sizeof(int64_t);
  TORCH_CHECK(table.device().is_cpu() && table.scalar_type() == at::kLong && table.is_contiguous() &&
                  table.dim() == 2 && table.size(1) == kWords,
              "a segment table is a contiguous int64 CPU tensor [segments, ", kWords, "], got ", table.toString(), " ",
              table.sizes());
  return reinterpret_cast<const Segment*>(table.const_data_ptr<int64_t>());
}

void launch_cpu(const at::Tensor& table, bool stochastic, int64_t seed) {
  cpu::launch(segments(table), table.size(0), stochastic, static_cast<uint64_t>(seed));
}

void row_norms_cpu(const at::Tensor& table, const at::Tensor& out) {
  const Segment* all = segments(table);
  int64_t rows = 0;
  for (int64_t i = 0; i < table.size(0); ++i) rows += all[i].rows;
  TORCH_CHECK(out.device().is_cpu() && out.scalar_type() == at::kDouble && out.is_contiguous() && out.numel() == rows,
              "row norms go to a contiguous float64 CPU tensor [", rows, "], got ", out.toString(), " ", out.sizes());
  cpu::row_norms(all, table.size(0), out.mutable_data_ptr<double>());
}

std::tuple<at::Tensor, int64_t> tracked_sizes_cpu(const at::Tensor& table) {
  at::Tensor first_unit = table.new_empty({table.size(0) + 1});
  const int64_t bytes = cpu::tracked_sizes(segments(table), table.size(0), first_unit.mutable_data_ptr<int64_t>());
  return {first_unit, bytes};
}

cpu::Journal journal(const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
                     const at::Tensor& counter) {
  return {codes.mutable_data_ptr<uint8_t>(), reinterpret_cast<cpu::Record*>(records.mutable_data_ptr<int64_t>()),
          arena.mutable_data_ptr<uint8_t>(), arena.numel(), counter.mutable_data_ptr<int64_t>()};
}

void track_cpu(const at::Tensor& table, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
               const at::Tensor& counter) {
  cpu::track(segments(table), table.size(0), journal(codes, records, arena, counter));
}

void untrack_cpu(const at::Tensor& table, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
                 const at::Tensor& counter) {
  cpu::untrack(segments(table), table.size(0), journal(codes, records, arena, counter));
}

}  // namespace
}  // namespace lora_merge

TORCH_LIBRARY(lora_merge_native, m) {
  m.def("launch_cpu(Tensor table, bool stochastic, int seed) -> ()", lora_merge::launch_cpu);
  m.def("row_norms_cpu(Tensor table, Tensor out) -> ()", lora_merge::row_norms_cpu);
  m.def("tracked_sizes_cpu(Tensor table) -> (Tensor, int)", lora_merge::tracked_sizes_cpu);
  m.def("track_cpu(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()", lora_merge::track_cpu);
  m.def("untrack_cpu(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()",
        lora_merge::untrack_cpu);
  m.def("cpu_isas() -> str[]", lora_merge::cpu::isas);
}
