// The merge kernel for compute capability 9: tensor maps, and what a merge does with products.
#include <cuda.h>

#include "hopper.cuh"

namespace lora_merge {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's function, without linking the driver.
Encode find_encode() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess)
    return nullptr;
  return reinterpret_cast<Encode>(found);
}

// Boxes of 64 rows x `box_cols` columns of a matrix whose rows are runs of elements.
int encode(Encode encode_tiled, TensorMap* out, CUtensorMapDataType type, int size, int64_t address, int64_t rows,
           int64_t cols, int64_t row_stride, int box_cols, CUtensorMapSwizzle swizzle) {
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride * size)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_cols), hopper::kTileRows}, steps[2] = {1, 1};
  const CUresult result = encode_tiled(reinterpret_cast<CUtensorMap*>(out), type, 2, reinterpret_cast<void*>(address),
                                       dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Adds and rounds: the result takes W's place.
struct Merge {
  static constexpr int kBesideBox = 0;
  static constexpr bool kCopies = true;
  __device__ __forceinline__ int64_t number(const Segment&, int, int) const { return 0; }
  __device__ __forceinline__ int bytes(int) const { return 0; }
  __device__ __forceinline__ void load(uint32_t, int64_t, int, uint32_t) const {}

  template <typename T>
  struct Hand {
    struct Read {
      Packed<T> packed[4];
    };
    __device__ __forceinline__ explicit Hand(const Merge&) {}

    __device__ __forceinline__ Read read(const hopper::Box& box) const {
      Read read;
#pragma unroll
      for (int i = 0; i < 4; ++i) read.packed[i].word[0] = *box.vector_at(i);
      return read;
    }

    __device__ __forceinline__ void finish(const hopper::Box& box, const Read& read, const float (&sum)[32]) const {
      const auto added = [&](int i) {
        Eight x = unpack(read.packed[i]);
#pragma unroll
        for (int k = 0; k < 8; ++k) x.value[k] = fmaf(box.scaling, hopper::product_of(sum, i, k), x.value[k]);
        return x;
      };
      if (box.special) {
        const Segment& s = box.s;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          *box.vector_at(i) =
              round_special<T>(added(i), s, min(box.tile.row + box.row + i / 2 * 8, static_cast<int>(s.rows) - 1),
                               box.tile.col + box.col() + 8 * (i % 2), box.launch.stochastic, box.launch.seed)
                  .word[0];
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Eight x = added(i);
          Packed<T> rounded;
          round_nearest8(reinterpret_cast<T(&)[8]>(rounded), x.value);
          *box.vector_at(i) = rounded.word[0];
        }
      }
    }
  };
};

}  // namespace

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));

bool has_hopper() {
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, hopper::merge_kernel<bf16, true, Merge>) == cudaSuccess;
  if (!found) cudaGetLastError();
  return found && attributes.ptxVersion == 90;
}

int encode_maps(const Segment* segments, int n_segments, bool wide, Maps* maps) {
  static const Encode encode_tiled = find_encode();
  if (encode_tiled == nullptr) return cudaErrorNotSupported;
  for (int i = 0; i < n_segments; ++i) {
    const Segment& s = segments[i];
    const int dtype = s.dtypes & 0xff;
    if (dtype >= kRaw1) continue;
    const auto type = dtype == kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    // One row has no stride; the map still asks for a multiple of 16 bytes.
    const auto stride_of = [&](int64_t stride) { return s.rows > 1 ? stride : 64; };
    int error = encode(encode_tiled, &maps[i].source, type, 2, s.source, s.rows, s.cols, stride_of(s.source_stride[0]),
                       hopper::kBoxCols, CU_TENSOR_MAP_SWIZZLE_128B);
    if (error == cudaSuccess)
      error = encode(encode_tiled, &maps[i].destination, type, 2, s.destination, s.rows, s.cols,
                     stride_of(s.destination_stride[0]), hopper::kBoxCols, CU_TENSOR_MAP_SWIZZLE_128B);
    if (error == cudaSuccess && s.rank > 0)
      error = encode(encode_tiled, &maps[i].lora_B,
                     wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, wide ? 4 : 2, s.lora_B,
                     s.rows, s.rank, stride_of(s.lora_B_stride[0]), kChunk,
                     wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

int launch_hopper(int dtype, bool wide, const HopperLaunch& launch, void* stream) {
  return hopper::launch_in(Merge{}, dtype, wide, launch, stream);
}

}  // namespace lora_merge
