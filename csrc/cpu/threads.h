// torch's threads: its own function for parallel work, which libtorch promises under one name from 2.10 on. It is called
// by address, so that nothing here is compiled against a torch.
#pragma once
#include <cstdint>

namespace lora_merge::cpu {

using Range = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Range work, void* context);
using NumThreads = int32_t (*)(uint32_t* count);

// torch_parallel_for and torch_get_num_threads of the torch in this process; before that, work is done by its caller.
void use_threads(ParallelFor parallel_for, NumThreads num_threads);

int64_t num_threads();

// Runs `work` on up to `count` threads at a time; what it throws reaches the caller.
void on_threads(int64_t count, void (*work)(void*), void* context);

}  // namespace lora_merge::cpu
