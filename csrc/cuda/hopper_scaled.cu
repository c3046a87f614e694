// Results of 8 bits on compute capability 9: the walk of hopper.cuh, with what scaled.cuh makes of merged numbers.
//
// Results leave from registers: four lanes that share a row exchange their pairs, so that each has 16 columns side by
// side. Blocks that lie whole in their segment take one launch: the tiles of a unit come twice, first to find the
// largest magnitudes, which the block of threads then knows, and again to be converted; the second time W is in the L2
// cache.
#include "hopper.cuh"
#include "scaled.h"
#include "scaled_device.cuh"

namespace lora_merge {
namespace {

constexpr int kMeeting = 15;                             // a barrier of the hardware: both groups
constexpr int kUnitBlocks = kScaledRows / kScaledBlock;  // one below the other in a unit, at most
constexpr int kStripBlocks = 256 / kScaledBlock;         // side by side
constexpr int kKept = 3;                                 // units whose magnitudes are kept: see `Known`
constexpr int kBoxesOfBlock = kScaledBlock / kBoxCols;   // side by side

__device__ __forceinline__ void meet() { asm volatile("bar.sync %0, 256;" ::"n"(kMeeting) : "memory"); }

// The largest magnitudes of the blocks of a unit, in shared memory. Units take turns at three rooms: when both groups
// meet in a unit, all have left the one before it, whose room is then cleared for the one after the next.
struct Known {
  uint32_t (*const room)[kUnitBlocks * kStripBlocks];
  int unit = 0, again = 0;

  __device__ __forceinline__ Known() : room(memory()) {
    for (int i = threadIdx.x; i < kKept * kUnitBlocks * kStripBlocks; i += 256) room[0][i] = 0;
    meet();
  }
  static __device__ __forceinline__ auto memory() -> uint32_t (*)[kUnitBlocks * kStripBlocks] {
    __shared__ uint32_t rooms[kKept][kUnitBlocks * kStripBlocks];
    return rooms;
  }
  // A tile comes, for the first time or again.
  __device__ __forceinline__ void come(int now) {
    if (now == again) return;
    again = now;
    if (now == 0) {
      unit = (unit + 1) % kKept;
      return;
    }
    meet();
    const int other = (unit + 2) % kKept, i = threadIdx.x;
    if (i < kUnitBlocks * kStripBlocks) room[other][i] = 0;
  }
  __device__ __forceinline__ uint32_t& of(const hopper::Box& box) const {
    return room[unit][box.tile.row / kScaledBlock % kUnitBlocks * kStripBlocks + box.number / kBoxesOfBlock];
  }
};
struct Nothing {};

template <int Part>
struct Scale {
  static constexpr bool kCopies = false, kMany = false, kStores = false, kTwice = Part == kScaledWhole;
  static constexpr int kProducts = 1, kBesideBox = kScaledBeside;  // leaves room for what is known of blocks
  __device__ __forceinline__ int64_t number(const Segment&, int, int) const { return 0; }
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void load(uint32_t, int64_t, int, uint32_t) const {}

  template <typename T>
  struct Hand {
    struct Read {
      uint32_t word[4][4];
      uint32_t largest[2];  // of this lane's rows
    };
    std::conditional_t<kTwice, Known, Nothing> known;
    uint32_t* whose = nullptr;  // of a group that reaches over tiles, and what was found of it
    uint32_t largest = 0;

    __device__ __forceinline__ explicit Hand(const Scale&) {}
    __device__ __forceinline__ ~Hand() {
      if constexpr (Part == kScaledMeasure) tell();
    }

    __device__ __forceinline__ Read read(const hopper::Box& box) const {
      Read read;
#pragma unroll
      for (int i = 0; i < 4; ++i) box.load(i, read.word[i]);
      if constexpr (Part == kScaledConvert) {
        const Grid grid(box.s);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = min(box.tile.row + box.row + 8 * j, static_cast<int>(box.s.rows) - 1);
          const int col = min(box.tile.col + box.number * kBoxCols, static_cast<int>(box.s.cols) - 1);
          read.largest[j] = __ldg(grid.largest + grid.group(row, col));
        }
      }
      return read;
    }

    __device__ __forceinline__ void meanwhile(const hopper::Box&, const Read&) const {}

    __device__ __forceinline__ void finish(const hopper::Box& box, const Read& read, const float (&sum)[32]) {
      if constexpr (kTwice) known.come(static_cast<int>(box.tile.number));
      if (box.number >= box.tile.boxes) return;
      Packed<T> x[4];
      merge(x, box, read, sum);
      if constexpr (Part == kScaledMeasure) {
        measure(box, x);
      } else if constexpr (Part == kScaledConvert) {
        const Grid grid(box.s);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const Divisor by(__uint_as_float(read.largest[j]), grid.kind);
          const int row = box.tile.row + box.row + 8 * j, col = box.tile.col + box.number * kBoxCols;
          const bool first = grid.kind == kBlock ? col % kScaledBlock == 0 : col == 0;
          if (first && threadIdx.x % 4 == 0 && row < box.s.rows) grid.scale[grid.group(row, col)] = by.scale;
          store(box, j, x[2 * j], x[2 * j + 1], by);
        }
      } else if (box.tile.number == 0) {
        const uint32_t found = __reduce_max_sync(
            ~0u, larger_half(larger2(larger2(largest2(x[0]), largest2(x[1])), larger2(largest2(x[2]), largest2(x[3])))));
        if (threadIdx.x % 32 == 0) atomicMax(&known.of(box), found);
      } else {
        const Divisor by(__uint_as_float(float_bits<T>(known.of(box))), kBlock);
        if (threadIdx.x % 128 == 0 && box.number % kBoxesOfBlock == 0 && box.tile.row % kScaledBlock == 0) {
          const Grid grid(box.s);
          grid.scale[grid.group(box.tile.row, box.tile.col + box.number * kBoxCols)] = by.scale;
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) store(box, j, x[2 * j], x[2 * j + 1], by);
      }
    }

