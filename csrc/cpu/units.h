// A table cut into units of work, and threads that do them.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "denormals.h"
#include "kernel.h"
#include "threads.h"

namespace lora_merge::cpu {

inline int64_t divide_up(int64_t n, int64_t step) { return (n + step - 1) / step; }

// How a segment is cut: each unit has at most so many rows and columns.
struct Cut {
  int64_t rows, cols;

  int64_t across(const Segment& s) const { return divide_up(s.cols, cols); }
  int64_t units(const Segment& s) const { return divide_up(s.rows, rows) * across(s); }
};

// Runs `work(at, i, unit, memory)` for every unit of every segment: its number, its segment's, and memory of the thread's
// own. Threads take the next unit when they are done with one, so that a slow core holds up nobody. Which thread does a
// unit changes nothing in its result.
template <class Memory, class Work>
void for_units(const Segment* segments, int64_t count, Cut (*cut)(const Segment&), const Work& work) {
  std::vector<int64_t> begin(count + 1, 0);
  for (int64_t i = 0; i < count; ++i) begin[i + 1] = begin[i] + cut(segments[i]).units(segments[i]);
  const int64_t total = begin[count];
  std::atomic<int64_t> next{0};
  auto worker = [&] {
    const KeepDenormals keep;
    const std::unique_ptr<Memory> memory(new Memory);
    for (int64_t at = next++; at < total; at = next++) {
      const int64_t i = std::upper_bound(begin.begin(), begin.end(), at) - begin.begin() - 1;
      const Segment& s = segments[i];
      const Cut size = cut(s);
      const int64_t down = (at - begin[i]) / size.across(s), side = (at - begin[i]) % size.across(s);
      const int64_t row = down * size.rows, col = side * size.cols;
      work(at, i, Unit{&s, row, std::min(size.rows, s.rows - row), col, std::min(size.cols, s.cols - col)}, *memory);
    }
  };
  on_threads(std::min(num_threads(), total), [](void* w) { (*static_cast<decltype(worker)*>(w))(); }, &worker);
}

}  // namespace lora_merge::cpu
