// Copies that move bits.
#pragma once
#include "units.cuh"

namespace lora_merge {

template <typename T>
__device__ void copy_elements(const Segment& s, int row, int rows, int64_t col, int64_t cols) {
  const int width = cols, count = rows * width;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int64_t r = row + i / width, c = col + i % width;
    reinterpret_cast<T*>(s.destination)[r * s.destination_stride[0] + c * s.destination_stride[1]] =
        reinterpret_cast<const T*>(s.source)[r * s.source_stride[0] + c * s.source_stride[1]];
  }
}

__device__ __forceinline__ void copy_bytes(char* to, const char* from, int64_t bytes) {
  if (((reinterpret_cast<int64_t>(to) ^ reinterpret_cast<int64_t>(from)) & 15) == 0) {
    const int64_t head = min(bytes, static_cast<int64_t>(-reinterpret_cast<int64_t>(to) & 15));
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    const int64_t vectors = (bytes - head) / 16;
    uint4* v_to = reinterpret_cast<uint4*>(to + head);
    const uint4* v_from = reinterpret_cast<const uint4*>(from + head);
    int64_t i = threadIdx.x;
    for (; i + 7 * kThreads < vectors; i += 8 * kThreads) {
      uint4 v[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = __ldcs(v_from + i + u * kThreads);
#pragma unroll
      for (int u = 0; u < 8; ++u) __stcs(v_to + i + u * kThreads, v[u]);
    }
    for (; i < vectors; i += kThreads) __stcs(v_to + i, __ldcs(v_from + i));
    for (int64_t t = head + vectors * 16 + threadIdx.x; t < bytes; t += kThreads) to[t] = from[t];
  } else {
    for (int64_t t = threadIdx.x; t < bytes; t += kThreads) to[t] = from[t];
  }
}

// Rows of whole 16-byte vectors, kRawCols bytes apart at the most.
__device__ __forceinline__ void copy_rows(char* to, const char* from, int rows, int vectors, int64_t to_pitch,
                                          int64_t from_pitch) {
  constexpr int kAcross = kRawCols / 16;
  const int v = threadIdx.x % kAcross;
  if (v >= vectors) return;
  constexpr int kRowsAtOnce = kThreads / kAcross;
#pragma unroll 8
  for (int r = threadIdx.x / kAcross; r < rows; r += kRowsAtOnce)
    __stcs(reinterpret_cast<uint4*>(to + r * to_pitch) + v,
           __ldcs(reinterpret_cast<const uint4*>(from + r * from_pitch) + v));
}

__device__ __forceinline__ void copy_unit(const Segment& s, int unit) {
  const int64_t width = s.rows == 1 ? kRawCols1 : kRawCols;
  const int64_t local = unit - s.unit_begin, down = local / s.units_across;
  const int64_t col = (local - down * s.units_across) * width, cols = min(width, s.cols - col);
  const int row = down * kRawRows, rows = min(static_cast<int64_t>(kRawRows), s.rows - row);
  switch (s.dtypes & 0xff) {
    case kRaw1: {
      if (s.source_stride[1] != 1 || s.destination_stride[1] != 1)
        return copy_elements<uint8_t>(s, row, rows, col, cols);
      char* to = reinterpret_cast<char*>(s.destination) + row * s.destination_stride[0] + col;
      const char* from = reinterpret_cast<const char*>(s.source) + row * s.source_stride[0] + col;
      const int64_t bits = s.source | s.destination | s.source_stride[0] | s.destination_stride[0] | cols;
      if (s.rows > 1 && bits % 16 == 0)
        return copy_rows(to, from, rows, cols / 16, s.destination_stride[0], s.source_stride[0]);
      for (int r = 0; r < rows; ++r) copy_bytes(to + r * s.destination_stride[0], from + r * s.source_stride[0], cols);
      return;
    }
    case kRaw2: return copy_elements<uint16_t>(s, row, rows, col, cols);
    case kRaw4: return copy_elements<uint32_t>(s, row, rows, col, cols);
    default: return copy_elements<uint64_t>(s, row, rows, col, cols);
  }
}

}  // namespace lora_merge
