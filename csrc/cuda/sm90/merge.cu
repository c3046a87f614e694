// The merge kernel for compute capability 9: tensor maps, and what a merge does with products.
#include "../driver.h"
#include "round.cuh"

namespace lora_merge {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// Of a matrix whose rows are runs of elements of `size` bytes. `dims`, strides and the box: along the columns first;
// strides in elements, without the columns' own.
template <int Dims>
int encode(Encode encode_tiled, TensorMap* out, CUtensorMapDataType type, int size, int64_t address,
           const int64_t (&dims)[Dims], const int64_t (&strides)[Dims - 1], const int (&box)[Dims],
           CUtensorMapSwizzle swizzle) {
  cuuint64_t dim[Dims], stride[Dims - 1];
  cuuint32_t of_box[Dims], steps[Dims];
  for (int i = 0; i < Dims; ++i) dim[i] = dims[i], of_box[i] = box[i], steps[i] = 1;
  for (int i = 0; i < Dims - 1; ++i) stride[i] = strides[i] * size;
  const CUresult result = encode_tiled(
      reinterpret_cast<CUtensorMap*>(out), type, Dims, reinterpret_cast<void*>(address), dim, stride, of_box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Adds and rounds: the result takes W's place.
struct Merge {
  static constexpr int kExtraBox = 0, kProducts = 1, kBoxesOut = 1;
  static constexpr bool kCopies = true, kMany = false, kAhead = false, kInPairs = false;
  __device__ __forceinline__ int64_t number(const Segment&, int, int) const { return 0; }
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void load(uint32_t, int64_t, int, uint32_t) const {}

  template <typename T>
  struct ConsumerOps : hopper::Rounding<T> {
    using typename hopper::Rounding<T>::Read;
    __device__ __forceinline__ explicit ConsumerOps(const Merge&) {}
    __device__ __forceinline__ void meanwhile(const hopper::Box&, const Read&) const {}
    __device__ __forceinline__ void finish(const hopper::Box& box, const Read& read, const float (&sum)[32]) const {
      hopper::Rounding<T>::finish(box, read, sum, [&](int i, const Packed<T>& x) { hopper::store(box, i, x); });
    }
  };
};

}  // namespace

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));

int encode_maps(const Segment* segments, int n_segments, int adapters, Maps* maps) {
  static const Encode encode_tiled = of_driver<Encode>("cuTensorMapEncodeTiled");
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  for (int i = 0; i < n_segments; ++i) {
    const Segment& s = segments[i];
    const int dtype = s.dtypes & 0xff;
    if (dtype >= kRaw1) continue;
    constexpr auto kBits = CU_TENSOR_MAP_DATA_TYPE_UINT16;  // copies of bf16 and fp16 move bits
    constexpr auto kFloats = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    constexpr auto kPlain = CU_TENSOR_MAP_SWIZZLE_NONE, kSwizzled = CU_TENSOR_MAP_SWIZZLE_128B;
    // One row has no stride; the map still asks for a multiple of 16 bytes.
    const auto stride_of = [&](int64_t stride) { return s.rows > 1 ? stride : 64; };
    const auto rows_of = [&](TensorMap* map, CUtensorMapDataType type, int size, int64_t address, int64_t cols,
                             int64_t stride, int box_cols, CUtensorMapSwizzle swizzle) {
      return encode<2>(encode_tiled, map, type, size, address, {cols, s.rows}, {stride_of(stride)},
                       {box_cols, kTileRows}, swizzle);
    };
    // Results of 8 bits: their rows of 128 bytes are those of two boxes.
    const auto result = [&] {
      if (s.scale == 0)
        return rows_of(&maps[i].destination, kBits, 2, s.destination, s.cols, s.destination_stride[0], kBoxCols,
                       kSwizzled);
      return rows_of(&maps[i].destination, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, s.destination, s.cols,
                     s.destination_stride[0], 2 * kBoxCols, kSwizzled);
    };
    // Ranks of lora_A in the order of `rank_at`, 8q + 4h + 2u + e as e, q, u, h; of pairs h and u in one. Of float32
    // ones that are split in shared memory, in their own order.
    const auto adapter = [&] {
      const int64_t a = s.lora_A_stride[0], b = s.lora_B_stride[0];
      int error = cudaSuccess;
      if (adapters == kPairs) {
        const int64_t ranks = ranks_of_parts(s.rank), pitch = pitch_of_A(s.cols);
        error = encode<3>(encode_tiled, &maps[i].lora_B, kBits, 2, s.parts_B, {ranks, s.rows, 2},
                          {ranks, plane_of_B(s.rows, s.rank)}, {kChunk, kTileRows, 2}, kPlain);
        if (error != cudaSuccess) return error;
        return encode<5>(encode_tiled, &maps[i].lora_A, kBits, 2, s.parts_A, {s.cols, 2, ranks / 8, 4, 2},
                         {pitch, 8 * pitch, 2 * pitch, plane_of_A(s.cols, s.rank)}, {kBoxCols, 2, kChunk / 8, 4, 2},
                         kSwizzled);
      }
      if (adapters == kFloat32) {
        error = rows_of(&maps[i].lora_B, kFloats, 4, s.lora_B, s.rank, b, kChunk, kSwizzled);
        if (error != cudaSuccess) return error;
        return encode<2>(encode_tiled, &maps[i].lora_A, kFloats, 4, s.lora_A, {s.cols, s.rank}, {s.rank > 1 ? a : 64},
                         {kBoxCols, kChunk}, kPlain);
      }
      error = rows_of(&maps[i].lora_B, kBits, 2, s.lora_B, s.rank, b, kChunk, kPlain);
      if (error != cudaSuccess) return error;
      return encode<5>(encode_tiled, &maps[i].lora_A, kBits, 2, s.lora_A, {s.cols, 2, s.rank / 8, 2, 2},
                       {a, 8 * a, 2 * a, 4 * a}, {kBoxCols, 2, kChunk / 8, 2, 2}, kSwizzled);
    };
    int error = rows_of(&maps[i].source, kBits, 2, s.source, s.cols, s.source_stride[0], kBoxCols, kSwizzled);
    if (error == cudaSuccess) error = result();
    if (error == cudaSuccess) error = adapter();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int launch_hopper(int dtype, int adapters, const HopperLaunch& launch, void* stream) {
  return hopper::launch_in(Merge{}, dtype, adapters, launch, stream);
}

}  // namespace lora_merge
