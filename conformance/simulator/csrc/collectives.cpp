// Collectives of the device, carried by gloo between processes.
//
// A collective begins when its stream gets to it: it takes its inputs, poisons its outputs and starts gloo on memory of
// its own. It ends, and fills its outputs, when somebody needs it. `Work.wait()` makes the stream wait, not the host.
// So when gloo's messages arrive decides nothing, and the same seed has the same result.
#include "headers.h"

#include "tensors.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace sim {
namespace {
using at::Tensor;
using c10d::OpType;
using WorkP = c10::intrusive_ptr<c10d::Work>;
using Tensors = std::vector<Tensor>;

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
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device_of(device)});
    auto former = exchange_stream(device, stream);  // recorded on the group's stream, so that callbacks wait for it
    future->markCompleted(c10::IValue(outputs_));
    exchange_stream(device, former);
    return future;
  }

 private:
  RecordingP recording_;
  Tensors inputs_, outputs_;  // those until it is waited for, these as long as it is there
};

struct Collective {  // one that has been asked for: how it begins on memory of its own, and what becomes of that
  Tensors inputs, outputs;              // of the device
  std::function<WorkP(Tensors& in, Tensors& out)> start;
  bool in_place = false;                // inputs and outputs are the same
  int64_t divide_by = 1;
};

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  for (auto& tensor : tensors) out.push_back(alias_of(tensor));
  return out;
}

bool is_average(c10d::ReduceOp& op) {
  if (op != c10d::ReduceOp::AVG) return false;
  op = c10d::ReduceOp::SUM;
  return true;
}

