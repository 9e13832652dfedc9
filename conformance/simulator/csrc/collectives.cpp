// Collectives of the device, carried by gloo between processes.
//
// A collective begins when its stream gets to it: it takes its inputs, poisons its outputs and starts gloo on memory of
// its own. It ends, and fills its outputs, when somebody needs it. `Work.wait()` makes the stream wait, not the host.
// So when gloo's messages arrive decides nothing, and the same seed has the same result.
#include "messages.h"

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
  bool is_message = false;  // a message, or a batch of messages
};

constexpr int kAll = -1;  // no single peer

struct Batch {  // messages that progress together
  Tensors inputs, outputs;
  Messages sends, receives;
  std::vector<WorkP> on_host;
};

class HostWorks final : public c10d::Work {
 public:
  explicit HostWorks(std::vector<WorkP> works) : works_(std::move(works)) {}
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) work->wait(timeout);
    return true;
  }

 private:
  std::vector<WorkP> works_;
};

class Barrier final : public c10d::Work {
 public:
  Barrier(WorkP work, std::string what) : work_(std::move(work)), what_(std::move(what)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    wait_for_peers(what_, [this] { return work_->isCompleted(); });
    return work_->wait(timeout);
  }

 private:
  WorkP work_;
  std::string what_;
};

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  for (auto& tensor : tensors) out.push_back(alias_of(tensor));
  return out;
}

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, StoreP store, std::vector<int> ranks)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), store_(std::move(store)), ranks_(std::move(ranks)) {
    if (size_ > 1) watch_for_held_up_host();
  }
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
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
    return add_message(to, tensors, tag, {rank_, to}, "send to rank ", &Batch::inputs, &Batch::sends,
        [&] { return gloo_->send(tensors, to, tag); });
  }
  WorkP recv(Tensors& tensors, int from, int tag) override {
    return add_message(from, tensors, tag, {from, rank_}, "recv from rank ", &Batch::outputs, &Batch::receives,
        [&] { return gloo_->recv(tensors, from, tag); });
  }
  void startCoalescing() override { batch_.emplace(); }
  WorkP endCoalescing() override {
    auto batch = *std::exchange(batch_, std::nullopt);
    if (!batch.on_host.empty()) return c10::make_intrusive<HostWorks>(std::move(batch.on_host));
    if (batch.sends.empty() && batch.receives.empty())  // only collectives, each issued on its own
      return work_of(stream_of(current_device(), kAll), {}, {}, OpType::COALESCED);
    return issue(std::move(batch), kAll, OpType::COALESCED);  // on the stream of the collectives, like NCCL
  }
  WorkP barrier(const c10d::BarrierOptions& options) override {
    settle();
    return c10::make_intrusive<Barrier>(gloo_->barrier(options), "barrier, called at " + line_of_program(here()));
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
    TORCH_CHECK(!host || !batch_, "simccl: collectives of host memory are not coalesced");
    if (host) settle();
    return host;
  }

  template <class F>
  WorkP add_message(int peer, const Tensors& tensors, int tag, std::pair<int, int> way, const char* name,
      Tensors Batch::*its_tensors, Messages Batch::*its_messages, F&& on_host) {
    if (!tensors.empty() && tensors[0].is_cpu()) {  // sent by gloo; the peer may first need queued messages
      begin_queued();
      auto work = on_host();
      if (batch_) batch_->on_host.push_back(work);
      return work;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!anybody_captures(), "simccl: messages are not captured by graphs");
    Batch alone;
    auto& batch = batch_ ? *batch_ : alone;
    for (auto& tensor : tensors) {
      auto key = std::to_string(way.first) + ">" + std::to_string(way.second) + "/" + std::to_string(messages_[way]++);
      (batch.*its_tensors).push_back(tensor);
      (batch.*its_messages).push_back({key, name + std::to_string(ranks_.at(peer)), tag, here()});
    }
    return batch_ ? nullptr : issue(std::move(alone), peer, way.first == rank_ ? OpType::SEND : OpType::RECV);
  }

  WorkP issue(Batch batch, int peer, OpType op) {
    std::string name;
    for (auto* messages : {&batch.sends, &batch.receives})
      for (auto& message : *messages) name += (name.empty() ? "" : ", ") + message.name;
    auto start = [store = store_, sends = batch.sends, receives = batch.receives](auto&, auto& in, auto& out) -> WorkP {
      send_messages(store, sends, in);
      return receives.empty() ? nullptr : receive_messages(store, receives, out);
    };
    Collective asked{batch.inputs, batch.outputs, start};
    asked.is_message = true;
    return issue(peer == kAll ? "batch_isend_irecv (" + name + ")" : name, op, std::move(asked), peer);
  }

  StreamKey stream_of(int device, int peer) {
    auto [found, made] = streams_.try_emplace({device, peer}, 0);
    if (made) found->second = new_stream(device);
    return {device, found->second};
  }

  WorkP work_of(StreamKey stream, Tensors inputs, Tensors outputs, OpType op) const {
    return c10::make_intrusive<SimWork>(record(stream), std::move(inputs), std::move(outputs), rank_, op);
  }

  WorkP issue(const std::string& name, OpType op, Collective asked, int peer = kAll) {
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
        TORCH_CHECK_TYPE(write || asked.is_message || tensor.scalar_type() == dtype,
            "simccl: ", name, " got inputs of ", tensor.scalar_type(), " for ", dtype);
        TORCH_CHECK(!write || tensor.is_non_overlapping_and_dense(), "simccl: ", name, " got an output that is not contiguous");
        ranges.push_back(range_of(tensor, write));
      }
    auto stream = stream_of(device, peer);
    block(stream, record(current(device)));
    enqueue(stream, name, task_of(asked), ranges, {{size_}});
    return work_of(stream, std::move(asked.inputs), std::move(asked.outputs), op);
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
    if (asked.is_message && out.empty()) return {[start, finish] { start(), finish(); }, nullptr, nullptr, true};
    return {start, [going] { return !going->work || going->work->isCompleted(); }, finish, asked.is_message};
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StoreP store_;
  std::vector<int> ranks_;  // global ranks, by rank of the group
  std::map<std::pair<int, int>, int64_t> streams_;  // by device and peer (kAll: collectives), like NCCL
  std::map<std::pair<int, int>, int64_t> messages_;  // number of messages by sender and receiver
  std::optional<Batch> batch_;
};
}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& gloo, const StoreP& store, std::vector<int> ranks)
      -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<SimBackend>(gloo, store->clone(), std::move(ranks)); });
  m.def("meet_peers", [](const StoreP& store, int rank, int size) { meet_peers(store->clone(), rank, size); });
  m.def("leave_peers", &leave_peers);
}
}  // namespace sim
