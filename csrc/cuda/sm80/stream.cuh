// W and B on their way from memory to the stages of a warp.
#pragma once
#include "../adapters.cuh"
#include "../tiles.cuh"

namespace lora_merge {

// The steps that a warp has in a unit, as its lanes load them. Full ones of aligned segments are staged.
template <int Products>
struct Feed {
  int n, steps_left, staged_left;  // in this block's n-th unit
  int ranks_B;                     // of B to stage; 0 where B is not staged
  const char* from_W;
  const char* from_B[Products];
  int64_t second_B[Products];                   // bytes to the other 16 of eight ranks
  int pitch_W, advance_W, advance_B[Products];  // bytes to the next row, and to the next step
};

template <typename Source, typename Destination>
__device__ __forceinline__ int staged_steps(const Segment& s, const Walk& walk) {
  const bool aligned = aligned16(s.source, s.source_stride, sizeof(Source)) &&
                       aligned16(s.destination, s.destination_stride, sizeof(Destination));
  return aligned ? walk.full_steps : 0;
}

// Whether B of a segment, or of both of it, is staged.
template <typename Adapter, int Products>
__device__ __forceinline__ bool stages_B(const Launch& launch, int segment) {
  bool all = launch.staged_B;
#pragma unroll
  for (int p = 0; p < Products; ++p)
    all = all && vector_B<Adapter>(segments_of(launch)[row_of<Products>(launch, segment, p)]);
  return all;
}

// The n-th unit of this block. A call: it is rare, and takes registers.
template <typename Source, typename Destination, typename Adapter, int Products>
__device__ __noinline__ Feed<Products> open_unit(const Launch& launch, int n, int unit) {
  Feed<Products> feed{};
  feed.n = n;
  if (unit < launch.n_units) {
    const int segment = segment_of(launch, unit);
    const Segment& s = segments_of(launch)[segment];
    const Walk walk(launch, s, unit);
    const int lane = threadIdx.x % 32, stride = Walk::row_stride(launch), first_col = walk.col - lane / 4 * 8;
    feed.steps_left = walk.steps;
    feed.staged_left = staged_steps<Source, Destination>(s, walk);
    feed.ranks_B = stages_B<Adapter, Products>(launch, segment) ? s.rank : 0;
    const int64_t pitch_W = s.source_stride[0] * static_cast<int64_t>(sizeof(Source));
    feed.pitch_W = pitch_W;
    feed.advance_W = stride * pitch_W;
    feed.from_W = reinterpret_cast<const char*>(s.source) + (walk.first_row + lane / Stage<Source>::kAcross) * pitch_W +
                  first_col * static_cast<int64_t>(sizeof(Source)) + lane % Stage<Source>::kAcross * 16;
#pragma unroll
    for (int p = 0; p < Products; ++p) {
      const Segment& of = segments_of(launch)[row_of<Products>(launch, segment, p)];
      const int64_t pitch_B =
          kPaired<Adapter> ? ranks_of_parts(of.rank) * 2 : of.lora_B_stride[0] * (kWide<Adapter> ? 4 : 2);
      feed.advance_B[p] = stride * pitch_B;
      feed.second_B[p] = kPaired<Adapter> ? plane_of_B(of.rows, of.rank) * 2 : 16;
      feed.from_B[p] = reinterpret_cast<const char*>(kPaired<Adapter> ? of.parts_B : of.lora_B) +
                       (walk.first_row + lane / 4) * pitch_B + lane % 4 * (kWide<Adapter> ? 32 : 16);
    }
  }
  return feed;
}

// Shared memory of a step: a stage for each warp, which holds W and then the result, and pieces of B for each lane.
template <typename Source, typename Destination>
constexpr uint32_t kStageBytes =
    kStepRows * 64 * (sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination));

template <typename Source, typename Destination, typename Adapter>
__host__ __device__ __forceinline__ uint32_t slot_bytes_of(const Launch& launch) {
  constexpr int kBytes = sizeof(Source) > sizeof(Destination) ? sizeof(Source) : sizeof(Destination);
  static_assert(kWarps * kStageBytes<Source, Destination> == kBytes * kVector);
  return slot_bytes(kBytes, kPlanes<Adapter>, launch.staged_B, launch.max_rank);
}

// How many steps are in flight: known to the compiler in the mode for one chunk of the rank.
template <bool OneChunk>
__device__ __forceinline__ int stages_of(const Launch& launch) {
  return OneChunk ? kNarrow32Stages : launch.stages;
}

// W and B on their way to shared memory: one step after the other, across units, `stages` steps ahead of their use.
template <typename Source, typename Destination, typename Adapter, bool OneChunk, int Products = 1>
struct Stream {
  using S = Stage<Source>;
  const Launch& launch;
  const Units& units;
  const uint32_t pieces, slot_bytes;  // this lane's pieces in slot 0
  uint32_t vectors[S::kLaneVectors];  // where this lane's vectors of W go in slot 0
  uint32_t slot = 0;
  Feed<Products> feed;

  __device__ __forceinline__ Stream(const Launch& l, const Units& u, const void* memory)
      : launch(l),
        units(u),
        pieces(shared_address(memory) + kWarps * kStageBytes<Source, Destination> + threadIdx.x * 16),
        slot_bytes(slot_bytes_of<Source, Destination, Adapter>(l)),
        feed(open_unit<Source, Destination, Adapter, Products>(l, 0, u[0])) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < S::kLaneVectors; ++i)
      vectors[i] = shared_address(memory) + threadIdx.x / 32 * kStageBytes<Source, Destination> +
                   S::place(lane / S::kAcross + i * S::kRowStep, lane % S::kAcross);
#pragma unroll 1
    for (int i = 0; i < stages_of<OneChunk>(launch); ++i) push();
  }

  // Asks for the next step. A group is committed in any case, so that groups count steps.
  __device__ __forceinline__ void push() {
    if (feed.staged_left > 0) {
#pragma unroll
      for (int i = 0; i < S::kLaneVectors; ++i)
        copy_async16(vectors[i] + slot, feed.from_W + i * S::kRowStep * feed.pitch_W);
      const int k = threadIdx.x % 4 * 8;
      if constexpr (OneChunk) {
        if (k < feed.ranks_B) copy_async16_shared(pieces + slot, feed.from_B[0]);
      } else {
#pragma unroll
        for (int p = 0; p < Products; ++p) {
          uint32_t to = pieces + slot + p * (up_to_chunk(feed.ranks_B) / kChunk * kPieces<Adapter> * kVector);
          for (int c = 0; k + c < feed.ranks_B; c += kChunk)
#pragma unroll
            for (int i = 0; i < kPieces<Adapter>; ++i, to += kVector)
              copy_async16_shared(to, feed.from_B[p] + c * (kWide<Adapter> ? 4 : 2) + i * feed.second_B[p]);
        }
      }
    }
    commit_async();
    feed.from_W += feed.advance_W;
#pragma unroll
    for (int p = 0; p < Products; ++p) feed.from_B[p] += feed.advance_B[p];
    slot = slot + slot_bytes == stages_of<OneChunk>(launch) * slot_bytes ? 0 : slot + slot_bytes;
    --feed.staged_left;
    if (--feed.steps_left == 0)
      feed = open_unit<Source, Destination, Adapter, Products>(launch, feed.n + 1, units[feed.n + 1]);
  }
};

}  // namespace lora_merge
