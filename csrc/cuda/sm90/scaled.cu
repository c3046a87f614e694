// Merges whose results have 8 bits, on compute capability 9: the kernel of sm90/merge.cuh, and scales as scale.cu has
// them.
//
// Sums are rounded to 16 bits in the registers of the lanes that multiply, and never leave the chip as such.
//
//   blocks             one pass. A group of warps has two boxes side by side, a block's columns, and a block's rows are
//                      two tiles: the upper one waits in its stage, as 16 bits, until both are done.
//   channels, tensors  two passes, as their scale is that of more than a block of threads has: the first one finds
//                      largest magnitudes and writes nothing else, the second one merges once more, and converts.
//
// e4m3 elements of two boxes take the place of the first one's W: a row of either is 128 bytes, and a warp's own.
#include "round.cuh"
#include "../scales.cuh"

namespace lora_merge {
namespace {

using hopper::Box;

// kScaleMeasure, kScaleConvert or kScaleWhole; Divides: as `Divisor`.
template <int Part, bool Divides = false>
struct Scale {
  [[maybe_unused]] static constexpr int kExtraBox = 0, kProducts = 1, kBoxesOut = Part == kScaleMeasure ? 0 : 2;
  [[maybe_unused]] static constexpr bool kCopies = false, kMany = false, kAhead = true, kInPairs = true;
  int group;
  __device__ __forceinline__ int64_t number(const Segment&, int, int) const { return 0; }
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void load(uint32_t, int64_t, int, uint32_t) const {}

  template <typename T>
  struct ConsumerOps {
    struct Read {
      typename hopper::Rounding<T>::Read W;
      uint32_t largest[2];  // of row and row + 8
    };
    const int group;
    uint32_t met[2] = {0, 0};  // largest magnitudes of row and row + 8, two of each
    // Of a tensor, what is known: few find more than those before them.
    uint32_t known = 0;
    int64_t of = 0;
    Divisor by[2];  // of row and row + 8, in both boxes
    int upper = -1, flip = 0;  // stage of the block's upper half; which words warps tell each other in
    __device__ __forceinline__ explicit ConsumerOps(const Scale& epilogue)
        : group(epilogue.group), by{{0, epilogue.group}, {0, epilogue.group}} {}

    __device__ __forceinline__ Read read(const Box& box) const {
      Read read{hopper::Rounding<T>::read(box), {0, 0}};
      if (Part == kScaleConvert && box.number % 2 == 0) {
        const uint32_t* const largest = reinterpret_cast<const uint32_t*>(box.s.largest);
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (group != kChannel || box.row + 8 * j < box.tile.rows)
            read.largest[j] = __ldg(largest + (group == kChannel ? box.tile.row + box.row + 8 * j : 0));
      }
      return read;
    }

    __device__ __forceinline__ void meanwhile(const Box&, const Read&) const {}

    __device__ __forceinline__ void finish(const Box& box, const Read& read, const float (&sum)[32]) {
      if constexpr (Part == kScaleConvert) {
        if (box.number % 2 == 0) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            by[j] = {__uint_as_float(read.largest[j]), group};
            const bool first = group == kChannel || box.tile.row + box.row + j == 0;
            if (box.tile.col + box.number + threadIdx.x % 4 == 0 && first && box.row + 8 * j < box.tile.rows)
              reinterpret_cast<float*>(box.s.scale)[box.tile.row + box.row + 8 * j] = by[j].scale;
          }
        }
        const auto convert = [&](auto odd) {
          hopper::Rounding<T>::finish(box, read.W, sum, [&](int i, const Packed<T>& x) {
            write<decltype(odd)::value>(box, i, x, by[i / 2]);
          });
        };
        __syncwarp();  // before others of the warp write where this lane reads
        if (by[0].odd || by[1].odd) convert(std::true_type{});  // what is rare is out of the way
        else convert(std::false_type{});
        __syncwarp();
      } else {
        if (box.number >= box.tile.boxes) return;  // nothing of it goes out
        const auto round = [&](auto cut) {
          uint32_t seen[2] = {0, 0};
          hopper::Rounding<T>::finish(box, read.W, sum, [&](int i, const Packed<T>& x) {
            seen[i / 2] = larger2<T>(seen[i / 2], largest2(decltype(cut)::value ? inside(box, i, x) : x));
            if constexpr (Part == kScaleWhole) hopper::store(box, i, x);
          });
          met[0] = larger2<T>(met[0], seen[0]), met[1] = larger2<T>(met[1], seen[1]);
        };
        const bool whole = box.tile.rows >= kTileRows && box.tile.cols >= (box.number + 1) * kBoxCols;
        if (!whole) round(std::true_type{});
        else round(std::false_type{});
      }
    }

    // What follows a tile's boxes, of all warps of a group. Whether its stage stays with them.
    __device__ __forceinline__ bool end_tile(const hopper::Block& b, int stage, int row, int fragment, int half) {
      if constexpr (Part == kScaleMeasure) measured(b.shared.tiles[stage], b, row);
      if constexpr (Part == kScaleWhole) return block_done(b, stage, row, fragment, half);
      return false;
    }

    // Whether the next tile is another group's: a block is done with its lower tile, or with the unit's last one.
    __device__ __forceinline__ bool ends_block(const hopper::Tile& tile) const {
      return Part != kScaleWhole || tile.last || tile.row / kTileRows % 2 != 0;
    }

