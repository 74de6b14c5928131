// Streams: threads that run what is enqueued later and in order, and what the host and streams wait for.
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "clock.h"

namespace emulated {

// A point in a stream: behind all that was enqueued when it was taken. What an event holds.
struct Mark {
  StreamNumber stream = 0;
  Clock clock;
  int64_t captured = -1; // its number in the graph that captured it

  uint64_t position() const {
    return clock.of(stream);
  }
};

// Guards clocks, queues' order, the allocators and the detector. Nothing that may wait, or run Python, happens under it.
std::recursive_mutex& state_mutex();

constexpr StreamNumber DEFAULT_STREAM = 0;

// The stream of this thread. Every thread begins with the default stream.
StreamNumber current_stream();
StreamNumber exchange_current_stream(StreamNumber stream);

// The next of a fixed number of streams, which are then handed out again, as CUDA's are.
StreamNumber stream_from_pool();

// The clock of what is enqueued next on the stream.
Clock& clock_of(StreamNumber stream);

// Adds a task. An exception in it is raised on the host later: see `raise_failure`.
void enqueue(StreamNumber stream, std::string name, std::function<void()> run);

Mark mark(StreamNumber stream);
bool has_passed(const Mark& mark);
void make_stream_wait(StreamNumber stream, const Mark& mark);
void make_host_wait(const Mark& mark);
void synchronize();

// Raises what went wrong in a task since the last call.
void raise_failure();

// From now on every task waits up to so long before it runs; a random time, but the same one for the same seed. 0 for
// no delay.
void set_delays(uint64_t seed, double most_us);

// Whether streams begin no further tasks for now: so that the host is ahead of them for sure.
void hold_streams(bool are_held);

// What orders a program, and may be missing from a wrong one.
enum class Edge {
  WAIT, // a stream's for another
  EVENT, // the recording of one
  HOLD, // of memory until another stream is done with it: by `record_stream`, or by a collective
};

// Leaves one edge out, counted from 0 from now on; none for a negative number. To see what the detector finds then.
void leave_out(Edge edge, int64_t number);
int64_t edges_since_then(Edge edge);

// Asked wherever such an edge is made.
bool is_left_out(Edge edge);

} // namespace emulated
