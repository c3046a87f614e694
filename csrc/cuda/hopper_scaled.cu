// Merges whose results have 8 bits, on compute capability 9: the walk of hopper.cuh, and scales as scale.cu has them.
//
// Sums are rounded to 16 bits in the registers of the lanes that multiply, and never leave the chip as such.
//
//   blocks             one pass. A group of warps has two boxes side by side, a block's columns, and a block's rows are
//                      two tiles: the upper one waits in its stage, as 16 bits, until both are done.
//   channels, tensors  two passes, as their scale is that of more than a block of threads has: the first one finds
//                      largest magnitudes and writes nothing else, the second one merges once more, and converts.
//
// e4m3 elements of two boxes take the place of the first one's W: a row of either is 128 bytes, and a warp's own.
#include "hopper_round.cuh"
#include "scales.cuh"

namespace lora_merge {
namespace {

using hopper::Box;

template <int Part>
struct Scale {
  static constexpr int kBesideBox = 0, kProducts = 1, kBoxesOut = Part == kScaleMeasure ? 0 : 2;
  static constexpr bool kCopies = false, kMany = false, kInPairs = true;
  int group;
  __device__ __forceinline__ int64_t number(const Segment&, int, int) const { return 0; }
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void load(uint32_t, int64_t, int, uint32_t) const {}

  template <typename T>
  struct Hand {
    struct Read {
      typename hopper::Rounding<T>::Read W;
      uint32_t largest[2];  // of row and row + 8
    };
    const int group;
    uint32_t met[2] = {0, 0};  // largest magnitudes of row and row + 8, two of each
    // Of a tensor, what is known: few find more than those before them.
    uint32_t known = 0;
    int64_t of = 0;
    int upper = -1, flip = 0;  // stage of the block's upper half; which words warps tell each other in
    __device__ __forceinline__ explicit Hand(const Scale& way) : group(way.group) {}

    __device__ __forceinline__ Read read(const Box& box) const {
      Read read{hopper::Rounding<T>::read(box), {0, 0}};
      if constexpr (Part == kScaleConvert) {
        const uint32_t* const largest = reinterpret_cast<const uint32_t*>(box.s.largest);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (box.row + 8 * j < box.tile.rows)
            read.largest[j] = __ldg(largest + (group == kChannel ? box.tile.row + box.row + 8 * j : 0));
      }
      return read;
    }

    __device__ __forceinline__ void meanwhile(const Box&, const Read&) const {}

    __device__ __forceinline__ void finish(const Box& box, const Read& read, const float (&sum)[32]) {
      if constexpr (Part == kScaleConvert) {
        const Divisor by[2] = {{__uint_as_float(read.largest[0]), group}, {__uint_as_float(read.largest[1]), group}};
        if (box.tile.col + box.number == 0 && threadIdx.x % 4 == 0 && (group == kChannel || box.tile.row + box.row == 0))
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (box.row + 8 * j < box.tile.rows && (group == kChannel || j == 0))
              reinterpret_cast<float*>(box.s.scale)[box.tile.row + box.row + 8 * j] = by[j].scale;
        hopper::Rounding<T>::finish(box, read.W, sum,
                                    [&](int i, const Packed<T>& x) { write(box, i, x, by[i / 2]); });
      } else {
        const bool there = box.number < box.tile.boxes;
        const bool whole = box.tile.rows >= kTileRows && box.tile.cols >= (box.number + 1) * kBoxCols;
        hopper::Rounding<T>::finish(box, read.W, sum, [&](int i, const Packed<T>& x) {
          if (there) note(box, i, x, whole);
          if constexpr (Part == kScaleWhole) hopper::store(box, i, x);
        });
      }
    }

    // What follows a tile's boxes, of all warps of a group. Whether its stage stays with them.
    __device__ __forceinline__ bool end_tile(const hopper::Block& b, int stage, int row, int fragment) {
      if constexpr (Part == kScaleMeasure) measured(b.shared.tiles[stage], b, row);
      if constexpr (Part == kScaleWhole) return block_done(b, stage, row, fragment);
      return false;
    }

   private:
    __device__ __forceinline__ void note(const Box& box, int i, Packed<T> x, bool whole) {
      if (!whole) {
        const int left = box.row + i / 2 * 8 < box.tile.rows ? box.tile.cols - box.col(i) : 0;
        uint32_t* const pair = reinterpret_cast<uint32_t*>(x.word);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (8 * j >= left) pair[j] = 0;
      }
      met[i / 2] = __vmaxu2(met[i / 2], largest2(x));
    }

