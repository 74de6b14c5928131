// The operations that are about memory: allocation, views with a storage, copies between host and device.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include "graph.h"

namespace emulated {
namespace {

using at::Tensor;

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::ScalarType dtype_of(std::optional<at::ScalarType> dtype) {
  return dtype ? *dtype : c10::get_default_dtype_as_scalartype();
}

Tensor empty(
    c10::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return at::detail::empty_generic(size, allocator, KEYS, dtype_of(dtype), format);
}

Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, allocator, KEYS, dtype_of(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() > 0 && self.storage().nbytes() < needed) {
    resize_storage(self.storage(), needed);
  }
  return self;
}

Tensor& set_storage(
    Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty()) {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  } else {
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  }
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_nothing(Tensor& self) {
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator, true), 0, {0}, {});
}

// The same tensor without what keeps it: for a task that uses pinned memory.
Tensor borrow(const Tensor& host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides().vec(), host.options().requires_grad(false));
}

// As on CUDA: only from and to pinned memory, and when asked for, does the host go on while the copy is made. What is
// copied from other host memory is taken at once.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) {
    return self;
  }
  TORCH_CHECK(self.device().type() != c10::kMeta && source.device().type() != c10::kMeta, "cannot copy a meta tensor");
  if (is_on_device(self)) {
    bool is_async = non_blocking && is_pinned(source);
    bool is_here = is_on_device(source);
    std::vector<Access> accesses{access(self, true)};
    if (is_here || is_async) {
      accesses.push_back(access(source, false));
    }
    if (!is_here && !is_async) {
      check_not_capturing("a copy from pageable memory");
    }
    auto from = is_here ? host_alias(source) : is_async ? borrow(source) : source.clone();
    launch("aten::copy_", accesses, [to = host_alias(self), from]() mutable { to.copy_(from); });
  } else if (non_blocking && is_pinned(self)) {
    std::vector<Access> accesses{access(self, true), access(source, false)};
    launch("aten::copy_", accesses, [to = borrow(self), from = host_alias(source)]() mutable { to.copy_(from); });
  } else {
    launch_and_wait("aten::copy_", {access(source, false)}, [&] { self.copy_(host_alias(source)); });
  }
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor self = target;
  return copy_(self, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const Tensor& self) {
  at::Scalar result;
  launch_and_wait(
      "aten::_local_scalar_dense", {access(self, false)}, [&] { result = at::_local_scalar_dense(host_alias(self)); });
  return result;
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_storage(self.storage().data_ptr(), stream);
}

// The CPU's kernel draws from a generator that it does not take as an argument.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::empty_like(input, at::kBool).fill_(true)};
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

} // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
}

} // namespace emulated
