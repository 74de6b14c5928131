#include "graph.h"

#include <c10/util/Exception.h>

namespace emulated {
namespace {

Graph* current = nullptr; // guarded by the state's mutex

} // namespace

Graph* capturing() {
  std::lock_guard lock(state_mutex());
  return current;
}

void check_not_capturing(const std::string& operation) {
  TORCH_CHECK(capturing() == nullptr, "operation not permitted when stream is capturing: ", operation);
}

void Graph::begin() {
  std::lock_guard lock(state_mutex());
  TORCH_CHECK(current == nullptr && items_.empty(), "a graph is captured once, and only one at a time");
  static uint64_t captures = 0;
  number_ = ++captures;
  origin_ = current_stream();
  current = this;
}

void Graph::end() {
  std::lock_guard lock(state_mutex());
  current = nullptr;
  for (auto& [stream, clock] : clocks_) {
    TORCH_CHECK(
        clocks_[origin_].of(stream) == clock.of(stream), "capturing stream has unjoined work, on stream ", stream);
  }
}

void Graph::add(Item item) {
  clocks_[item.stream].advance(item.stream);
  items_.push_back(std::move(item));
}

void Graph::add_launch(
    StreamNumber stream, std::string operation, std::vector<Access> accesses, std::function<void()> run) {
  add({.stream = stream, .operation = std::move(operation), .accesses = std::move(accesses), .run = std::move(run)});
}

int64_t Graph::add_mark(StreamNumber stream) {
  items_.push_back({.stream = stream, .marks = static_cast<int64_t>(marks_.size())});
  marks_.push_back(clocks_[stream]);
  return items_.back().marks;
}

void Graph::add_wait(StreamNumber stream, int64_t mark) {
  items_.push_back({.stream = stream, .waits_for = mark});
  clocks_[stream].join(marks_.at(mark));
}

void Graph::add_draw(std::function<std::function<void()>()> draw) {
  add({.stream = current_stream(), .draw = std::move(draw)});
}

void Graph::replay() {
  raise_failure();
  std::lock_guard lock(state_mutex());
  TORCH_CHECK(current == nullptr, "a graph is replayed while one is captured");
  auto here = current_stream();
  for (auto& [stream, clock] : clocks_) {
    if (stream != origin_) {
      make_stream_wait(stream, mark(here));
    }
  }
  std::vector<Mark> marks(marks_.size());
  for (auto& item : items_) {
    auto stream = item.stream == origin_ ? here : item.stream;
    if (item.marks >= 0) {
      marks.at(item.marks) = mark(stream);
    } else if (item.waits_for >= 0) {
      make_stream_wait(stream, marks.at(item.waits_for));
    } else if (item.draw) {
      launch_on(stream, "a seed", {}, item.draw());
    } else {
      for (auto& access : item.accesses) {
        auto* block = device_memory().find(access.begin);
        TORCH_CHECK(
            access.begin == access.end || block == nullptr || block->captured_by != 0 || block->is_live,
            "the replay of ", item.operation, " uses memory that is freed: ", access.begin, " ", access.name);
      }
      launch_on(stream, item.operation, item.accesses, item.run);
    }
  }
}

} // namespace emulated
