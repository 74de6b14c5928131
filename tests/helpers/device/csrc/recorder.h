// What has been launched, for whoever wants to know what could run beside what.
#pragma once

#include <string>
#include <vector>

#include "clock.h"

namespace emulated {

struct Launch {
  std::string operation;
  StreamNumber stream = 0;
  Clock clock; // of each stream, how many of its tasks come before; this task is the last of its own stream
  size_t bytes = 0; // that it reads and writes
};

// Begins to record, with nothing recorded.
void start_recording();

// Ends it, and returns all launches since it began, in their order.
std::vector<Launch> stop_recording();

// Keeps a launch if recording.
void record_launch(Launch launch);

} // namespace emulated
