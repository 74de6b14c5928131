// What torch asks a device for: an allocator, a guard with streams and events, hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>

#include "generator.h"
#include "graph.h"

namespace emulated {
namespace {

uintptr_t address_of(const c10::DataPtr& data) {
  return reinterpret_cast<uintptr_t>(data.get());
}

void free_device(void* pointer) {
  device_memory().free(reinterpret_cast<uintptr_t>(pointer));
}

void free_pinned(void* pointer) {
  pinned_memory().free(reinterpret_cast<uintptr_t>(pointer));
}

class DeviceAllocator : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, the_device()};
    }
    auto* pointer = reinterpret_cast<void*>(device_memory().allocate(bytes, current_stream()).address);
    return {pointer, pointer, free_device, the_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return free_device;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    TORCH_CHECK(false, "copies of ", bytes, " bytes between ", target, " and ", source, " have no stream");
  }
  bool initialized() override {
    return true;
  }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_storage(data, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard lock(state_mutex());
    c10::CachingDeviceAllocator::DeviceStats result;
    auto& all = result.allocated_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)];
    all.current = static_cast<int64_t>(device_memory().statistics.allocated_bytes);
    all.peak = static_cast<int64_t>(device_memory().statistics.peak_bytes);
    return result;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard lock(state_mutex());
    device_memory().statistics.peak_bytes = device_memory().statistics.allocated_bytes;
  }
};

class PinnedAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* pointer = reinterpret_cast<void*>(pinned_memory().allocate(std::max<size_t>(bytes, 1), 0).address);
    return {pointer, pointer, free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return free_pinned;
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

// An event: the mark of its last recording, and when the stream came there.
struct Event {
  std::optional<Mark> mark;
  std::shared_ptr<double> time_ms = std::make_shared<double>(0); // written by the task before the mark
};

// Nobody waits for an event that has not been.
bool is_recorded(void* event) {
  return event != nullptr && static_cast<Event*>(event)->mark;
}

double now_ms() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double, std::milli>(now).count();
}

c10::Stream to_stream(StreamNumber number) {
  return c10::Stream(c10::Stream::UNSAFE, the_device(), static_cast<c10::StreamId>(number));
}

StreamNumber number_of(const c10::Stream& stream) {
  return static_cast<StreamNumber>(stream.id());
}

class Guard : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override {
    return c10::DeviceType::PrivateUse1;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return the_device();
  }
  c10::Device getDevice() const override {
    return the_device();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one device, not ", device);
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device) const override {
    return to_stream(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device) const override {
    return to_stream(DEFAULT_STREAM);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return to_stream(stream_from_pool());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return to_stream(stream_from_pool());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return to_stream(exchange_current_stream(number_of(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return has_passed(mark(number_of(stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    make_host_wait(mark(number_of(stream)));
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    synchronize();
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    auto& recorded = *static_cast<Event*>(*event);
    std::lock_guard lock(state_mutex());
    if (is_left_out(Edge::EVENT)) {
      return;
    }
    if (flag == c10::EventFlag::BACKEND_DEFAULT && capturing() == nullptr) {
      recorded.time_ms = std::make_shared<double>(0);
      enqueue(number_of(stream), "event", [time_ms = recorded.time_ms] { *time_ms = now_ms(); });
    }
    recorded.mark = mark(number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (is_recorded(event)) {
      make_stream_wait(number_of(stream), *static_cast<Event*>(event)->mark);
    }
  }
  bool queryEvent(void* event) const override {
    return !is_recorded(event) || has_passed(*static_cast<Event*>(event)->mark);
  }
  void synchronizeEvent(void* event) const override {
    if (is_recorded(event)) {
      make_host_wait(*static_cast<Event*>(event)->mark);
    }
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(is_recorded(first) && is_recorded(second), "expected two events that have been recorded");
    synchronizeEvent(first);
    synchronizeEvent(second);
    return *static_cast<Event*>(second)->time_ms - *static_cast<Event*>(first)->time_ms;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_storage(data, stream);
  }
};

class Hooks : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    TORCH_CHECK(device <= 0, "there is one device, not ", device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return new_generator();
  }
  at::Device getDeviceFromPtr(void*) const override {
    return the_device();
  }
  bool isPinnedPtr(const void* pointer) const override {
    return pinned_memory().contains(reinterpret_cast<uintptr_t>(pointer));
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_allocator;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

} // namespace

void record_storage(const c10::DataPtr& data, c10::Stream stream) {
  std::lock_guard lock(state_mutex());
  auto* block = device_memory().find(address_of(data));
  if (block != nullptr && block->stream != number_of(stream) && !is_left_out(Edge::HOLD)) {
    block->used_by.insert(number_of(stream));
  }
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto kept = std::min(bytes, storage.nbytes());
  auto data = device_allocator.allocate(bytes);
  if (kept > 0) {
    auto from = address_of(storage.data_ptr());
    auto to = address_of(data);
    auto* source = device_memory().kernel_pointer(from);
    auto* target = device_memory().kernel_pointer(to);
    launch(
        "resize of a storage",
        {{.begin = from, .end = from + kept}, {.begin = to, .end = to + kept, .is_write = true}},
        [=] { std::memcpy(target, source, kept); });
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

void register_device() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

} // namespace emulated
