#include "launch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <unordered_map>

#include "graph.h"
#include "recorder.h"

namespace emulated {
namespace {

constexpr size_t MOST_NAME_CHARACTERS = 200;

struct Name {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  std::string name;
};

std::unordered_map<const c10::StorageImpl*, Name>& names() {
  static auto& names = *new std::unordered_map<const c10::StorageImpl*, Name>;
  return names;
}

std::string name_of(const at::Tensor& tensor) {
  std::lock_guard lock(state_mutex());
  auto found = names().find(tensor.storage().unsafeGetStorageImpl());
  if (found == names().end()) {
    return "";
  }
  if (found->second.storage.expired()) {
    names().erase(found); // of a storage that was there before
    return "";
  }
  return found->second.name;
}

// How many elements there are from the first to the last.
int64_t extent(const at::Tensor& tensor) {
  int64_t extent = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    extent += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return tensor.numel() == 0 ? 0 : extent;
}

uintptr_t first_byte(const at::Tensor& tensor) {
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data());
  return begin + tensor.storage_offset() * tensor.itemsize();
}

} // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  auto options = tensor.options().device(c10::kCPU).requires_grad(false);
  void* pointer = tensor.numel() == 0 ? nullptr : device_memory().kernel_pointer(first_byte(tensor));
  auto strides = tensor.strides().vec();
  return as_number_like(at::from_blob(pointer, tensor.sizes(), strides, options), tensor);
}

Access access(const at::Tensor& tensor, bool is_write) {
  Access access{.is_write = is_write};
  if (auto elements = extent(tensor); elements > 0) {
    auto needed = (tensor.storage_offset() + elements) * tensor.itemsize();
    access.name = name_of(tensor);
    TORCH_CHECK(
        needed <= tensor.storage().nbytes(),
        "the memory of ",
        access.name.empty() ? "a tensor" : access.name,
        " is freed: needs ",
        needed,
        " bytes, found ",
        tensor.storage().nbytes());
    access.begin = first_byte(tensor);
    access.end = access.begin + elements * tensor.itemsize();
  }
  return access;
}

bool is_pinned(const at::Tensor& tensor) {
  return tensor.numel() > 0 && pinned_memory().contains(reinterpret_cast<uintptr_t>(tensor.storage().data()));
}

void name_storage(const at::Tensor& tensor, std::string name) {
  std::lock_guard lock(state_mutex());
  auto storage = tensor.storage().getWeakStorageImpl();
  names().insert_or_assign(tensor.storage().unsafeGetStorageImpl(), Name{storage, std::move(name)});
}

namespace {

// Whether what an operation writes is what it reads, at another place. So buffers of a gather are called by the names of
// the parameters in them.
bool moves_data(const std::string& operation) {
  bool copies = operation.find("copy") != std::string::npos || operation.find("cat") != std::string::npos;
  return copies || operation.rfind("c10d::", 0) == 0;
}

// The names of all that is read, for what is written and has none.
void hand_on_names(std::vector<Access>& accesses) {
  std::string names;
  for (auto& access : accesses) {
    bool is_new = !access.is_write && names.find(access.name) == std::string::npos;
    if (is_new && names.size() + access.name.size() < MOST_NAME_CHARACTERS) {
      names += (names.empty() ? "" : ", ") + access.name;
    }
  }
  for (auto& access : accesses) {
    if (access.is_write && access.name.empty()) {
      access.name = names;
    }
  }
}

Block& block_of(const Access& access, const std::string& operation) {
  auto* block = device_memory().find(access.begin);
  if (block == nullptr) {
    block = pinned_memory().find(access.begin);
  }
  TORCH_INTERNAL_ASSERT(block != nullptr, operation, " uses memory of nobody");
  return *block;
}

} // namespace

void launch_on(
    StreamNumber stream, const std::string& operation, std::vector<Access> accesses, std::function<void()> run) {
  raise_failure();
  std::erase_if(accesses, [](const Access& access) { return access.begin == access.end; });
  std::lock_guard lock(state_mutex());
  if (auto* graph = capturing()) {
    graph->add_launch(stream, operation, std::move(accesses), std::move(run));
    return;
  }
  enqueue(stream, operation, [run = std::move(run)] {
    at::AutoDispatchBelowAutograd below;
    run();
  });
  for (auto& access : accesses) {
    if (access.name.empty()) {
      access.name = block_of(access, operation).history.name_of(access);
    }
  }
  if (moves_data(operation)) {
    hand_on_names(accesses);
  }
  size_t bytes = 0;
  for (auto& access : accesses) {
    auto& block = block_of(access, operation);
    if (pinned_memory().contains(access.begin)) {
      block.used_by.insert(stream);
    }
    block.history.add(access, operation, stream, clock_of(stream));
    bytes += access.end - access.begin;
  }
  record_launch({operation, stream, clock_of(stream), bytes});
}

void launch(const std::string& operation, const std::vector<Access>& accesses, std::function<void()> run) {
  launch_on(current_stream(), operation, accesses, std::move(run));
}

void launch_and_wait(const std::string& operation, const std::vector<Access>& accesses, std::function<void()> run) {
  check_not_capturing(operation);
  auto error = std::make_shared<std::exception_ptr>();
  launch(operation, accesses, [run = std::move(run), error] {
    try {
      run();
    } catch (...) {
      *error = std::current_exception();
    }
  });
  make_host_wait(mark(current_stream()));
  if (*error) {
    std::rethrow_exception(*error);
  }
}

} // namespace emulated
