// Two memories: the device's, which the host cannot touch, and pinned host memory.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "detector.h"

namespace emulated {

struct Block {
  uintptr_t address = 0;
  size_t bytes = 0; // a multiple of 512
  StreamNumber stream = 0; // that it belongs to: where it is allocated, and may be used again at once when freed
  bool is_live = false;
  uint64_t captured_by = 0; // number of the graph that was captured when it was allocated; 0 for none
  std::set<StreamNumber> used_by; // other streams that it must outlive, by `record_stream`
  std::vector<Mark> pending; // when freed: what must have run before it can be used again
  History history; // stays when the block is used again
};

struct Statistics {
  size_t allocated_bytes = 0;
  size_t peak_bytes = 0;
  std::map<StreamNumber, size_t> allocated_bytes_by_stream;
};

// Hands out blocks of a range of addresses, and freed ones again as soon as it may.
class Pool {
 public:
  // Args:
  //   is_hidden: whether to give out addresses that fault; `kernel_pointer` then has the one that does not.
  explicit Pool(bool is_hidden);

  Block& allocate(size_t bytes, StreamNumber stream);
  void free(uintptr_t address);
  Block* find(uintptr_t address); // null for an address of other memory
  bool contains(uintptr_t address) const {
    return address - base_ < CAPACITY_BYTES;
  }
  void* kernel_pointer(uintptr_t address) const {
    return reinterpret_cast<void*>(address + kernel_offset_);
  }

  Statistics statistics;

 private:
  static constexpr size_t CAPACITY_BYTES = size_t{1} << 36; // of addresses; pages are taken when touched
  static constexpr size_t GRANULE_BYTES = 512;

  void collect_pending();
  void put_back(Block& block);

  uintptr_t base_;
  uintptr_t kernel_offset_ = 0;
  size_t taken_bytes_ = 0;
  std::map<uintptr_t, std::unique_ptr<Block>> blocks_; // by address
  using Key = std::tuple<uint64_t, StreamNumber, size_t>; // graph, stream, size
  std::map<Key, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
};

Pool& device_memory();
Pool& pinned_memory();

} // namespace emulated
