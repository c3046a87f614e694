// The CPU backend: runs segment tables with all threads of at::parallel_for.
#pragma once
#include <string>
#include <vector>

#include "../segments.h"

namespace lora_merge::cpu {

// Executes every segment. `seed` is xored with each segment's key; only stochastic rounding looks at it.
void launch(const Segment* segments, int64_t count, bool stochastic, uint64_t seed);

// Writes the squared norm of each row of source + scaling * B A, segment after segment.
void row_norms(const Segment* segments, int64_t count, double* out);

// The instruction sets that this machine can run, of "avx512", "avx2" and "generic". The first one is used, or the one
// that LORA_MERGE_CPU_ISA names (read at the first launch).
std::vector<std::string> isas();

}  // namespace lora_merge::cpu
