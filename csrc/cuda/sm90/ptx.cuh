// Instructions of compute capability 9.0: barriers in shared memory, copies of tiles by tensor maps, products by wgmma.
#pragma once
#include "../device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LORA_MERGE_HOPPER 1
#endif

namespace lora_merge {
namespace hopper {

// ---- barriers ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and has the barrier wait for so many bytes of copies.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Ordinary accesses to shared memory come before those of copies and matrix units that follow.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tiles between global and shared memory -----------------------------------------------------------------------

// A map that the host wrote to global memory may be used after this.
__device__ __forceinline__ void acquire_map(const TensorMap* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" ::"l"(map) : "memory");
}
// The box whose first element is (row, col); what lies outside of the matrix is zeros.
__device__ __forceinline__ void load_box(uint32_t shared, const TensorMap* map, int col, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared),
      "l"(map), "r"(col), "r"(row), "r"(barrier)
      : "memory");
}
// 32 ranks of 64 rows of lora_B, from `rank` on, in both parts.
__device__ __forceinline__ void load_pairs(uint32_t shared, const TensorMap* map, int rank, int row, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
          "r"(shared),
      "l"(map), "r"(rank), "r"(row), "r"(0), "r"(barrier)
      : "memory");
}
// 32 ranks of 64 columns of lora_A, from `rank` on, in the order in which its map has them; of pairs both parts.
__device__ __forceinline__ void load_ranks(uint32_t shared, const TensorMap* map, int col, int rank, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %4, %3, %4, %4}], "
      "[%5];" ::"r"(shared),
      "l"(map), "r"(col), "r"(rank / 8), "r"(0), "r"(barrier)
      : "memory");
}
// racecheck: begin the journal's copies (see sm90/producer.cuh)
// A run of bytes, whole 16-byte vectors.
__device__ __forceinline__ void load_run(uint32_t shared, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// racecheck: end
// To the L2 cache, which keeps it until it is loaded.
__device__ __forceinline__ void prefetch_run(int64_t from, int bytes) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], %1, %2;" ::"l"(from), "r"(bytes), "l"(policy)
               : "memory");
}
// What lies outside of the matrix is not written. Results are not read again: they leave the L2 cache first.
__device__ __forceinline__ void store_box(const TensorMap* map, int col, int row, uint32_t shared) {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%1, %2}], [%3], %4;" ::"l"(map),
      "r"(col), "r"(row), "r"(shared), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until this thread's stores have read shared memory.
__device__ __forceinline__ void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until they have been written.
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- fragments of the matrix unit --------------------------------------------------------------------------------

// Four blocks of 8 x 8 elements, as ldmatrix4 reads them.
__device__ __forceinline__ void stmatrix4(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

// ---- products -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all products are done, but for those of the last few groups of them.
template <int Pending = 0>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}
// Registers of products, sums or operands, are the matrix unit's alone between two of these: what is written to them
// is written before the first, and they are neither read nor used for something else before the second.
__device__ __forceinline__ void settle(float (&d)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int Planes>
__device__ __forceinline__ void settle(uint32_t (&b)[Planes][4]) {
#pragma unroll
  for (int p = 0; p < Planes; ++p)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(b[p][i])::"memory");
}

// d = a b, or d += a b where `add`: 64 rows x 64 columns, 16 ranks of bf16 or fp16. `b` lies in shared memory, its
// address in units of 16 bytes: rows, which are ranks, of 64 columns in swizzled 16-byte vectors, eight of them in 1024
// bytes.
template <typename Adapter>
__device__ __forceinline__ void wgmma(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b,
                                      int add) {
  constexpr uint32_t kSwizzled = 1u << 30, kEightRows = 1024 / 16;
#define LORA_MERGE_WGMMA(FORMAT)                                                                                    \
  asm volatile(                                                                                                     \
      "{\n"                                                                                                         \
      ".reg .pred add;\n"                                                                                           \
      ".reg .b64 matrix;\n"                                                                                         \
      "setp.ne.b32 add, %37, 0;\n"                                                                                  \
      "mov.b64 matrix, {%36, %38};\n"                                                                               \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." FORMAT "." FORMAT                                               \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"                                                    \
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"                                           \
      "{%32,%33,%34,%35}, matrix, add, 1, 1, 1;\n"                                                                  \
      "}\n"                                                                                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),      \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),     \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])                   \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b), "r"(add), "r"(kSwizzled | kEightRows))
  if constexpr (kOfHalf<Adapter>) LORA_MERGE_WGMMA("f16");
  else LORA_MERGE_WGMMA("bf16");
#undef LORA_MERGE_WGMMA
}

}  // namespace hopper
}  // namespace lora_merge