   private:
    // What the merge kernel writes; zeros outside.
    __device__ __forceinline__ void merge(Packed<T> (&out)[4], const hopper::Box& box, const Read& read,
                                          const float (&sum)[32]) const {
      const float scaling = box.tile.scaling;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Eight x = unpack(reinterpret_cast<const Packed<T>&>(read.word[i]));
#pragma unroll
        for (int k = 0; k < 8; ++k) x.value[k] = fmaf(scaling, hopper::product_of(sum, i, k), x.value[k]);
        if (box.special) {
          const int row = min(box.tile.row + box.row + i / 2 * 8, static_cast<int>(box.s.rows) - 1);
          out[i] = round_special<T>(x, box.s, row, box.tile.col + box.col(i), 8, box.launch.stochastic, box.launch.seed);
        } else {
          round_nearest8(reinterpret_cast<T(&)[8]>(out[i]), x.value);
        }
      }
    }

    __device__ __forceinline__ void measure(const hopper::Box& box, const Packed<T> (&x)[4]) {
      const Grid grid(box.s);
      uint32_t found[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) found[j] = larger2(largest2(x[2 * j]), largest2(x[2 * j + 1]));
      if (grid.kind == kTensor) {
        if (whose != grid.largest) tell();
        whose = grid.largest;
        largest = larger2(largest, larger2(found[0], found[1]));
        return;
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) found[j] = larger2(found[j], __shfl_xor_sync(~0u, found[j], mask));
        const int row = box.tile.row + box.row + 8 * j;
        if (threadIdx.x % 4 == 0 && row < box.s.rows)
          atomicMax(grid.largest + grid.group(row, box.tile.col + box.number * kBoxCols),
                    float_bits<T>(larger_half(found[j])));
      }
    }

    // All lanes of a warp together.
    __device__ __forceinline__ void tell() {
      const uint32_t found = __reduce_max_sync(~0u, larger_half(largest));
      if (whose != nullptr && threadIdx.x % 32 == 0) atomicMax(whose, float_bits<T>(found));
      largest = 0;
    }

    // One of this lane's rows: 32 columns of each run, of which it has every fourth pair.
    __device__ __forceinline__ void store(const hopper::Box& box, int j, const Packed<T>& low, const Packed<T>& high,
                                          const Divisor& by) const {
      const int quad = threadIdx.x % 4;
      uint32_t pair[8];
      convert8(reinterpret_cast<uint32_t(&)[4]>(pair[0]), low, by);
      convert8(reinterpret_cast<uint32_t(&)[4]>(pair[4]), high, by);
      // Words of two pairs, eight columns apart: word w of lane q goes to lane w, as its word q.
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = pair[2 * w] | pair[2 * w + 1] << 16;
      const bool odd = quad & 1, upper = quad & 2;
#pragma unroll
      for (int w = 0; w < 4; w += 2) {
        const uint32_t got = __shfl_xor_sync(~0u, odd ? word[w] : word[w + 1], 1);
        (odd ? word[w] : word[w + 1]) = got;
      }
#pragma unroll
      for (int w = 0; w < 2; ++w) {
        const uint32_t got = __shfl_xor_sync(~0u, upper ? word[w] : word[w + 2], 2);
        (upper ? word[w] : word[w + 2]) = got;
      }
      const Segment& s = box.s;
      const int row = box.tile.row + box.row + 8 * j, col = box.tile.col + box.number * kBoxCols + 16 * quad;
      if (row >= s.rows || col >= s.cols) return;
      const uint4 bytes = make_uint4(__byte_perm(word[0], word[1], 0x5410), __byte_perm(word[2], word[3], 0x5410),
                                     __byte_perm(word[0], word[1], 0x7632), __byte_perm(word[2], word[3], 0x7632));
      uint8_t* const to = reinterpret_cast<uint8_t*>(s.destination) + row * s.destination_stride[0] + col;
      if (col + 16 <= s.cols) {
        __stcs(reinterpret_cast<uint4*>(to), bytes);
        return;
      }
      const uint32_t all[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
      for (int i = 0; i < 16; ++i)
        if (col + i < s.cols) to[i] = static_cast<uint8_t>(all[i / 4] >> (8 * (i % 4)));
    }
  };
};

}  // namespace

int launch_hopper_scaled(int dtype, int adapters, int part, const HopperLaunch& launch, void* stream) {
  if (part == kScaledWhole &&
      (launch.rows_per_unit % kScaledBlock != 0 || launch.rows_per_unit > kScaledRows))
    return cudaErrorInvalidConfiguration;
  switch (part) {
    case kScaledMeasure: return hopper::launch_in(Scale<kScaledMeasure>{}, dtype, adapters, launch, stream);
    case kScaledConvert: return hopper::launch_in(Scale<kScaledConvert>{}, dtype, adapters, launch, stream);
    default: return hopper::launch_in(Scale<kScaledWhole>{}, dtype, adapters, launch, stream);
  }
}

}  // namespace lora_merge