class SimBackend final : public c10d::Backend {
 public:
  explicit SimBackend(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {
    if (size_ > 1) watch_for_held_up_host();
  }
  const std::string getBackendName() const override { return "simccl"; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkP broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Collective asked{{}, {}, [g = gloo_, options](Tensors& in, Tensors& out) { return g->broadcast(out.empty() ? in : out, options); }};
    (options.rootRank == rank_ ? asked.inputs : asked.outputs) = tensors;
    return issue("broadcast", OpType::BROADCAST, std::move(asked));
  }
  WorkP allreduce(Tensors& tensors, const c10d::AllreduceOptions& asked_options) override {
    if (on_host(tensors)) return gloo_->allreduce(tensors, asked_options);
    auto options = asked_options;
    auto average = is_average(options.reduceOp);
    return issue("all_reduce", OpType::ALLREDUCE, {tensors, tensors,
        [g = gloo_, options](Tensors&, Tensors& out) { return g->allreduce(out, options); }, true, average ? size_ : 1});
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
    auto average = is_average(options.reduceOp);
    return issue("reduce", OpType::REDUCE, {tensors, options.rootRank == rank_ ? tensors : Tensors{},
        [g = gloo_, options](Tensors& in, Tensors& out) { return g->reduce(out.empty() ? in : out, options); }, options.rootRank == rank_, average ? size_ : 1});
  }
  WorkP _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", OpType::_ALLGATHER_BASE, {{in}, {out},
        [g = gloo_, options](Tensors& in, Tensors& out) { return g->_allgather_base(out[0], in[0], options); }});
  }
  WorkP allgather(std::vector<Tensors>& outs, Tensors& in, const c10d::AllgatherOptions& options) override {
    return issue("all_gather", OpType::ALLGATHER, {in, outs.at(0), [g = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists{out};
      return g->allgather(lists, in, options);
    }});
  }
  WorkP allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return last_of(outs.size(), [&](size_t i) { return _allgather_base(outs[i], ins[i], options); });
  }
  WorkP _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    if (on_host({out})) return gloo_->_reduce_scatter_base(out, in, options);
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = options.reduceOp;
    auto average = is_average(reduce.reduceOp);
    auto whole = std::make_shared<Tensors>();
    auto asked = Collective{{in}, {out}, [g = gloo_, reduce, whole](Tensors& in, Tensors&) { return g->allreduce(in, reduce); }, false, average ? size_ : 1};
    return issue("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, std::move(asked), [rank = rank_, size = size_](Tensors& in, Tensors& out) {
      out[0].copy_(in[0].reshape(-1).chunk(size)[rank].view_as(out[0]));
    });
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
    return issue("gather", OpType::GATHER, {in, outs.empty() ? Tensors{} : outs[0], [g = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists(out.empty() ? 0 : 1, out);
      return g->gather(lists, in, options);
    }});
  }
  WorkP scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    return issue("scatter", OpType::SCATTER, {ins.empty() ? Tensors{} : ins[0], outs, [g = gloo_, options](Tensors& in, Tensors& out) {
      std::vector<Tensors> lists(in.empty() ? 0 : 1, in);
      return g->scatter(out, lists, options);
    }});
  }
  WorkP alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    return issue("all_to_all", OpType::ALLTOALL_BASE, {{in}, {out}, [g = gloo_, out_sizes, in_sizes, options](Tensors& in, Tensors& out) mutable {
      return g->alltoall_base(out[0], in[0], out_sizes, in_sizes, options);
    }});
  }
  WorkP send(Tensors& tensors, int to, int tag) override {
    return issue("send", OpType::SEND, {tensors, {}, [g = gloo_, to, tag](Tensors& in, Tensors&) { return g->send(in, to, tag); }});
  }
  WorkP recv(Tensors& tensors, int from, int tag) override {
    return issue("recv", OpType::RECV, {{}, tensors, [g = gloo_, from, tag](Tensors&, Tensors& out) { return g->recv(out, from, tag); }});
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

  // Of host memory they are gloo's own, and hold up the host: meanwhile the device goes on.
  bool on_host(const Tensors& tensors) {
    bool host = !tensors.empty() && tensors[0].is_cpu();
    if (host) settle();
    return host;
  }

  WorkP issue(const char* name, OpType op, Collective asked, std::function<void(Tensors& in, Tensors& out)> store = {}) {
    auto& tensors = asked.outputs.empty() ? asked.inputs : asked.outputs;
    TORCH_CHECK(!tensors.empty(), "simccl: ", name, " got no tensors");
    if (on_host(tensors)) return asked.start(asked.inputs, asked.outputs);
    int device = tensors[0].device().index();
    std::vector<Range> ranges;
    for (auto* some : {&asked.inputs, &asked.outputs})
      for (auto& tensor : *some) {
        bool write = some == &asked.outputs;
        TORCH_CHECK(tensor.device().type() == kSim, "simccl: ", name, " got a tensor on ", tensor.device());
        TORCH_CHECK(!write || tensor.is_non_overlapping_and_dense(), "simccl: ", name, " got an output that is not contiguous");
        ranges.push_back(range_of(tensor, write));
      }
    auto dtype = tensors[0].scalar_type();  // told at the call, as nccl does
    for (auto& tensor : asked.inputs) TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, "simccl: ", name, " got inputs of ", tensor.scalar_type(), " for ", dtype);
    if (!streams_.count(device)) streams_[device] = new_stream(device);
    StreamKey stream{device, streams_[device]};
    block(stream, record(current(device)));
    enqueue(stream, name, task_of(asked, std::move(store)), ranges, {{size_}});
    return c10::make_intrusive<SimWork>(record(stream), std::move(asked.inputs), std::move(asked.outputs), rank_, op);
  }

  // It does not keep the tensors: memory that is freed too early is to be seen.
  static Task task_of(const Collective& asked, std::function<void(Tensors& in, Tensors& out)> store) {
    struct Going {
      Tensors in, out;
      WorkP work;
    };
    auto going = std::make_shared<Going>();
    auto in = aliases(asked.inputs), out = aliases(asked.outputs);
    auto start = [going, in, out, begin = asked.start, in_place = asked.in_place] {
      Below below;
      for (auto& tensor : in) going->in.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      for (size_t i = 0; i < out.size(); i++) {
        going->out.push_back(in_place ? going->in[i] : at::empty(out[i].sizes(), out[i].options()));
        auto range = range_of(out[i], true);
        poison(const_cast<char*>(range.begin), static_cast<size_t>(range.end - range.begin));
      }
      going->work = begin(going->in, going->out);
    };
    auto finish = [going, out, store = std::move(store), divide_by = asked.divide_by] {
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
