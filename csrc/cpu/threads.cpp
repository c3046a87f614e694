#include "threads.h"

#include <atomic>
#include <exception>

#include "../check.h"

namespace lora_merge::cpu {
namespace {

ParallelFor parallel = nullptr;
NumThreads threads = nullptr;

struct Call {
  void (*work)(void*);
  void* context;
  std::exception_ptr error;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
};

// Torch's function is C: nothing may be thrown through it.
void one(int64_t, int64_t, void* opaque) {
  Call& call = *static_cast<Call*>(opaque);
  try {
    call.work(call.context);
  } catch (...) {
    if (!call.failed.test_and_set()) call.error = std::current_exception();
  }
}

}  // namespace

void use_threads(ParallelFor parallel_for, NumThreads num_threads) {
  parallel = parallel_for;
  threads = num_threads;
}

int64_t num_threads() {
  uint32_t count = 1;
  if (threads != nullptr) check(threads(&count) == 0, "torch_get_num_threads failed");
  return count;
}

void on_threads(int64_t count, void (*work)(void*), void* context) {
  if (count <= 0) return;
  if (count == 1 || parallel == nullptr) return work(context);
  Call call{work, context, nullptr};
  check(parallel(0, count, 1, one, &call) == 0, "torch_parallel_for failed");
  if (call.error) std::rethrow_exception(call.error);
}

}  // namespace lora_merge::cpu
