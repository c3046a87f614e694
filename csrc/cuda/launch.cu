// Which kernel runs a launch.
#include "device.cuh"
#include "driver.h"

namespace lora_merge {

// In sm80, a file a source.
template <typename Source>
int launch_from(int destination_dtype, int adapters, const Launch&, cudaStream_t);
template <typename T>
int launch_packed_from(int destination_dtype, int adapters, const Launch&, cudaStream_t);
template <typename Source>
int row_norms_from(const Launch&, double* out, cudaStream_t);
template <typename T>
struct Coded;

int launch_merge(int source_dtype, int destination_dtype, int adapters, const Launch& launch, void* stream) {
  return with_dtype(source_dtype & ~kPackedSource, [&](auto source) {
    const auto from = source_dtype & kPackedSource ? launch_packed_from<decltype(source)> : launch_from<decltype(source)>;
    return from(destination_dtype, adapters, launch, static_cast<cudaStream_t>(stream));
  });
}

int launch_row_norms(int source_dtype, const Launch& launch, double* out, void* stream) {
  return with_dtype(source_dtype & ~kPackedSource, [&](auto source) {
    using T = decltype(source);
    const auto from = source_dtype & kPackedSource ? row_norms_from<Coded<T>> : row_norms_from<T>;
    return from(launch, out, static_cast<cudaStream_t>(stream));
  });
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
