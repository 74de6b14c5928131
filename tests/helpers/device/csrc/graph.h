// Graphs of launches, as CUDA graphs: captured once, replayed on the same addresses.
#pragma once

#include <ATen/core/Generator.h>

#include <map>

#include "launch.h"

namespace emulated {

class Graph {
 public:
  // Captures what is launched from now on, by any thread, in place of running it. Memory that is allocated meanwhile
  // comes from a pool of its own. The end refuses work on a stream for which the stream of the capture does not wait.
  void begin();
  void end();

  // Launches all that was captured. Every allocation is poisoned again, so that a replay that reads what an earlier one
  // has left computes something else.
  void replay();

  uint64_t number() const {
    return number_;
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

  uint64_t number_ = 0; // of the capture, from 1
  StreamNumber origin_ = 0; // the stream of the capture, in place of which a replay uses its own
  std::map<StreamNumber, Clock> clocks_; // of the captured launches, by stream
  std::vector<Item> items_;
  std::vector<Clock> marks_;
};

// The graph that captures now, or null.
Graph* capturing();

// Refuses what no graph can capture, as CUDA does.
void check_not_capturing(const std::string& operation);

} // namespace emulated