   private:
    // Zeros in the place of what lies outside of the matrix.
    __device__ __forceinline__ Packed<T> inside(const Box& box, int i, Packed<T> x) const {
      const int left = box.row + i / 2 * 8 < box.tile.rows ? box.tile.cols - box.col(i) : 0;
      uint32_t* const pair = reinterpret_cast<uint32_t*>(x.word);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (8 * j >= left) pair[j] = 0;
      return x;
    }

    // A pair of elements is two bytes: lanes of a warp write to as many banks as they can.
    template <bool Odd>
    __device__ __forceinline__ void write(const Box& box, int i, const Packed<T>& x, const Divisor& by) const {
      uint32_t pair[4];
      divide8<Odd, Divides>(pair, unpack(x), by);
      const int second = box.number % 2;
      // Vectors are swizzled: that of the lane's first pair, and others by their bits.
      const uint32_t row = shared_address(box.W) - second * hopper::kBoxBytes + box.row * 128 +
                           threadIdx.x / 4 % 8 * 16 + threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        asm volatile("st.shared.b16 [%0], %1;" ::"r"((row ^ (second * 64 + i % 2 * 32 + j / 2 * 16)) + i / 2 * 1024 +
                                                     j % 2 * 8),
                     "h"(static_cast<uint16_t>(pair[j]))
                     : "memory");
    }

    __device__ __forceinline__ void measured(const hopper::Tile& tile, const hopper::Block& b, int row) {
      const int64_t address = b.shared.slots[tile.slot].segment().largest;
      uint32_t* const largest = reinterpret_cast<uint32_t*>(address);
      const int lane = threadIdx.x % 32;
      if (group == kChannel) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t two = met[j];
          two = larger2<T>(two, __shfl_xor_sync(~0u, two, 1));
          two = larger2<T>(two, __shfl_xor_sync(~0u, two, 2));
          const uint32_t most = float_bits<T>(larger_half(two));
          if (lane % 4 == 0 && row + 8 * j < tile.rows && most != 0) atomicMax(largest + tile.row + row + 8 * j, most);
        }
      } else {
        const uint32_t most = largest_of_warp<T>(larger2<T>(met[0], met[1]));
        if (address != of) of = address, known = 0;
        if (lane == 0 && most > known) known = max(most, atomicMax(largest, most));
      }
      met[0] = met[1] = 0;
    }

    __device__ __forceinline__ bool block_done(const hopper::Block& b, int stage, int row, int fragment, int half) {
      const hopper::Tile& tile = b.shared.tiles[stage];
      const bool lower = tile.row / kTileRows % 2 != 0;
      if (!ends_block(tile)) {
        upper = stage;
        return true;
      }
      const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, of_group = hopper::group_number();
      const uint32_t most = largest_of_warp<T>(larger2<T>(met[0], met[1]));
      met[0] = met[1] = 0;
      if (lane == 0) b.shared.met[of_group][flip][warp] = most;
      hopper::group_meets();  // and what the warps' lanes rounded is there
      const uint32_t* const all = b.shared.met[of_group][flip];
      const uint32_t largest = max(max(all[0], all[1]), max(all[2], all[3]));
      flip ^= 1;
      const Divisor by(__uint_as_float(largest), group);
      const Segment& s = b.shared.slots[tile.slot].segment();
      if (threadIdx.x % 128 == 0 && tile.cols > half * kScaledBlock)
        reinterpret_cast<float*>(s.scale)[tile.row / kScaledBlock * s.scales_across + tile.col / kScaledBlock +
                                          half] = by.scale;
      const auto convert = [&](int of) {
        if (by.odd) convert_tile<true>(b, of, row, fragment, half, by);
        else convert_tile<false>(b, of, row, fragment, half, by);
      };
      if (lower) {
        convert(upper);
        __syncwarp();
        if (lane == 0) hopper::barrier_arrive(b.done(upper));
        upper = -1;
      }
      convert(stage);
      return false;
    }

    template <bool Odd>
    __device__ __forceinline__ void convert_tile(const hopper::Block& b, int stage, int row, int fragment,
                                                 int half, const Divisor& by) const {
      const hopper::Tile& tile = b.shared.tiles[stage];
      const Segment& s = b.shared.slots[tile.slot].segment();
#pragma unroll 1
      for (int second = 0; second < 2; ++second) {
        const int number = 2 * half + second;
        const Box box{b.launch, s,   tile,     b.shared.before[stage], b.stage(stage) + number * hopper::kBoxBytes,
                      nullptr,  number, row, fragment, false,                  0};
        const auto read = hopper::Rounding<T>::read(box);
        __syncwarp();  // before others of the warp write where this lane reads
#pragma unroll
        for (int i = 0; i < 4; ++i) write<Odd>(box, i, reinterpret_cast<const Packed<T>&>(read.word[i]), by);
      }
    }
  };
};

}  // namespace

int launch_hopper_scaled(int dtype, int adapters, int group, int part, const HopperLaunch& launch, void* stream) {
  if (launch.strip_cols != 2 * kScaledBlock || launch.rows_per_unit % kScaledBlock != 0) return cudaErrorInvalidValue;
  const auto run = [&](auto scale) { return hopper::launch_in(scale, dtype, adapters, launch, stream); };
  switch (part) {
    case kScaleMeasure: return run(Scale<kScaleMeasure>{group});
    case kScaleConvert:
      return group == kChannel ? run(Scale<kScaleConvert, true>{group}) : run(Scale<kScaleConvert>{group});
    default: return run(Scale<kScaleWhole>{group});
  }
}

}  // namespace lora_merge