    // A pair of elements is two bytes: lanes of a warp write to as many banks as they can.
    __device__ __forceinline__ void write(const Box& box, int i, const Packed<T>& x, const Divisor& by) const {
      uint32_t pair[4];
      if (by.odd) divide8<true>(pair, unpack(x), by);
      else divide8<false>(pair, unpack(x), by);
      const int row = box.row + i / 2 * 8, second = box.number % 2, lane = threadIdx.x;
      char* const to = box.W - second * hopper::kBoxBytes + row * 128 + lane % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        *reinterpret_cast<uint16_t*>(to + ((second * 4 + i % 2 * 2 + j / 2) ^ row % 8) * 16 + j % 2 * 8) =
            static_cast<uint16_t>(pair[j]);
    }

    __device__ __forceinline__ void measured(const hopper::Tile& tile, const hopper::Block& b, int row) {
      const int64_t address = b.shared.slots[tile.slot].segment().largest;
      uint32_t* const largest = reinterpret_cast<uint32_t*>(address);
      const int lane = threadIdx.x % 32;
      if (group == kChannel) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t two = met[j];
          two = __vmaxu2(two, __shfl_xor_sync(~0u, two, 1));
          two = __vmaxu2(two, __shfl_xor_sync(~0u, two, 2));
          const uint32_t most = float_bits<T>(max(two & 0xffff, two >> 16));
          if (lane % 4 == 0 && row + 8 * j < tile.rows && most != 0) atomicMax(largest + tile.row + row + 8 * j, most);
        }
      } else {
        const uint32_t most = largest_of_warp<T>(__vmaxu2(met[0], met[1]));
        if (address != of) of = address, known = 0;
        if (lane == 0 && most > known) known = max(most, atomicMax(largest, most));
      }
      met[0] = met[1] = 0;
    }

    // A block is done with its lower tile, or with the unit's last one.
    __device__ __forceinline__ bool block_done(const hopper::Block& b, int stage, int row, int fragment) {
      const hopper::Tile& tile = b.shared.tiles[stage];
      const bool lower = tile.row / kTileRows % 2 != 0;
      if (!lower && !tile.last) {
        upper = stage;
        return true;
      }
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, of_group = hopper::group_number();
      const uint32_t most = largest_of_warp<T>(__vmaxu2(met[0], met[1]));
      met[0] = met[1] = 0;
      if (lane == 0) b.shared.met[of_group][flip][warp] = most;
      hopper::group_meets();  // and what the warps' lanes rounded is there
      const uint32_t* const all = b.shared.met[of_group][flip];
      const uint32_t largest = max(max(all[0], all[1]), max(all[2], all[3]));
      flip ^= 1;
      const Divisor by(__uint_as_float(largest), group);
      const Segment& s = b.shared.slots[tile.slot].segment();
      if (threadIdx.x % 128 == 0 && tile.cols > of_group * kScaledBlock)
        reinterpret_cast<float*>(s.scale)[tile.row / kScaledBlock * s.scales_across + tile.col / kScaledBlock +
                                          of_group] = by.scale;
      if (lower) {
        convert_tile(b, upper, row, fragment, by);
        __syncwarp();
        if (lane == 0) hopper::barrier_arrive(b.done(upper));
        upper = -1;
      }
      convert_tile(b, stage, row, fragment, by);
      return false;
    }

    __device__ __forceinline__ void convert_tile(const hopper::Block& b, int stage, int row, int fragment,
                                                 const Divisor& by) const {
      const hopper::Tile& tile = b.shared.tiles[stage];
      const Segment& s = b.shared.slots[tile.slot].segment();
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        const int number = 2 * hopper::group_number() + second;
        const Box box{b.launch, s,   tile,     b.shared.before[stage], b.stage(stage) + number * hopper::kBoxBytes,
                      nullptr,  number, row, fragment, false,                  0};
        const auto read = hopper::Rounding<T>::read(box);
        __syncwarp();  // before others of the warp write where this lane reads
#pragma unroll
        for (int i = 0; i < 4; ++i) write(box, i, reinterpret_cast<const Packed<T>&>(read.word[i]), by);
      }
    }
  };
};

}  // namespace

int launch_hopper_scaled(int dtype, int adapters, int group, int part, const HopperLaunch& launch, void* stream) {
  if (launch.strip_cols != 2 * kScaledBlock || launch.rows_per_unit % kScaledBlock != 0) return cudaErrorInvalidValue;
  const auto run = [&](auto way) { return hopper::launch_in(way, dtype, adapters, launch, stream); };
  switch (part) {
    case kScaleMeasure: return run(Scale<kScaleMeasure>{group});
    case kScaleConvert: return run(Scale<kScaleConvert>{group});
    default: return run(Scale<kScaleWhole>{group});
  }
}

}  // namespace lora_merge
