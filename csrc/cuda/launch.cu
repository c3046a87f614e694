// Which kernel runs a launch.
#include <cuda.h>
#include <cuda_runtime.h>

#include "driver.h"
#include "launch.h"

namespace lora_merge {

int launch_from_bf16(int, int, const Launch&, void*);
int launch_from_fp16(int, int, const Launch&, void*);
int launch_from_fp32(int, int, const Launch&, void*);

int launch_packed_bf16(int, int, const Launch&, void*);
int launch_packed_fp16(int, int, const Launch&, void*);
int launch_packed_fp32(int, int, const Launch&, void*);

int row_norms_from_bf16(const Launch&, double*, void*);
int row_norms_from_fp16(const Launch&, double*, void*);
int row_norms_from_fp32(const Launch&, double*, void*);

int row_norms_packed_bf16(const Launch&, double*, void*);
int row_norms_packed_fp16(const Launch&, double*, void*);
int row_norms_packed_fp32(const Launch&, double*, void*);

int launch_merge(int source_dtype, int destination_dtype, int adapters, const Launch& launch, void* stream) {
  switch (source_dtype) {
    case kBFloat16: return launch_from_bf16(destination_dtype, adapters, launch, stream);
    case kFloat16: return launch_from_fp16(destination_dtype, adapters, launch, stream);
    case kPackedSource | kBFloat16: return launch_packed_bf16(destination_dtype, adapters, launch, stream);
    case kPackedSource | kFloat16: return launch_packed_fp16(destination_dtype, adapters, launch, stream);
    case kPackedSource | kFloat32: return launch_packed_fp32(destination_dtype, adapters, launch, stream);
    default: return launch_from_fp32(destination_dtype, adapters, launch, stream);
  }
}

int launch_row_norms(int source_dtype, const Launch& launch, double* out, void* stream) {
  switch (source_dtype) {
    case kBFloat16: return row_norms_from_bf16(launch, out, stream);
    case kFloat16: return row_norms_from_fp16(launch, out, stream);
    case kPackedSource | kBFloat16: return row_norms_packed_bf16(launch, out, stream);
    case kPackedSource | kFloat16: return row_norms_packed_fp16(launch, out, stream);
    case kPackedSource | kFloat32: return row_norms_packed_fp32(launch, out, stream);
    default: return row_norms_from_fp32(launch, out, stream);
  }
}

namespace {

using GetCurrent = CUresult (*)(CUcontext*);
using SetCurrent = CUresult (*)(CUcontext);

}  // namespace

std::string runtime_problem() {
  int devices = 0, driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error == cudaSuccess) return {};
  cudaGetLastError();
  cudaDriverGetVersion(&driver);
  const auto version = [](int v) { return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10); };
  return std::string(cudaGetErrorString(error)) + " (compiled with CUDA " + version(CUDART_VERSION) +
         ", the driver is for CUDA " + version(driver) + ")";
}

int enter_device(int device, void** before) {
  static const auto get = of_driver<GetCurrent>("cuCtxGetCurrent");
  CUcontext context = nullptr;
  if (get == nullptr || get(&context) != CUDA_SUCCESS) return cudaErrorInsufficientDriver;
  *before = context;
  return cudaSetDevice(device);
}

void leave_device(void* before) {
  static const auto set = of_driver<SetCurrent>("cuCtxSetCurrent");
  if (before != nullptr) set(static_cast<CUcontext>(before));  // a thread without one keeps the new one
}

const char* error_name(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }

}  // namespace lora_merge
