// A backend of torch.distributed with NCCL's manners: each group has a stream of its own on a device, where collectives
// run one after the other; wait() makes the current stream wait and returns at once. A gloo group moves the bytes.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <cstdlib>
#include <iostream>

#include "runtime.hpp"

namespace simulated {

using Tensors = std::vector<at::Tensor>;
using c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// What a collective is given, as gloo gets it.
inline at::Tensor host_view(const at::Tensor& t) {
  TORCH_CHECK(t.device().type() == kType, "No backend type associated with device type ", t.device().type(),
              " (simulated NCCL got a tensor on ", t.device(), ")");
  TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
  auto* start = static_cast<char*>(const_cast<void*>(t.storage().data()));
  auto* place = start ? static_cast<char*>(twin(start)) + t.storage_offset() * t.element_size() : nullptr;
  return at::from_blob(place, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}
inline Tensors host_views(const Tensors& all) {
  Tensors made;
  for (auto& each : all) made.push_back(host_view(each));
  return made;
}

// A collective that has been issued. It keeps its tensors until it is waited for, or has run: NCCL's stash.
class Issued final : public c10d::Work {
 public:
  Issued(PointPtr done, Stream stream, Tensors outputs, Tensors kept, std::shared_ptr<std::exception_ptr> error, int rank,
         OpType type)
      : Work(rank, type), done_(std::move(done)), stream_(stream), outputs_(std::move(outputs)), kept_(std::move(kept)),
        error_(std::move(error)) {
    // As NCCL's: complete at once, and who takes the value waits for it in its stream.
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<Device>{stream.device()});
    Guard guard;
    auto before = guard.exchangeStream(stream);
    future_->markCompleted(at::IValue(outputs_));
    guard.exchangeStream(before);
  }
  bool isCompleted() override {
    refuse_capture("the query of a collective");
    return done_->reached();
  }
  bool isSuccess() const override { return done_->reached() && !*error_; }
  std::exception_ptr exception() const override { return done_->reached() ? *error_ : nullptr; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    hold(queue(current(stream_.device_index())), done_);
    kept_.clear();
  }
  void wait_on_host() {
    counts().waits++;
    wait_for(done_);
  }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  PointPtr done_;
  Stream stream_;
  Tensors outputs_, kept_;
  std::shared_ptr<std::exception_ptr> error_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// One collective, as the watchdog of torch's process group speaks of it.
struct Watched {
  int rank;
  int64_t number;
  OpType type;
  int64_t elements;
  std::chrono::milliseconds limit;
};

// What that watchdog does when a collective's time is up: its words, the flight recorder's file, and abort().
[[noreturn]] inline void end_by_watchdog(const Watched& of) {
  if (c10d::getCvarBool({"TORCH_NCCL_DUMP_ON_TIMEOUT"}, true))
    c10d::DebugInfoWriter::getWriter(of.rank).write(c10d::dump_fr_trace(true, false, false));
  auto what = c10::str("[Rank ", of.rank, "] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=", of.number,
                       ", OpType=", c10d::opTypeToString(of.type), ", NumelIn=", of.elements, ", NumelOut=", of.elements,
                       ", Timeout(ms)=", of.limit.count(), ") ran for ", of.limit.count() + 3,
                       " milliseconds before timing out.");
  std::cerr << "[rank" << of.rank << "]:[E simulated] " << what << '\n'
            << "[rank" << of.rank << "]:[E simulated] [PG ID 0 PG GUID 0(default_pg) Rank " << of.rank
            << "] Process group watchdog thread terminated with exception: " << what << std::endl;
  std::abort();
}

class Collectives final : public c10d::Backend {
 public:
  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds limit)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), limit_(limit) {
    static std::atomic<StreamId> last{1 << 20};
    stream_ = ++last;
  }
  const std::string getBackendName() const override { return "nccl"; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto host = host_views(tensors);
    auto wanted = options;
    bool average = options.reduceOp == c10d::ReduceOp::AVG;
    if (average) wanted.reduceOp = c10d::ReduceOp::SUM;
    return issue(OpType::ALLREDUCE, tensors, {}, [gloo = gloo_, host, wanted, average, size = size_]() mutable {
      gloo->allreduce(host, wanted)->wait();
      if (average)
        for (auto& each : host) each.div_(size);
    });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    WorkPtr last;
    for (auto& each : tensors) {
      Tensors one{each};
      last = allreduce(one, options);
    }
    return last;
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto host = host_views(tensors);
    return issue(OpType::BROADCAST, tensors, {},
                 [gloo = gloo_, host, options]() mutable { gloo->broadcast(host, options)->wait(); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto host = host_views(tensors);
    return issue(OpType::REDUCE, tensors, {},
                 [gloo = gloo_, host, options]() mutable { gloo->reduce(host, options)->wait(); });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Tensors> to;
    for (auto& each : outputs) to.push_back(host_views(each));
    auto from = host_views(inputs);
    return issue(OpType::ALLGATHER, outputs.at(0), inputs,
                 [gloo = gloo_, to, from, options]() mutable { gloo->allgather(to, from, options)->wait(); });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    TORCH_CHECK(output.numel() == input.numel() * size_, "output tensor size must be equal to world_size times input");
    auto to = host_view(output), from = host_view(input);
    return issue(OpType::_ALLGATHER_BASE, {output}, {input}, [gloo = gloo_, to, from, options, size = size_] {
      std::vector<Tensors> rows{to.view({size, -1}).unbind(0)};
      Tensors own{from.reshape(-1)};
      gloo->allgather(rows, own, options)->wait();
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(input.numel() == output.numel() * size_, "input tensor must be the same size as output times world size");
    auto to = host_view(output), from = host_view(input);
    c10d::AllreduceOptions wanted;
    bool average = options.reduceOp == c10d::ReduceOp::AVG;
    if (!average) wanted.reduceOp = options.reduceOp;
    return issue(OpType::_REDUCE_SCATTER_BASE, {output}, {input},
                 [gloo = gloo_, to, from, wanted, average, size = size_, rank = rank_] {
                   Tensors sum{from.clone()};
                   gloo->allreduce(sum, wanted)->wait();
                   to.view(-1).copy_(sum[0].view({size, -1})[rank]);
                   if (average) to.div_(size);
                 });
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes,
                        std::vector<int64_t>& from_sizes, const c10d::AllToAllOptions& options) override {
    auto to = host_view(output), from = host_view(input);
    return issue(OpType::ALLTOALL_BASE, {output}, {input}, [gloo = gloo_, to, from, to_sizes, from_sizes, options]() mutable {
      gloo->alltoall_base(to, from, to_sizes, from_sizes, options)->wait();
    });
  }
  WorkPtr send(Tensors& tensors, int rank, int tag) override {
    auto host = host_views(tensors);
    return issue(OpType::SEND, {}, tensors, [gloo = gloo_, host, rank, tag]() mutable { gloo->send(host, rank, tag)->wait(); });
  }
  WorkPtr recv(Tensors& tensors, int rank, int tag) override {
    auto host = host_views(tensors);
    return issue(OpType::RECV, tensors, {}, [gloo = gloo_, host, rank, tag]() mutable { gloo->recv(host, rank, tag)->wait(); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto work = issue(OpType::BARRIER, {}, {}, [gloo = gloo_, options] { gloo->barrier(options)->wait(); });
    static_cast<Issued*>(work.get())->wait_on_host();
    return work;
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void shutdown() override {}

 private:
  WorkPtr issue(OpType type, const Tensors& outputs, const Tensors& inputs, std::function<void()> run) {
    counts().collectives++;
    auto device = outputs.empty() ? inputs.empty() ? current_device : inputs[0].device().index()
                                  : outputs[0].device().index();
    auto stream = stream_of(device, stream_);
    auto& q = queue(stream);
    hold(q, mark(queue(current(device))));
    auto error = std::make_shared<std::exception_ptr>();
    int64_t elements = 0;
    for (auto& each : inputs.empty() ? outputs : inputs) elements += each.numel();
    Watched watched{rank_, ++issued_, type, elements, limit_};
    put(q, [run = std::move(run), error, watched] {
      try {
        run();
      } catch (...) {
        try {
          throw;
        } catch (const std::exception& failure) {
          if (std::string(failure.what()).find("Timed out waiting") != std::string::npos) end_by_watchdog(watched);
        } catch (...) {
        }
        *error = std::current_exception();
        throw;
      }
    });
    auto kept = outputs;
    kept.insert(kept.end(), inputs.begin(), inputs.end());
    return c10::make_intrusive<Issued>(mark(q), stream, outputs, kept, error, rank_, type);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::chrono::milliseconds limit_;
  int64_t issued_ = 0;
  StreamId stream_;
};

}  // namespace simulated
