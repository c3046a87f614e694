// What the kernels share: number formats, rounding, matrix instructions, asynchronous copies.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "launch.h"

namespace lora_merge {

using bf16 = __nv_bfloat16;

// What products are made of: bf16 or fp16, as both halves of an adapter are; for any others float32, which is split
// here into three bf16 parts, or, where weights and results have 16 bits, pairs of fp16 that were made of them before
// (parts.h).
struct Pair {};
template <typename Adapter>
constexpr bool kWide = std::is_same_v<Adapter, float>;
template <typename Adapter>
constexpr bool kPaired = std::is_same_v<Adapter, Pair>;
template <typename Adapter>
constexpr int kPlanes = kWide<Adapter>     ? 3
                        : kPaired<Adapter> ? 2
                                           : 1;
template <typename Adapter>
constexpr int kPieces = kPlanes<Adapter> > 1 ? 2 : 1;  // 16-byte vectors of eight ranks of lora_B
template <typename Adapter>
constexpr bool kOfHalf = kPaired<Adapter> || std::is_same_v<Adapter, __half>;  // the matrix unit multiplies fp16
template <typename Adapter>
constexpr int kCodeOf = kWide<Adapter>                  ? kFloat32
                        : std::is_same_v<Adapter, bf16> ? kBFloat16
                                                        : kFloat16;

// ---- formats -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

// The low 16 bits of a word, bf16 or fp16.
__device__ __forceinline__ float half_as_float(uint32_t word, int dtype) {
  return dtype == kBFloat16 ? __uint_as_float(word << 16)
                            : __half2float(__ushort_as_half(static_cast<unsigned short>(word)));
}

// Element `index` of an adapter half whose dtype is known at run time only.
__device__ __forceinline__ float load_as_float(int64_t address, int64_t index, int dtype) {
  if (dtype == kFloat32) return __ldg(reinterpret_cast<const float*>(address) + index);
  return half_as_float(__ldg(reinterpret_cast<const unsigned short*>(address) + index), dtype);
}

template <typename T>
__device__ __forceinline__ T round_nearest(float x);
template <>
__device__ __forceinline__ float round_nearest<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ bf16 round_nearest<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half round_nearest<__half>(float x) {
  return __float2half_rn(x);
}

__device__ __forceinline__ void round_nearest8(float (&out)[8], const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] = x[i];
}
__device__ __forceinline__ void round_nearest8(bf16 (&out)[8], const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<__nv_bfloat162*>(out)[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
}
__device__ __forceinline__ void round_nearest8(__half (&out)[8], const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) reinterpret_cast<__half2*>(out)[i] = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
}

// Stochastic rounding: as many random bits as fall off are added before cutting (reference.round_stochastic). Where
// nearest rounding gives infinity, it gives infinity, and nowhere else.
template <typename T>
__device__ __forceinline__ T round_stochastic(float x, uint32_t bits);
template <>
__device__ __forceinline__ float round_stochastic<float>(float x, uint32_t) {
  return x;
}
template <>
__device__ __forceinline__ bf16 round_stochastic<bf16>(float x, uint32_t bits) {
  const uint32_t word = __float_as_uint(x), size = word & 0x7fffffff;
  if (size >= 0x7f7f8000) return __float2bfloat16_rn(x);  // infinity or NaN
  const uint32_t half = min((size + (bits >> 16)) >> 16, 0x7f7fu);
  return __ushort_as_bfloat16(static_cast<unsigned short>(half | (word >> 31 << 15)));
}
template <>
__device__ __forceinline__ __half round_stochastic<__half>(float x, uint32_t bits) {
  const uint32_t word = __float_as_uint(x), exponent = (word >> 23) & 0xff, fraction = word & 0x7fffff;
  if ((word & 0x7fffffff) >= 0x477ff000) return __float2half_rn(x);  // infinity or NaN
  const uint32_t significand = exponent > 0 ? fraction | 0x800000 : fraction;
  const uint32_t falls = 13 + (exponent < 113 ? 113 - exponent : 0), shift = min(falls, 31u);
  // Where more than 31 bits fall off, the first of them are cut: the probability is a multiple of 2^-31.
  const uint32_t known = significand >> min(falls - shift, 31u);
  uint32_t half = (known + (bits & ((1u << shift) - 1))) >> shift;
  if (exponent >= 113) half += (exponent - 113) << 10;
  return __ushort_as_half(static_cast<unsigned short>(min(half, 0x7bffu) | (word >> 31 << 15)));
}

// Two float32 as sums of three bf16 each (3 x 8 significant bits hold all 24): one word for each of the three parts,
// the low half is x's. In pairs, because a conversion of one number takes the slow unit of the multiprocessor.
__device__ __forceinline__ void split3(float x, float y, uint32_t (&part)[3]) {
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    const __nv_bfloat162 rounded = __floats2bfloat162_rn(x, y);
    part[p] = reinterpret_cast<const uint32_t&>(rounded);
    x -= __uint_as_float(part[p] << 16);
    y -= __uint_as_float(part[p] & 0xffff0000u);
  }
}

// Two numbers that the format holds, or is cut to, in a word; the low half is x's.
template <typename T>
__device__ __forceinline__ uint32_t pack2(float x, float y) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

// ---- matrix instructions (sm_80 and later) -------------------------------------------------------------------------

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Products of bf16, or of fp16.
template <typename Adapter>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kOfHalf<Adapter>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// ---- asynchronous copies -------------------------------------------------------------------------------------------

__device__ __forceinline__ void copy_async16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
// The same through L1, for what several warps of a block read.
__device__ __forceinline__ void copy_async16_shared(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global));
}
__device__ __forceinline__ void commit_async() { asm volatile("cp.async.commit_group;"); }
// Waits until at most `Pending` groups of this thread are in flight; where that is -1, at most `pending` (0 to 7).
template <int Pending>
__device__ __forceinline__ void wait_async_all_but(int pending) {
  if constexpr (Pending >= 0) {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
    return;
  }
  switch (pending) {
    case 7: asm volatile("cp.async.wait_group 7;" ::: "memory"); return;
    case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); return;
    case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); return;
    case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); return;
    case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); return;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); return;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); return;
    default: asm volatile("cp.async.wait_group 0;" ::: "memory"); return;
  }
}

// ---- launching -----------------------------------------------------------------------------------------------------

// `run` with a value of the type that a code stands for.
template <typename Run>
int with_dtype(int dtype, const Run& run) {
  switch (dtype) {
    case kBFloat16: return run(bf16{});
    case kFloat16: return run(__half{});
    default: return run(float{});
  }
}

// The same of what products are made of: pairs are for weights and results of 16 bits, fp16 for what is so throughout.
template <typename Source, typename Destination, typename Run>
int with_adapters(int adapters, const Run& run) {
  if constexpr (sizeof(Source) == 2 && sizeof(Destination) == 2)
    if (adapters == kPairs) return run(Pair{});
  if (adapters == kFloat32) return run(float{});
  if (adapters == kBFloat16) return run(bf16{});
  if constexpr (std::is_same_v<Source, __half> && std::is_same_v<Destination, __half>) return run(__half{});
  return cudaErrorInvalidConfiguration;
}

// Lets a kernel have so much shared memory. A refusal is returned, no more: left with the runtime as its last error, it
// would be read as that of the next launch.
template <typename Kernel>
cudaError_t allow_shared(Kernel kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) cudaGetLastError();
  return error;
}

}  // namespace lora_merge
