#include "collectives.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

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

} // namespace

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
  launch_on(stream, "c10d::" + c10d::opTypeToString(type), accesses, [call = std::move(call)] { call()->wait(); });
  Tensors tensors;
  if (!is_left_out(Edge::HOLD)) {
    tensors = inputs;
    tensors.insert(tensors.end(), outputs.begin(), outputs.end());
  }
  return c10::make_intrusive<Work>(getRank(), type, mark(stream), tensors, outputs);
}

WorkPtr ProcessGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  bool is_source = options.rootRank == getRank();
  return run(
      OpType::BROADCAST,
      is_source ? tensors : Tensors(),
      is_source ? Tensors() : tensors,
      [host = host_, tensors = host_aliases(tensors), options]() mutable { return host->broadcast(tensors, options); });
}

WorkPtr ProcessGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return run(OpType::ALLREDUCE, {}, tensors, [host = host_, tensors = host_aliases(tensors), options]() mutable {
    return host->allreduce(tensors, options);
  });
}

WorkPtr ProcessGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return run(OpType::ALLREDUCE_COALESCED, {}, tensors, [host = host_, tensors = host_aliases(tensors), options]() mutable {
    return host->allreduce_coalesced(tensors, options);
  });
}

WorkPtr ProcessGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return run(OpType::REDUCE, {}, tensors, [host = host_, tensors = host_aliases(tensors), options]() mutable {
    return host->reduce(tensors, options);
  });
}

WorkPtr ProcessGroup::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run(
      OpType::ALLGATHER,
      inputs,
      join(outputs),
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->allgather(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  return run(
      OpType::_ALLGATHER_BASE,
      {input},
      {output},
      [host = host_, output = host_alias(output), input = host_alias(input), options]() mutable {
        return host->_allgather_base(output, input, options);
      });
}

WorkPtr ProcessGroup::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return run(
      OpType::COALESCED,
      inputs,
      outputs,
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->allgather_into_tensor_coalesced(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return run(
      OpType::GATHER,
      inputs,
      join(outputs),
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->gather(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  return run(
      OpType::SCATTER,
      join(inputs),
      outputs,
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->scatter(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  return run(
      OpType::REDUCE_SCATTER,
      join(inputs),
      outputs,
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->reduce_scatter(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  return run(
      OpType::_REDUCE_SCATTER_BASE,
      {input},
      {output},
      [host = host_, output = host_alias(output), input = host_alias(input), options]() mutable {
        return host->_reduce_scatter_base(output, input, options);
      });
}

WorkPtr ProcessGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  return run(
      OpType::COALESCED,
      inputs,
      outputs,
      [host = host_, outputs = host_aliases(outputs), inputs = host_aliases(inputs), options]() mutable {
        return host->reduce_scatter_tensor_coalesced(outputs, inputs, options);
      });
}

WorkPtr ProcessGroup::alltoall_base(
    Tensor& output,
    Tensor& input,
    std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits,
    const c10d::AllToAllOptions& options) {
  return run(
      OpType::ALLTOALL_BASE,
      {input},
      {output},
      [host = host_, output = host_alias(output), input = host_alias(input), output_splits, input_splits, options]() mutable {
        return host->alltoall_base(output, input, output_splits, input_splits, options);
      });
}

WorkPtr ProcessGroup::send(Tensors& tensors, int rank, int tag) {
  return run(OpType::SEND, tensors, {}, [host = host_, tensors = host_aliases(tensors), rank, tag]() mutable {
    return host->send(tensors, rank, tag);
  });
}

WorkPtr ProcessGroup::recv(Tensors& tensors, int rank, int tag) {
  return run(OpType::RECV, {}, tensors, [host = host_, tensors = host_aliases(tensors), rank, tag]() mutable {
    return host->recv(tensors, rank, tag);
  });
}

WorkPtr ProcessGroup::barrier(const c10d::BarrierOptions& options) {
  return run(OpType::BARRIER, {}, {}, [host = host_, options = c10d::BarrierOptions()] {
    return host->barrier(options);
  });
}

} // namespace emulated
