// The Python module lora_merge._C: a segment table in, memory behind its addresses written. It knows numbers and
// addresses; lora_merge/kernels/bindings/operators.py checks the tensors that they are of.
#include <sstream>

#include "check.h"
#include "cpu/launch.h"
#include "cpu/threads.h"
#include "cuda/shapes.h"
#include "python.h"
#include "table.h"
#include "watch/watch.h"

namespace lora_merge {
namespace {

thread_local std::string warning;

}  // namespace

void warn(std::string text) { warning = std::move(text); }

std::string python::take_warning() { return std::exchange(warning, {}); }

namespace operators {

// ---- what was built -------------------------------------------------------------------------------------------------

std::string layout_hash() { return kLayoutHash; }

// As nvcc names them: "80", "90a"; "120+PTX" is code that later GPUs compile for themselves.
std::vector<std::string> cuda_architectures() {
  std::vector<std::string> names;
#ifdef LORA_MERGE_CUDA_ARCHITECTURES
  std::istringstream list(LORA_MERGE_CUDA_ARCHITECTURES);
  for (std::string name; std::getline(list, name, ',');) names.push_back(name);
#endif
  return names;
}

std::vector<std::string> cpu_isas() { return cpu::isas(); }

void use_threads(void* parallel_for, void* num_threads) {
  cpu::use_threads(reinterpret_cast<cpu::ParallelFor>(parallel_for), reinterpret_cast<cpu::NumThreads>(num_threads));
}

// ---- CPU -----------------------------------------------------------------------------------------------------------

bool launch_cpu(const Segment* table, int64_t segments, Rounding rounding) {
  check_words(table, segments);
  return cpu::launch(table, segments, rounding.stochastic, static_cast<uint64_t>(rounding.seed));
}

void row_norms_cpu(const Segment* table, int64_t segments, double* out, int64_t n_out) {
  check_words(table, segments);
  int64_t rows = 0;
  for (int64_t i = 0; i < segments; ++i) rows += table[i].rows;
  check(n_out >= rows, "out must have ", rows, " elements or more, got ", n_out);
  cpu::row_norms(table, segments, out);
}

int64_t tracked_sizes_cpu(const Segment* table, int64_t segments, int64_t* first_unit) {
  check_words(table, segments);
  return cpu::tracked_sizes(table, segments, first_unit);
}

namespace {

cpu::Journal checked(const Segment* table, int64_t segments, const Journal& j) {
  std::vector<int64_t> first_unit(segments + 1);
  const int64_t bytes = tracked_sizes_cpu(table, segments, first_unit.data());
  check(j.n_codes >= bytes, "codes must have ", bytes, " elements or more, got ", j.n_codes);
  check(j.n_records >= 2 * first_unit[segments], "records must have ", 2 * first_unit[segments],
        " elements or more, got ", j.n_records);
  return {j.codes, reinterpret_cast<cpu::Record*>(j.records), j.arena, j.room, j.mark, j.asked};
}

}  // namespace

void track_cpu(const Segment* table, int64_t segments, Journal journal) {
  cpu::track(table, segments, checked(table, segments, journal));
}

void untrack_cpu(const Segment* table, int64_t segments, Journal journal) {
  cpu::untrack(table, segments, checked(table, segments, journal));
}

void retrack_cpu(const Segment* table, int64_t segments, const Segment* table_before, int64_t segments_before,
                 Journal journal, uint8_t* before) {
  check_words(table_before, segments_before);
  check(segments == segments_before, "a merge of ", segments, " segments cannot follow one of ", segments_before);
  cpu::retrack(table, segments, checked(table, segments, journal), table_before, before);
}

// ---- shapes of launches on a GPU, which any machine can ask for -----------------------------------------------------

std::vector<int64_t> merge_shape(int64_t max_rank, int64_t planes, int64_t element_bytes, int64_t narrowest,
                                 int64_t widest, int64_t per_block, int64_t per_processor) {
  const auto s = choose_shape(max_rank, planes, element_bytes, narrowest, widest, per_block, per_processor);
  if (!s) return {};
  return {s->col_warps, s->stages, s->staged_B, s->pad};
}

bool accepts_shape(Blocks b, int64_t planes, int64_t element_bytes, int64_t per_block) {
  const Shape shape{static_cast<int>(b.col_warps), static_cast<int>(b.stages), b.staged_B, static_cast<int>(b.pad)};
  return accepts(shape, b.max_rank, planes, element_bytes, per_block);
}

std::vector<int64_t> hopper_tiles(int64_t max_rank, int64_t planes, int64_t extra, int64_t per_block, bool ahead) {
  const auto t = hopper::choose_tiles(max_rank, planes, extra, per_block, ahead);
  if (!t) return {};
  return {t->strip_cols, t->held, t->stages};
}

bool accepts_tiles(int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank, int64_t planes, int64_t extra,
                   bool ahead, int64_t per_block) {
  const hopper::Tiles tiles{static_cast<int>(strip_cols), static_cast<int>(held), static_cast<int>(stages)};
  return hopper::accepts(tiles, max_rank, planes, extra, ahead, per_block);
}

}  // namespace operators

namespace {

#define LORA_MERGE_CALL(name)                                               \
  PyObject* name(PyObject*, PyObject* const* arguments, Py_ssize_t count) { \
    return python::counted(#name, operators::name, arguments, count);       \
  }
#define LORA_MERGE_ROW(name) \
  {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(calls::name)), METH_FASTCALL, nullptr},

namespace calls {
LORA_MERGE_OPERATORS(LORA_MERGE_CALL)
#ifdef LORA_MERGE_CUDA_ARCHITECTURES
LORA_MERGE_CUDA_OPERATORS(LORA_MERGE_CALL)
#endif
}  // namespace calls

PyMethodDef functions[] = {LORA_MERGE_OPERATORS(LORA_MERGE_ROW)
#ifdef LORA_MERGE_CUDA_ARCHITECTURES
                               LORA_MERGE_CUDA_OPERATORS(LORA_MERGE_ROW)
#endif
                                   {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_C",
                      "The compiled kernels of lora_merge.",
                      -1,
                      functions,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace
}  // namespace lora_merge

PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&lora_merge::module);
  PyObject* watch = made == nullptr ? nullptr : lora_merge::watch::type();
  if (made != nullptr && (watch == nullptr || PyModule_AddObjectRef(made, "Watch", watch) != 0)) Py_CLEAR(made);
  Py_XDECREF(watch);
  return made;
}
