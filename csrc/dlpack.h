// What is used here of DLPack 1 (github.com/dmlc/dlpack): how to see another library's tensors without its headers.
#pragma once
#include <cstdint>

namespace lora_merge {

struct DLDevice {
  int32_t device_type;
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

// Fills in a view of a Python object's memory; 0, or -1 with an exception set.
using DLPackDLTensorFromPyObjectNoSync = int (*)(void* object, DLTensor* out);

// Behind the capsule `torch.Tensor.__dlpack_c_exchange_api__`.
struct DLPackExchangeAPI {
  struct {
    struct {
      uint32_t major;
      uint32_t minor;
    } version;
    void* previous;
  } header;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync;
  void* current_work_stream;
};

}  // namespace lora_merge
