// Launches with results of 8 bits, which share scales; `part`: kScaledMeasure and its like.
#pragma once
#include "launch.h"

namespace lora_merge {

// As launch_merge. `dtype`: what sums are rounded to before they are scaled.
int launch_scaled(int source_dtype, int dtype, int adapters, int part, const Launch& launch, void* stream);
// As launch_hopper.
int launch_hopper_scaled(int dtype, int adapters, int part, const HopperLaunch& launch, void* stream);

}  // namespace lora_merge
