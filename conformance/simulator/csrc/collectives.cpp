// Collectives of the device, carried by gloo between processes.
//
// A collective begins when its stream gets to it: it takes its inputs, poisons its outputs and starts gloo on memory of
// its own. It ends, and fills its outputs, when somebody needs it. `Work.wait()` makes the stream wait, not the host.
// So when gloo's messages arrive decides nothing, and the same seed has the same result.
#include "tensors.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {
using at::Tensor;
using c10d::OpType;
using WorkP = c10::intrusive_ptr<c10d::Work>;

class SimWork final : public c10d::Work {
 public:
  SimWork(RecordingP recording, Tensors inputs, Tensors outputs, int rank, OpType op)
      : c10d::Work(rank, op), recording_(std::move(recording)), inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return query(recording_); }
  void synchronize() override {
    int device = recording_->stream.first;
    block(current(device), recording_);
    inputs_.clear();  // as nccl's: who frees them from here on has been made to wait
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  std::vector<Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto [device, stream] = recording_->stream;
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_of(device)});
    auto former = exchange_stream({device, stream});  // recorded on the group's stream, so that callbacks wait for it
    future->markCompleted(c10::IValue(outputs_));
    exchange_stream({device, former});
    return future;
  }

 private:
  RecordingP recording_;
  Tensors inputs_, outputs_;  // those until it is waited for, these as long as it is there
};

struct Collective {  // one that has been asked for: how it begins on memory of its own, and what becomes of that
  Tensors inputs, outputs;              // of the device
  std::function<WorkP(c10d::Backend& gloo, Tensors& in, Tensors& out)> start;
  bool in_place = false;                // inputs and outputs are the same
  int64_t divide_by = 1;
  std::function<void(Tensors& in, Tensors& out)> store = nullptr;  // what comes of it, where `start` leaves that in its inputs
};

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  for (auto& tensor : tensors) out.push_back(alias_of(tensor));
  return out;
}

