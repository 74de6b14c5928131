// Graphs of launches, as CUDA graphs: captured once, replayed on the same addresses.
#pragma once

#include <ATen/core/Generator.h>

#include <set>

#include "launch.h"

namespace emulated {

class Graph {
 public:
  // Captures what is launched from now on, by any thread, in place of running it. Memory that is allocated meanwhile
  // comes from a pool of its own: it is used again within captures only.
  void begin();
  void end();

  // Launches all that was captured. Every allocation is poisoned again, so that a replay that reads what an earlier one
  // has left computes something else.
  void replay();

  size_t launches() const {
    return items_.size();
  }

  // For what is captured. `add_mark` returns the number by which a wait names it.
  void add_launch(StreamNumber stream, std::string operation, std::vector<Access> accesses, std::function<void()> run);
  int64_t add_mark(StreamNumber stream);
  void add_wait(StreamNumber stream, int64_t mark);
  void add_draw(std::function<std::function<void()>()> draw);

 private:
  // One of: a launch, a mark, a stream's wait for one, the seed that a later launch draws from.
  struct Item {
    StreamNumber stream = 0;
    std::string operation;
    std::vector<Access> accesses;
    std::function<void()> run;
    std::function<std::function<void()>()> draw;
    int64_t marks = -1;
    int64_t waits_for = -1;
  };

  void add(Item item);

  StreamNumber origin_ = 0; // the stream of the capture, in place of which a replay uses its own
  std::set<StreamNumber> others_;
  std::vector<Item> items_;
  int64_t marks_ = 0;
};

// The graph that captures now, or null.
Graph* capturing();

// Refuses what no graph can capture, as CUDA does.
void check_not_capturing(const std::string& operation);

} // namespace emulated
