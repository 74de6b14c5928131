// A process group whose collectives run on a stream of its own: the host goes on at once, and waiting for a collective
// makes the current stream wait. The ranks meet in a process group of host memory underneath.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "streams.h"

namespace emulated {

// From now on no collective is faster than on a link like this, in all process groups; 0 bytes per second for any speed.
void set_link(double latency_s, double bytes_per_s);

class ProcessGroup : public c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit ProcessGroup(c10::intrusive_ptr<c10d::Backend> host);

  const std::string getBackendName() const override {
    return "emulated";
  }
  void setSequenceNumberForGroup() override {
    host_->setSequenceNumberForGroup();
  }
  uint64_t getSequenceNumberForGroup() override {
    return host_->getSequenceNumberForGroup();
  }
  void setGroupUid(const std::string& uid) override {
    c10d::Backend::setGroupUid(uid);
    host_->setGroupUid(uid);
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    host_->setTimeout(timeout);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  WorkPtr alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& options) override;
  WorkPtr send(Tensors& tensors, int rank, int tag) override;
  WorkPtr recv(Tensors& tensors, int rank, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions& options) override;

 private:
  // Makes this group's stream wait for the current one and enqueues `call` on it.
  WorkPtr run(
      c10d::OpType type, const Tensors& inputs, const Tensors& outputs, std::function<WorkPtr()> call);

  const c10::intrusive_ptr<c10d::Backend> host_;
  const StreamNumber stream_;
  const StreamNumber send_stream_; // a message leaves only while the other rank receives: it must not be in the way
};

} // namespace emulated
