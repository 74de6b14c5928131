#include "recorder.h"

#include <optional>
#include <utility>

#include "streams.h"

namespace emulated {
namespace {

std::optional<std::vector<Launch>>& recorded() {
  static auto& recorded = *new std::optional<std::vector<Launch>>;
  return recorded;
}

} // namespace

void start_recording() {
  std::lock_guard lock(state_mutex());
  recorded().emplace();
}

std::vector<Launch> stop_recording() {
  std::lock_guard lock(state_mutex());
  auto launches = std::move(recorded()).value_or(std::vector<Launch>());
  recorded().reset();
  return launches;
}

void record_launch(Launch launch) {
  std::lock_guard lock(state_mutex());
  if (recorded()) {
    recorded()->push_back(std::move(launch));
  }
}

} // namespace emulated