class SimBackend final : public c10d::Backend {
 public:
  explicit SimBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    if (size_ > 1) watch_for_held_up_host();
  }
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkP broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Collective asked{{}, {}, [=](auto& gloo, auto& in, auto& out) { return gloo.broadcast(out.empty() ? in : out, options); }};
    (options.rootRank == rank_ ? asked.inputs : asked.outputs) = tensors;
    return issue("broadcast", OpType::BROADCAST, std::move(asked));
  }
  WorkP allreduce(Tensors& tensors, const c10d::AllreduceOptions& asked_options) override {
    if (on_host(tensors)) return gloo_->allreduce(tensors, asked_options);
    auto options = asked_options;
    auto count = divisor(options.reduceOp);
    return issue("all_reduce", OpType::ALLREDUCE, {tensors, tensors,
        [options](auto& gloo, auto&, auto& out) { return gloo.allreduce(out, options); }, true, count});
  }
  WorkP allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& asked_options) override {
    if (on_host(tensors)) return gloo_->allreduce_coalesced(tensors, asked_options);
    c10d::AllreduceOptions options;
    options.reduceOp = asked_options.reduceOp;
    return last_of(tensors.size(), [&](size_t i) {
      Tensors one{tensors[i]};
      return allreduce(one, options);
    });
  }
  WorkP reduce(Tensors& tensors, const c10d::ReduceOptions& asked_options) override {
    if (on_host(tensors)) return gloo_->reduce(tensors, asked_options);
    auto options = asked_options;
    auto count = divisor(options.reduceOp);
    bool root = options.rootRank == rank_;
    return issue("reduce", OpType::REDUCE, {tensors, root ? tensors : Tensors{},
        [options](auto& gloo, auto& in, auto& out) { return gloo.reduce(out.empty() ? in : out, options); }, root, count});
  }
  WorkP _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", OpType::_ALLGATHER_BASE, {{in}, {out},
        [options](auto& gloo, auto& in, auto& out) { return gloo._allgather_base(out[0], in[0], options); }});
  }
  WorkP allgather(std::vector<Tensors>& outs, Tensors& in, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", OpType::ALLGATHER, {in, outs.at(0), [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists{out};
      return gloo.allgather(lists, in, options);
    }});
  }
  WorkP allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return last_of(outs.size(), [&](size_t i) { return _allgather_base(outs[i], ins[i], options); });
  }
  WorkP _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    if (on_host({out})) return gloo_->_reduce_scatter_base(out, in, options);
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = options.reduceOp;
    auto count = divisor(reduce.reduceOp);
    auto store = [rank = rank_, size = size_](Tensors& in, Tensors& out) {
      out[0].copy_(in[0].reshape(-1).chunk(size)[rank].view_as(out[0]));
    };
    return issue("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, {{in}, {out},
        [reduce](auto& gloo, auto& in, auto&) { return gloo.allreduce(in, reduce); }, false, count, store});
  }
  WorkP reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    return last_of(outs.size(), [&](size_t i) { return _reduce_scatter_base(outs[i], ins[i], options); });
  }
  WorkP reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    if (on_host(outs)) return gloo_->reduce_scatter(outs, ins, options);
    auto whole = at::stack(ins.at(0));
    return _reduce_scatter_base(outs.at(0), whole, options);
  }
  WorkP gather(std::vector<Tensors>& outs, Tensors& in, const c10d::GatherOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists(out.empty() ? 0 : 1, out);
      return gloo.gather(lists, in, options);
    };
    return issue("gather", OpType::GATHER, {in, outs.empty() ? Tensors{} : outs[0], start});
  }
  WorkP scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists(in.empty() ? 0 : 1, in);
      return gloo.scatter(out, lists, options);
    };
    return issue("scatter", OpType::SCATTER, {ins.empty() ? Tensors{} : ins[0], outs, start});
  }
  WorkP alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto start = [out_sizes, in_sizes, options](auto& gloo, auto& in, auto& out) mutable {
      return gloo.alltoall_base(out[0], in[0], out_sizes, in_sizes, options);
    };
    return issue("all_to_all", OpType::ALLTOALL_BASE, {{in}, {out}, start});
  }
  WorkP send(Tensors& tensors, int to, int tag) override {
    return issue("send", OpType::SEND, {tensors, {}, [=](auto& gloo, auto& in, auto&) { return gloo.send(in, to, tag); }});
  }
  WorkP recv(Tensors& tensors, int from, int tag) override {
    return issue("recv", OpType::RECV, {{}, tensors, [=](auto& gloo, auto&, auto& out) { return gloo.recv(out, from, tag); }});
  }
  WorkP barrier(const c10d::BarrierOptions& options) override {
    settle();
    return gloo_->barrier(options);
  }

 private:
  template <class F>
  static WorkP last_of(size_t count, F&& issue_one) {
    WorkP last;
    for (size_t i = 0; i < count; i++) last = issue_one(i);
    return last;
  }

  // Gloo has no averages: it adds up, and the device divides by this.
  int64_t divisor(c10d::ReduceOp& op) const {
    if (op != c10d::ReduceOp::AVG) return 1;
    op = c10d::ReduceOp::SUM;
    return size_;
  }

  // Of host memory they are gloo's own, and hold up the host: meanwhile the device goes on.
  bool on_host(const Tensors& tensors) {
    bool host = !tensors.empty() && tensors[0].is_cpu();
    if (host) settle();
    return host;
  }

  WorkP issue(const char* name, OpType op, Collective asked) {
    auto& tensors = asked.outputs.empty() ? asked.inputs : asked.outputs;
    TORCH_CHECK(!tensors.empty(), "simccl: ", name, " got no tensors");
    if (on_host(tensors)) return asked.start(*gloo_, asked.inputs, asked.outputs);
    int device = tensors[0].device().index();
    std::vector<Range> ranges;
    auto dtype = tensors[0].scalar_type();  // told at the call, as nccl does
    for (auto* some : {&asked.inputs, &asked.outputs})
      for (auto& tensor : *some) {
        bool write = some == &asked.outputs;
        TORCH_CHECK(tensor.device().type() == kSim, "simccl: ", name, " got a tensor on ", tensor.device());
        TORCH_CHECK_TYPE(write || tensor.scalar_type() == dtype,
            "simccl: ", name, " got inputs of ", tensor.scalar_type(), " for ", dtype);
        TORCH_CHECK(!write || tensor.is_non_overlapping_and_dense(), "simccl: ", name, " got an output that is not contiguous");
        ranges.push_back(range_of(tensor, write));
      }
    if (!streams_.count(device)) streams_[device] = new_stream(device);
    StreamKey stream{device, streams_[device]};
    block(stream, record(current(device)));
    enqueue(stream, name, task_of(asked), ranges, {{size_}});
    return c10::make_intrusive<SimWork>(record(stream), std::move(asked.inputs), std::move(asked.outputs), rank_, op);
  }

  // It does not keep the tensors: memory that is freed too early is to be seen.
  Task task_of(const Collective& asked) const {
    struct Going {
      Tensors in, out;
      WorkP work;
    };
    auto going = std::make_shared<Going>();
    auto in = aliases(asked.inputs), out = aliases(asked.outputs);
    auto start = [going, in, out, gloo = gloo_, begin = asked.start, in_place = asked.in_place] {
      Below below;
      for (auto& tensor : in) going->in.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      for (size_t i = 0; i < out.size(); i++) {
        going->out.push_back(in_place ? going->in[i] : at::empty(out[i].sizes(), out[i].options()));
        auto range = range_of(out[i], true);
        poison(range.begin, range.end - range.begin);
      }
      going->work = begin(*gloo, going->in, going->out);
    };
    auto finish = [going, out, store = asked.store, divide_by = asked.divide_by] {
      Below below;
      if (going->work) going->work->wait();  // what went wrong
      if (store) store(going->in, going->out);
      for (size_t i = 0; i < out.size(); i++) {
        if (divide_by > 1) going->out[i].div_(divide_by);
        auto to = out[i];
        to.copy_(going->out[i]);
      }
      *going = {};
    };
    return {start, [going] { return !going->work || going->work->isCompleted(); }, finish};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::map<int, int64_t> streams_;  // one for each device, as nccl has
};
}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SimBackend>(gloo);
  });
}
}  // namespace sim
