#include "memory.h"

#include <c10/util/Exception.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "graph.h"

namespace emulated {
namespace {

// As a float of 16, 32 or 64 bits this is not a number, as an integer it is odd.
constexpr uint16_t POISON = 0xFFF1;

uintptr_t reserve(size_t bytes, int protection) {
  void* address = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(address != MAP_FAILED, "no room for ", bytes, " bytes of addresses: ", strerror(errno));
  return reinterpret_cast<uintptr_t>(address);
}

void poison(void* kernel_pointer, size_t bytes) {
  auto* words = static_cast<uint16_t*>(kernel_pointer);
  std::fill(words, words + bytes / sizeof(POISON), POISON);
}

struct sigaction previous_action;

void on_fault(int signal, siginfo_t* info, void*) {
  if (device_memory().contains(reinterpret_cast<uintptr_t>(info->si_addr))) {
    constexpr char message[] = "emulated device: host code touched device memory\n";
    [[maybe_unused]] auto written = write(STDERR_FILENO, message, sizeof(message) - 1);
  }
  sigaction(signal, &previous_action, nullptr); // the instruction faults again, and whoever was here before gets it
}

} // namespace

Pool::Pool(bool is_hidden) : base_(reserve(CAPACITY_BYTES, is_hidden ? PROT_NONE : PROT_READ | PROT_WRITE)) {
  if (is_hidden) {
    kernel_offset_ = reserve(CAPACITY_BYTES, PROT_READ | PROT_WRITE) - base_;
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous_action);
  }
}

Block& Pool::allocate(size_t bytes, StreamNumber stream) {
  std::lock_guard lock(state_mutex());
  collect_pending();
  size_t rounded = (bytes + GRANULE_BYTES - 1) / GRANULE_BYTES * GRANULE_BYTES;
  auto* graph = kernel_offset_ != 0 ? capturing() : nullptr;
  auto number = graph == nullptr ? 0 : graph->number();
  auto& free = free_[{number, stream, rounded}];
  Block* block;
  if (!free.empty()) {
    block = free.back();
    free.pop_back();
  } else {
    TORCH_CHECK(taken_bytes_ + rounded <= CAPACITY_BYTES, "out of memory: ", rounded, " bytes");
    auto made = std::make_unique<Block>();
    block = made.get();
    *block = {.address = base_ + taken_bytes_, .bytes = rounded, .stream = stream, .captured_by = number};
    taken_bytes_ += rounded;
    blocks_[block->address] = std::move(made);
  }
  auto pointer = kernel_pointer(block->address);
  if (graph != nullptr) {
    Access whole{.begin = block->address, .end = block->address + rounded, .is_write = true};
    graph->add_launch(stream, "a new allocation", {whole}, [pointer, rounded] { poison(pointer, rounded); });
  } else if (kernel_offset_ != 0) {
    enqueue(stream, "allocation", [pointer, rounded] { poison(pointer, rounded); });
    try {
      Access whole{.begin = block->address, .end = block->address + rounded, .is_write = true};
      block->history.add(whole, "a new allocation", stream, clock_of(stream));
    } catch (...) {
      free.push_back(block);
      throw;
    }
  }
  block->is_live = true;
  statistics.allocated_bytes += rounded;
  statistics.allocated_bytes_by_stream[stream] += rounded;
  statistics.peak_bytes = std::max(statistics.peak_bytes, statistics.allocated_bytes);
  return *block;
}

void Pool::free(uintptr_t address) {
  std::lock_guard lock(state_mutex());
  auto& block = *blocks_.at(address);
  block.is_live = false;
  statistics.allocated_bytes -= block.bytes;
  statistics.allocated_bytes_by_stream[block.stream] -= block.bytes;
  if (capturing() != nullptr && !block.used_by.empty()) {
    block.used_by.clear();
    return; // the graph keeps it: no mark of the capture can pass
  }
  for (auto stream : block.used_by) {
    block.pending.push_back(mark(stream));
  }
  block.used_by.clear();
  if (block.pending.empty()) {
    put_back(block);
  } else {
    pending_.push_back(&block);
  }
}

// What other streams were using when it was freed can be used again when that has run.
void Pool::collect_pending() {
  std::erase_if(pending_, [&](Block* block) {
    if (!std::all_of(block->pending.begin(), block->pending.end(), has_passed)) {
      return false;
    }
    for (auto& mark : block->pending) {
      block->history.forget(mark.clock);
    }
    block->pending.clear();
    put_back(*block);
    return true;
  });
}

void Pool::put_back(Block& block) {
  free_[{block.captured_by, block.stream, block.bytes}].push_back(&block);
}

Block* Pool::find(uintptr_t address) {
  std::lock_guard lock(state_mutex());
  if (!contains(address)) {
    return nullptr;
  }
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) {
    return nullptr;
  }
  auto& block = *std::prev(after)->second;
  return address < block.address + block.bytes ? &block : nullptr;
}

Pool& device_memory() {
  static auto& pool = *new Pool(true);
  return pool;
}

Pool& pinned_memory() {
  static auto& pool = *new Pool(false);
  return pool;
}

} // namespace emulated
