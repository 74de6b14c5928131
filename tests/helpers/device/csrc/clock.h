// What has happened before something else.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace emulated {

using StreamNumber = size_t;

// A vector clock: of each stream, how many of its tasks come before. Tasks of a stream are numbered from 1.
class Clock {
 public:
  uint64_t of(StreamNumber stream) const {
    return stream < counts_.size() ? counts_[stream] : 0;
  }

  const std::vector<uint64_t>& counts() const {
    return counts_;
  }

  void advance(StreamNumber stream) {
    counts_.resize(std::max(counts_.size(), stream + 1));
    ++counts_[stream];
  }

  void join(const Clock& other) {
    counts_.resize(std::max(counts_.size(), other.counts_.size()));
    for (size_t i = 0; i < other.counts_.size(); ++i) {
      counts_[i] = std::max(counts_[i], other.counts_[i]);
    }
  }

 private:
  std::vector<uint64_t> counts_;
};

} // namespace emulated
