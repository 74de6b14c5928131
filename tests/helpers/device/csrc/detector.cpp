#include "detector.h"

#include <c10/util/Exception.h>

#include <atomic>

namespace emulated {
namespace {

std::atomic<bool> is_detecting{true};

std::string describe(const std::string& operation, const Access& access, StreamNumber stream) {
  return c10::str(operation, " on stream ", stream, access.is_write ? " writes" : " reads");
}

} // namespace

void History::add(const Access& access, const std::string& operation, StreamNumber stream, const Clock& clock) {
  for (auto position = entries_.rbegin(); position != entries_.rend(); ++position) {
    auto& entry = *position; // the latest first: it says more than the allocation of the whole block
    if (!entry.overlaps(access) || !(entry.access.is_write || access.is_write) || entry.is_before(clock) || !is_detecting) {
      continue;
    }
    auto& name = access.name.empty() ? entry.access.name : access.name;
    TORCH_CHECK(
        false,
        "race on ",
        name.empty() ? "a tensor without a name" : name,
        ": ",
        describe(operation, access, stream),
        " what ",
        describe(entry.operation, entry.access, entry.stream),
        ", and stream ",
        stream,
        " has not waited for it");
  }
  // A write stands for all before it; a read for earlier reads of its own stream.
  std::erase_if(entries_, [&](const Entry& entry) {
    bool is_within = access.begin <= entry.access.begin && entry.access.end <= access.end;
    return is_within && (access.is_write || (!entry.access.is_write && entry.stream == stream));
  });
  entries_.push_back({access, operation, stream, clock.of(stream)});
}

std::string History::name_of(const Access& access) const {
  auto found = std::find_if(entries_.rbegin(), entries_.rend(), [&](const Entry& entry) {
    return entry.access.is_write && entry.overlaps(access);
  });
  return found == entries_.rend() ? "" : found->access.name;
}

void History::forget(const Clock& clock) {
  std::erase_if(entries_, [&](const Entry& entry) { return entry.is_before(clock); });
}

void set_detecting(bool is_on) {
  is_detecting = is_on;
}

} // namespace emulated
