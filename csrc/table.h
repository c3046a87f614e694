// Checks of a segment table where the CPU can read it.
#pragma once
#include "check.h"
#include "segments.h"

namespace lora_merge {

// Throws unless the words of all segments are ones that a kernel may trust.
inline void check_words(const Segment* all, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const Segment& s = all[i];
    const auto code = [&](int part) { return s.dtypes >> 8 * part & 0xff; };
    const bool raw = code(0) >= kRaw1 && code(0) <= kRaw8 && code(1) == code(0);
    const bool floats = code(0) <= kFloat32 && code(1) <= kFloat32 && code(2) <= kFloat32 && code(3) <= kFloat32;
    const int64_t format = s.dtypes >> 32;
    check((raw || floats) && format >= kPlain && format <= (floats ? kInt8 : kPlain), "segment ", i,
          ": unknown dtypes ", s.dtypes);
    check(format == kPlain || (s.absmax != 0 && s.block > 0 && (format == kInt8 || s.code != 0)), "segment ", i,
          ": what its codes stand for is missing");
    check(s.absmax_code == 0 || (s.absmax_scale != 0 && s.absmax_block > 0 && s.absmax_offset != 0), "segment ", i,
          ": what its absmax stands for is missing");
    check(s.rank >= 0 && s.rank <= kMaxRank && (s.rank == 0 || floats), "segment ", i,
          ": the rank must be between 0 and ", kMaxRank, ", got ", s.rank);
    check(s.rows > 0 && s.cols > 0 && (raw || (s.rows <= kMaxSide && s.cols <= kMaxSide)), "segment ", i,
          ": rows and columns must be between 1 and ", kMaxSide, ", got ", s.rows, " and ", s.cols);
    check(s.source != 0 && s.destination != 0 && (s.rank == 0 || (s.lora_A != 0 && s.lora_B != 0)), "segment ", i,
          ": an address is missing");
  }
}

}  // namespace lora_merge
