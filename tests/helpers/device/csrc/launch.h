// How an operation gets to a stream: what it touches, and what it computes on.
#pragma once

#include <ATen/core/Tensor.h>

#include "memory.h"

namespace emulated {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

inline c10::Device the_device() {
  return {c10::DeviceType::PrivateUse1, 0};
}

// Gives `copy` what `tensor` has of a number of the host's: how it takes part in type promotion.
inline at::Tensor as_number_like(at::Tensor copy, const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// The same elements as a tensor on the CPU, for use in a task. It does not keep them: a tensor that is freed before the
// task has run leaves the task with whatever is there then, as on a real device.
at::Tensor host_alias(const at::Tensor& tensor);

// The bytes from a tensor's first element to its last, also those between that are not its own.
Access access(const at::Tensor& tensor, bool is_write);

// Whether a tensor on the CPU is in pinned memory.
bool is_pinned(const at::Tensor& tensor);

// Calls errors about this tensor's storage, also when it is freed and allocated again, by this name.
void name_storage(const at::Tensor& tensor, std::string name);

// Frees a storage's memory and gives it other; what is in both stays. 0 bytes: frees it.
void resize_storage(const c10::Storage& storage, size_t bytes);

// What is freed outlives what this stream has to do by then. See `Block::used_by`.
void record_storage(const c10::DataPtr& data, c10::Stream stream);

// Makes the device known to torch, once.
void register_device();

// Enqueues an operation, on the current stream if no other is given, after checking what it touches.
void launch(const std::string& operation, const std::vector<Access>& accesses, std::function<void()> run);
void launch_on(
    StreamNumber stream, const std::string& operation, std::vector<Access> accesses, std::function<void()> run);

// The same, and waits until it has run. What it throws is thrown here.
void launch_and_wait(const std::string& operation, const std::vector<Access>& accesses, std::function<void()> run);

} // namespace emulated
