#include "streams.h"

#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <thread>

#include "graph.h"

namespace emulated {
namespace {

constexpr size_t POOL_SIZE = 32;

struct Task {
  std::string name;
  std::function<void()> run;
};

struct Delays {
  std::atomic<uint64_t> seed{0};
  std::atomic<double> most_us{0};
  std::atomic<uint64_t> version{0};
};

// None of these is ever destroyed: threads use them until the process ends.
Delays& delays() {
  static auto& delays = *new Delays;
  return delays;
}

struct Gate {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_closed = false;

  void pass() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !is_closed; });
  }
};

Gate& gate() {
  static auto& gate = *new Gate;
  return gate;
}

struct Failure {
  std::mutex mutex;
  std::optional<std::string> message;
};

Failure& failure() {
  static auto& failure = *new Failure;
  return failure;
}

class Stream {
 public:
  explicit Stream(StreamNumber number) : number_(number) {
    std::thread([this] { work(); }).detach();
  }

  void push(Task task) {
    {
      std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    changed_.notify_all();
  }

  bool has_passed(uint64_t position) {
    std::lock_guard lock(mutex_);
    return finished_ >= position;
  }

  void wait(uint64_t position) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return finished_ >= position; });
  }

  Clock clock; // guarded by the state's mutex

 private:
  void work() {
    at::init_num_threads();
    std::mt19937_64 random;
    uint64_t version = 0;
    while (true) {
      Task task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (auto now = delays().version.load(); now != version) {
        version = now;
        random.seed(delays().seed + 1000003 * number_);
      }
      if (double most_us = delays().most_us; most_us > 0) {
        std::uniform_real_distribution<double> distribution(0, most_us);
        std::this_thread::sleep_for(std::chrono::duration<double, std::micro>(distribution(random)));
      }
      gate().pass();
      run(task);
      task = Task(); // what it holds goes before anybody learns that it is over
      {
        std::lock_guard lock(mutex_);
        ++finished_;
      }
      changed_.notify_all();
    }
  }

  void run(Task& task) {
    try {
      task.run();
    } catch (const std::exception& error) {
      std::lock_guard lock(failure().mutex);
      if (!failure().message) {
        failure().message = c10::str(task.name, " on stream ", number_, ": ", error.what());
      }
    }
  }

  const StreamNumber number_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  uint64_t finished_ = 0;
};

struct Streams {
  std::array<std::unique_ptr<Stream>, POOL_SIZE + 1> streams; // started when first asked for
  size_t handed_out = 0;
  Clock host; // what the host has waited for
};

struct Omission {
  int64_t number = -1;
  int64_t seen = 0;
};

struct Omissions {
  std::array<Omission, 3> by_edge;
};

Omission& omission(Edge edge) {
  static auto& omissions = *new Omissions;
  return omissions.by_edge.at(static_cast<size_t>(edge));
}

Streams& state() {
  static auto& state = *new Streams;
  return state;
}

Stream& get(StreamNumber number) {
  std::lock_guard lock(state_mutex());
  auto& stream = state().streams.at(number);
  if (stream == nullptr) {
    stream = std::make_unique<Stream>(number);
  }
  return *stream;
}

thread_local StreamNumber current = DEFAULT_STREAM;

// Tasks may be written in Python, so whoever waits for them must not hold Python's lock.
class WithoutPythonLock {
 public:
  WithoutPythonLock() : saved_(Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (saved_ != nullptr) {
      PyEval_RestoreThread(saved_);
    }
  }

 private:
  PyThreadState* saved_;
};

} // namespace

std::recursive_mutex& state_mutex() {
  static auto& mutex = *new std::recursive_mutex;
  return mutex;
}

StreamNumber current_stream() {
  return current;
}

StreamNumber exchange_current_stream(StreamNumber stream) {
  return std::exchange(current, stream);
}

StreamNumber stream_from_pool() {
  std::lock_guard lock(state_mutex());
  return 1 + state().handed_out++ % POOL_SIZE;
}

Clock& clock_of(StreamNumber stream) {
  return get(stream).clock;
}

void enqueue(StreamNumber number, std::string name, std::function<void()> run) {
  std::lock_guard lock(state_mutex());
  auto& stream = get(number);
  stream.clock.join(state().host);
  stream.clock.advance(number);
  stream.push({std::move(name), std::move(run)});
}

Mark mark(StreamNumber stream) {
  std::lock_guard lock(state_mutex());
  auto* graph = capturing();
  return {stream, get(stream).clock, graph == nullptr ? -1 : graph->add_mark(stream)};
}

bool has_passed(const Mark& mark) {
  return get(mark.stream).has_passed(mark.position());
}

void make_stream_wait(StreamNumber stream, const Mark& mark) {
  std::lock_guard lock(state_mutex());
  if (stream == mark.stream || is_left_out(Edge::WAIT)) {
    return;
  }
  if (auto* graph = capturing()) {
    if (mark.captured >= 0) {
      graph->add_wait(stream, mark.captured);
    }
    return;
  }
  enqueue(stream, "wait", [mark] { get(mark.stream).wait(mark.position()); });
  clock_of(stream).join(mark.clock);
}

void make_host_wait(const Mark& mark) {
  check_not_capturing("a wait of the host");
  {
    WithoutPythonLock unlocked;
    get(mark.stream).wait(mark.position());
  }
  {
    std::lock_guard lock(state_mutex());
    state().host.join(mark.clock);
  }
  raise_failure();
}

void synchronize() {
  std::vector<Mark> marks;
  {
    std::lock_guard lock(state_mutex());
    for (StreamNumber number = 0; number < state().streams.size(); ++number) {
      if (state().streams[number] != nullptr) {
        marks.push_back(mark(number));
      }
    }
  }
  for (auto& each : marks) {
    make_host_wait(each);
  }
}

void raise_failure() {
  std::optional<std::string> message;
  {
    std::lock_guard lock(failure().mutex);
    message.swap(failure().message);
  }
  TORCH_CHECK(!message, "failed earlier, on the device: ", *message);
}

void set_delays(uint64_t seed, double most_us) {
  delays().seed = seed;
  delays().most_us = most_us;
  ++delays().version;
}

void hold_streams(bool are_held) {
  {
    std::lock_guard lock(gate().mutex);
    gate().is_closed = are_held;
  }
  gate().changed.notify_all();
}

void leave_out(Edge edge, int64_t number) {
  std::lock_guard lock(state_mutex());
  omission(edge) = {.number = number};
}

int64_t edges_since_then(Edge edge) {
  std::lock_guard lock(state_mutex());
  return omission(edge).seen;
}

bool is_left_out(Edge edge) {
  std::lock_guard lock(state_mutex());
  auto& each = omission(edge);
  return each.seen++ == each.number;
}

} // namespace emulated
