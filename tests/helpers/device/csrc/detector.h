// The race detector: who has touched which bytes, and whether that comes before whoever touches them next.
//
// It looks at the order in which things are enqueued, and never at when they run: the same program has the same races
// on every run.
#pragma once

#include <string>
#include <vector>

#include "streams.h"

namespace emulated {

// One operation's use of some bytes.
struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool is_write = false;
  std::string name; // of the tensor, if it has one
};

// The accesses of a block that later ones have to come behind.
class History {
 public:
  // Adds an access from a task that is about to be enqueued on a stream.
  // Throws if a write, or if this is a write anything, on other streams is not known to come before.
  void add(const Access& access, const std::string& operation, StreamNumber stream, const Clock& clock);

  // The name of what has been written there last; "" if it has none.
  std::string name_of(const Access& access) const;

  // Forgets what comes before this clock: somebody has waited for it.
  void forget(const Clock& clock);

 private:
  struct Entry {
    Access access;
    std::string operation;
    StreamNumber stream;
    uint64_t position; // of the task in its stream

    bool overlaps(const Access& other) const {
      return access.begin < other.end && other.begin < access.end;
    }

    bool is_before(const Clock& clock) const {
      return clock.of(stream) >= position;
    }
  };

  std::vector<Entry> entries_;
};

// Whether races are raised.
void set_detecting(bool is_on);

} // namespace emulated
