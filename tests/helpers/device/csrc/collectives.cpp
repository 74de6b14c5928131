#include "collectives.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <tuple>

#include "launch.h"

namespace emulated {
namespace {

using at::Tensor;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;

// A collective that has been enqueued. Holds its tensors until somebody waits for it, so that their memory is not used
// again before.
class Work : public c10d::Work {
 public:
  Work(int rank, OpType type, Mark end, Tensors tensors, Tensors results)
      : c10d::Work(rank, type), end_(std::move(end)), tensors_(std::move(tensors)), results_(std::move(results)) {}

  ~Work() override {
    for (auto& tensor : tensors_) {
      auto stream = c10::Stream(c10::Stream::UNSAFE, the_device(), static_cast<c10::StreamId>(end_.stream));
      record_storage(tensor.storage().data_ptr(), stream);
    }
  }

  bool isCompleted() override {
    return has_passed(end_);
  }
  bool isSuccess() const override {
    return true; // what fails is raised by whoever waits
  }
  void synchronize() override {
    make_stream_wait(current_stream(), end_);
    tensors_.clear();
    if (opType_ == OpType::BARRIER) {
      make_host_wait(end_);
    }
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override {
    synchronize();
  }
  Tensors result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto type = c10::ListType::create(c10::TensorType::get());
    auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{the_device()});
    // Complete now, for streams that wait for what its stream does.
    c10::StreamGuard guard(
        c10::Stream(c10::Stream::UNSAFE, the_device(), static_cast<c10::StreamId>(end_.stream)));
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  const Mark end_;
  Tensors tensors_;
  const Tensors results_;
};

Tensors join(const TensorLists& lists) {
  Tensors result;
  for (auto& list : lists) {
    result.insert(result.end(), list.begin(), list.end());
  }
  return result;
}

Tensor host_aliases(const Tensor& tensor) {
  return host_alias(tensor);
}

Tensors host_aliases(const Tensors& tensors) {
  Tensors result;
  for (auto& tensor : tensors) {
    result.push_back(host_alias(tensor));
  }
  return result;
}

TensorLists host_aliases(const TensorLists& lists) {
  TensorLists result;
  for (auto& list : lists) {
    result.push_back(host_aliases(list));
  }
  return result;
}

// What is no tensor stays as it is.
template <typename Value>
Value host_aliases(const Value& value) {
  return value;
}

// The call of a collective of the host's process group, with what its tensors are there.
template <typename Method, typename... Arguments>
std::function<WorkPtr()> on_host(
    const c10::intrusive_ptr<c10d::Backend>& host, Method method, const Arguments&... arguments) {
  return [host, method, copies = std::make_tuple(host_aliases(arguments)...)]() mutable {
    return std::apply([&](auto&... each) { return ((*host).*method)(each...); }, copies);
  };
}

} // namespace

namespace {

std::atomic<double> link_latency_s = 0.0;
std::atomic<double> link_seconds_per_byte = 0.0;

size_t bytes_of(const Tensors& tensors) {
  size_t bytes = 0;
  for (auto& tensor : tensors) {
    bytes += tensor.nbytes();
  }
  return bytes;
}

} // namespace

void set_link(double latency_s, double bytes_per_s) {
  link_latency_s = latency_s;
  link_seconds_per_byte = bytes_per_s > 0 ? 1 / bytes_per_s : 0;
}

ProcessGroup::ProcessGroup(c10::intrusive_ptr<c10d::Backend> host)
    : c10d::Backend(host->getRank(), host->getSize()),
      host_(std::move(host)),
      stream_(stream_from_pool()),
      send_stream_(stream_from_pool()) {}

WorkPtr ProcessGroup::run(
    OpType type, const Tensors& inputs, const Tensors& outputs, std::function<WorkPtr()> call) {
  auto stream = type == OpType::SEND ? send_stream_ : stream_;
  make_stream_wait(stream, mark(current_stream()));
  std::vector<Access> accesses;
  for (auto& tensor : inputs) {
    accesses.push_back(access(tensor, false));
  }
  for (auto& tensor : outputs) {
    accesses.push_back(access(tensor, true));
  }
  // What a rank receives, or sends: all but its own part.
  auto received = std::max(bytes_of(inputs), bytes_of(outputs)) * (getSize() - 1) / std::max(getSize(), 1);
  launch_on(stream, "c10d::" + c10d::opTypeToString(type), accesses, [call = std::move(call), received] {
    auto begin = std::chrono::steady_clock::now();
    call()->wait();
    auto least = std::chrono::duration<double>(link_latency_s + received * link_seconds_per_byte);
    std::this_thread::sleep_until(begin + std::chrono::duration_cast<std::chrono::nanoseconds>(least));
  });
  Tensors tensors;
  if (!is_left_out(Edge::HOLD)) {
    tensors = inputs;
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  }
  return c10::make_intrusive<Work>(getRank(), type, mark(stream), tensors, outputs);
}

WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  bool is_source = options.rootRank == getRank();
  auto call = on_host(host_, &c10d::Backend::broadcast, tensors, options);
  return run(OpType::BROADCAST, is_source ? tensors : Tensors(), is_source ? Tensors() : tensors, call);
}

WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(OpType::ALLREDUCE, {}, tensors, on_host(host_, &c10d::Backend::allreduce, tensors, options));
}

WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto call = on_host(host_, &c10d::Backend::allreduce_coalesced, tensors, options);
  return run(OpType::ALLREDUCE_COALESCED, {}, tensors, call);
}

WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(OpType::REDUCE, {}, tensors, on_host(host_, &c10d::Backend::reduce, tensors, options));
}

WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto call = on_host(host_, &c10d::Backend::allgather, outputs, inputs, options);
  return run(OpType::ALLGATHER, inputs, join(outputs), call);
}

WorkPtr ProcessGroup::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  auto call = on_host(host_, &c10d::Backend::_allgather_base, output, input, options);
  return run(OpType::_ALLGATHER_BASE, {input}, {output}, call);
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto call = on_host(host_, &c10d::Backend::allgather_into_tensor_coalesced, outputs, inputs, options);
  return run(OpType::COALESCED, inputs, outputs, call);
}

WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return run(OpType::GATHER, inputs, join(outputs), on_host(host_, &c10d::Backend::gather, outputs, inputs, options));
}

WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  auto call = on_host(host_, &c10d::Backend::scatter, outputs, inputs, options);
  return run(OpType::SCATTER, join(inputs), outputs, call);
}

WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  auto call = on_host(host_, &c10d::Backend::reduce_scatter, outputs, inputs, options);
  return run(OpType::REDUCE_SCATTER, join(inputs), outputs, call);
}

WorkPtr ProcessGroup::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  auto call = on_host(host_, &c10d::Backend::_reduce_scatter_base, output, input, options);
  return run(OpType::_REDUCE_SCATTER_BASE, {input}, {output}, call);
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  auto call = on_host(host_, &c10d::Backend::reduce_scatter_tensor_coalesced, outputs, inputs, options);
  return run(OpType::COALESCED, inputs, outputs, call);
}

WorkPtr ProcessGroup::alltoall_base(
    Tensor& output,
    Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  auto call = on_host(host_, &c10d::Backend::alltoall_base, output, input, output_splits, input_splits, options);
  return run(OpType::ALLTOALL_BASE, {input}, {output}, call);
}

WorkPtr ProcessGroup::send(Tensors& tensors, int rank, int tag) {
  return run(OpType::SEND, tensors, {}, on_host(host_, &c10d::Backend::send, tensors, rank, tag));
}

WorkPtr ProcessGroup::recv(Tensors& tensors, int rank, int tag) {
  return run(OpType::RECV, {}, tensors, on_host(host_, &c10d::Backend::recv, tensors, rank, tag));
}

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions&) {
  // The options may name the device, which the process group of the host does not know.
  return run(OpType::BARRIER, {}, {}, on_host(host_, &c10d::Backend::barrier, c10d::BarrierOptions()));
}

} // namespace emulated
