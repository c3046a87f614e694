// Launches with results of 8 bits, which share scales.
#pragma once
#include "launch.h"

namespace lora_merge {

struct ScaledLaunch : Launch {
  const Scaled* scaled;  // of each segment, on the device; null = inline_scaled
  Scaled inline_scaled[kInlineSegments];
};

// As launch_merge. `dtype`: what sums are rounded to before they are scaled; `part`: kScaledMeasure and its like.
int launch_scaled(int source_dtype, int dtype, int adapters, int part, const ScaledLaunch& launch, void* stream);

}  // namespace lora_merge
