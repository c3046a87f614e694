// Cuts a table into units of work and hands them to threads.
#include "launch.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "../check.h"
#include "features.h"
#include "kernel.h"
#include "units.h"

namespace lora_merge::cpu {
namespace {

constexpr int64_t kCopyBytes = 1 << 20;  // of one unit of a copy
constexpr int64_t kStreamed = 1 << 22;   // elements of results beyond which none stays in the caches
constexpr int64_t kCopyTile = 128;       // rows and columns of one whose elements lie apart: lines stay in the cache

// Those of vectors that this machine can run, the best one first.
std::vector<const Kernels*> vectors() {
  std::vector<const Kernels*> all;
#if defined(__x86_64__)
  const Features found = features();
  if (const Kernels* pairs = found.bf16 ? avx512_bf16() : nullptr) all.push_back(pairs);
  if (found.avx512) all.push_back(&kAvx512);
  if (found.avx2) all.push_back(&kAvx2);
#elif defined(__aarch64__)
  all.push_back(&kNeon);
#endif
  all.push_back(&kGeneric);
  return all;
}

// Whether the matrix unit's are among those that this machine can run, before all of them.
bool has_matrix() { return std::strncmp(vectors().front()->name, "avx512", 6) == 0 && has_amx(); }

// The matrix unit's. A process that asks for it changes (its signal stacks have to be larger), so only who uses it
// does.
const Kernels* matrix() {
  if (!has_matrix()) return nullptr;
  const Kernels* found = amx();
  if (found == nullptr) {
    warn(
        "lora_merge: Linux does not let this process use AMX (has a thread a small signal stack?): AVX-512 instead, "
        "which sums in another order. Ranks of one trainer: LORA_MERGE_CPU_ISA=avx512 on all");
  }
  return found;
}

const Kernels& choose() {
  const char* forced = std::getenv("LORA_MERGE_CPU_ISA");
  const bool any = forced == nullptr || *forced == '\0';
  if (any || std::strcmp("amx", forced) == 0) {
    if (const Kernels* found = matrix()) return *found;
  }
  for (const Kernels* kernels : vectors()) {
    if (any || std::strcmp(kernels->name, forced) == 0) return *kernels;
  }
  std::string names;
  for (const std::string& name : isas()) names += (names.empty() ? "" : ", ") + name;
  throw std::runtime_error(
      joined("LORA_MERGE_CPU_ISA=", forced, ": expected one of those that this machine runs: ", names));
}

bool is_raw(const Segment& s) { return (s.dtypes & 0xff) >= kRaw1; }

int64_t raw_size(const Segment& s) { return int64_t{1} << ((s.dtypes & 0xff) - kRaw1); }

bool is_runs(const Segment& s) { return s.source_stride[1] == 1 && s.destination_stride[1] == 1; }

Cut merge_cut(const Segment& s) {
  if (!is_raw(s)) return {kUnitRows, kUnitCols};
  if (!is_runs(s)) return {kCopyTile, kCopyTile};
  const int64_t budget = kCopyBytes / raw_size(s);
  const int64_t cols = std::min(s.cols, budget);
  return {budget / cols, cols};
}

Cut row_cut(const Segment& s) { return {kUnitRows, s.cols}; }

template <class T>
void copy_elements(const Unit& unit) {
  const Segment& s = *unit.segment;
  if (s.source == s.destination) return;  // a copy onto itself
  const int64_t* from_step = s.source_stride;
  const int64_t* to_step = s.destination_stride;
  for (int64_t i = unit.row; i < unit.row + unit.rows; ++i) {
    const T* from = reinterpret_cast<const T*>(s.source) + i * from_step[0] + unit.col * from_step[1];
    T* to = reinterpret_cast<T*>(s.destination) + i * to_step[0] + unit.col * to_step[1];
    if (is_runs(s)) {
      std::memcpy(to, from, unit.cols * sizeof(T));
    } else {
      for (int64_t j = 0; j < unit.cols; ++j) to[j * to_step[1]] = from[j * from_step[1]];
    }
  }
}

void copy(const Unit& unit) {
  switch (unit.segment->dtypes & 0xff) {
    case kRaw1: return copy_elements<uint8_t>(unit);
    case kRaw2: return copy_elements<uint16_t>(unit);
    case kRaw4: return copy_elements<uint32_t>(unit);
    default: return copy_elements<uint64_t>(unit);
  }
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : vectors()) names.emplace_back(kernels->name);
  if (has_matrix()) names.insert(names.begin(), "amx");
  return names;
}

bool launch(const Segment* segments, int64_t count, bool stochastic, uint64_t seed) {
  const Kernels& k = kernels();
  int64_t moved = 0;  // elements whose result lies elsewhere than their source
  for (const Segment* s = segments; s < segments + count; ++s) {
    if (s->source != s->destination && !is_raw(*s)) moved += s->rows * s->cols;
  }
  std::atomic<bool> finite{true};
  for_units<Scratch>(segments, count, merge_cut, [&](int64_t, int64_t, Unit unit, Scratch& scratch) {
    unit.streamed = moved > kStreamed && unit.segment->source != unit.segment->destination;
    is_raw(*unit.segment) ? copy(unit) : k.merge(unit, stochastic, seed, scratch);
    if (scratch.beyond) finite = false;
  });
  return finite;
}

void row_norms(const Segment* segments, int64_t count, double* out) {
  const Kernels& k = kernels();
  std::vector<int64_t> first(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    check(!is_raw(segments[i]), "row norms of a byte copy");
    first[i + 1] = first[i] + segments[i].rows;
  }
  for_units<Scratch>(segments, count, row_cut, [&](int64_t, int64_t i, const Unit& unit, Scratch& scratch) {
    k.row_norms(unit, out + first[i] + unit.row, scratch);
  });
}

}  // namespace lora_merge::cpu
