// The operators behind lora_merge/kernels: a segment table in, memory behind its addresses written.
//
// They are internal: what they write is not in their schemas, so that no graph may hold them. The public operators
// (lora_merge/kernels/ops.py) are registered in Python and know what they mutate. The dispatcher releases the GIL around them.
#include "library.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <sstream>

#include "cpu/launch.h"
#include "cuda/shapes.h"

namespace lora_merge {
namespace {

const Segment* segments(const at::Tensor& table) {
  TORCH_CHECK(table.is_cpu(), "lora_merge: a segment table of the CPU must be there, got ", table.device());
  return segments_of_table(table);
}

void launch_cpu(const at::Tensor& table, bool stochastic, int64_t seed) {
  cpu::launch(segments(table), table.size(0), stochastic, static_cast<uint64_t>(seed));
}

void row_norms_cpu(const at::Tensor& table, const at::Tensor& out) {
  const Segment* all = segments(table);
  int64_t rows = 0;
  for (int64_t i = 0; i < table.size(0); ++i) rows += all[i].rows;
  check_tensor(out, "out", at::kDouble, at::kCPU, rows);
  cpu::row_norms(all, table.size(0), out.mutable_data_ptr<double>());
}

std::tuple<at::Tensor, int64_t> tracked_sizes_cpu(const at::Tensor& table) {
  const Segment* const all = segments(table);
  at::Tensor first_unit = table.new_empty({table.size(0) + 1});
  const int64_t bytes = cpu::tracked_sizes(all, table.size(0), first_unit.mutable_data_ptr<int64_t>());
  return {first_unit, bytes};
}

cpu::Journal journal(const at::Tensor& table, const at::Tensor& codes, const at::Tensor& records,
                     const at::Tensor& arena, const at::Tensor& counter) {
  const auto [first_unit, bytes] = tracked_sizes_cpu(table);
  const int64_t units = first_unit.const_data_ptr<int64_t>()[table.size(0)];
  check_tensor(codes, "codes", at::kByte, at::kCPU, bytes);
  check_tensor(records, "records", at::kLong, at::kCPU, 2 * units);
  check_tensor(arena, "arena", at::kByte, at::kCPU);
  check_tensor(counter, "counter", at::kLong, at::kCPU, 3);
  return {codes.mutable_data_ptr<uint8_t>(), reinterpret_cast<cpu::Record*>(records.mutable_data_ptr<int64_t>()),
          arena.mutable_data_ptr<uint8_t>(), arena.numel(), counter.mutable_data_ptr<int64_t>()};
}

void track_cpu(const at::Tensor& table, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
               const at::Tensor& counter) {
  cpu::track(segments(table), table.size(0), journal(table, codes, records, arena, counter));
}

void untrack_cpu(const at::Tensor& table, const at::Tensor& codes, const at::Tensor& records, const at::Tensor& arena,
                 const at::Tensor& counter) {
  cpu::untrack(segments(table), table.size(0), journal(table, codes, records, arena, counter));
}

// ---- shapes of launches on a GPU, which any machine can ask for ---------------------------------------------------

std::vector<int64_t> merge_shape(int64_t max_rank, bool wide, int64_t element_bytes, int64_t widest, int64_t per_block,
                                 int64_t per_processor) {
  const auto s = choose_shape(max_rank, wide, element_bytes, widest, per_block, per_processor);
  if (!s) return {};
  return {s->col_warps, s->stages, s->staged_B, s->pad};
}

bool accepts_shape(at::IntArrayRef shape, int64_t max_rank, bool wide, int64_t element_bytes, int64_t per_block) {
  TORCH_CHECK(shape.size() == 4, "a shape has 4 numbers, got ", shape.size());
  const auto number = [&](int i) { return static_cast<int>(shape[i]); };
  return accepts(Shape{number(0), number(1), number(2), number(3)}, max_rank, wide, element_bytes, per_block);
}

std::vector<int64_t> hopper_tiles(int64_t max_rank, bool wide, int64_t beside, int64_t per_block) {
  const auto t = hopper::choose_tiles(max_rank, wide, beside, per_block);
  if (!t) return {};
  return {t->strip_cols, t->held, t->stages};
}

bool accepts_tiles(at::IntArrayRef tiles, int64_t max_rank, bool wide, int64_t beside, int64_t per_block) {
  TORCH_CHECK(tiles.size() == 3, "tiles have 3 numbers, got ", tiles.size());
  const auto number = [&](int i) { return static_cast<int>(tiles[i]); };
  return hopper::accepts(hopper::Tiles{number(0), number(1), number(2)}, max_rank, wide, beside, per_block);
}

// ---- what was built -----------------------------------------------------------------------------------------------

std::string layout_hash() { return kLayoutHash; }

// As nvcc was told them: "80", "90a"; "120+PTX" is code that later GPUs compile for themselves.
std::vector<std::string> cuda_architectures() {
  std::vector<std::string> names;
#ifdef LORA_MERGE_CUDA_ARCHITECTURES
  std::istringstream list(LORA_MERGE_CUDA_ARCHITECTURES);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
#endif
  return names;
}

void define(torch::Library& m) {
  m.def(schema::layout_hash, layout_hash);
  m.def(schema::cuda_architectures, cuda_architectures);
  m.def(schema::cpu_isas, cpu::isas);
  m.def(schema::launch_cpu, launch_cpu);
  m.def(schema::row_norms_cpu, row_norms_cpu);
  m.def(schema::tracked_sizes_cpu, tracked_sizes_cpu);
  m.def(schema::track_cpu, track_cpu);
  m.def(schema::untrack_cpu, untrack_cpu);
  m.def(schema::merge_shape, merge_shape);
  m.def(schema::accepts_shape, accepts_shape);
  m.def(schema::hopper_tiles, hopper_tiles);
  m.def(schema::accepts_tiles, accepts_tiles);
#ifdef LORA_MERGE_CUDA_ARCHITECTURES
  define_cuda(m);
  define_cuda_tracked(m);
#endif
}

// TORCH_LIBRARY would end the process where a second copy of the extension is loaded: it throws while the copy is being
// loaded, where nobody can catch. A second copy leaves the operators to the first; `native.py` compares its hash.
const bool registered = [] {
  if (c10::Dispatcher::singleton().findSchema({"lora_merge_native::launch_cpu", ""})) return false;
  static torch::Library library(torch::Library::DEF, "lora_merge_native", std::nullopt, __FILE__, __LINE__);
  define(library);
  return true;
}();

}  // namespace
}  // namespace lora_merge
