// Collectives of the device, carried by gloo between processes.
//
// A collective begins when its stream reaches it: it copies its inputs, poisons its outputs and starts gloo on the copies.
// It ends, and fills its outputs, when its result is needed. `Work.wait()` makes the stream wait, not the host. So the time
// at which gloo's messages arrive changes nothing, and the same seed has the same result.
#include "messages.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <thread>

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
    inputs_.clear();  // like NCCL's: the stream that frees them now waits
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
  Tensors inputs_, outputs_;  // inputs until the wait, outputs as long as the work
};

struct Collective {
  Tensors inputs = {}, outputs = {};  // tensors of the device
  std::function<WorkP(c10d::Backend& gloo, Tensors& in, Tensors& out)> start = nullptr;
  std::function<void(Tensors& in, Tensors& out)> store = nullptr;  // write the result, if `start` leaves it in the inputs
  bool in_place = false;    // inputs and outputs are the same
  bool is_message = false;  // a message, or a batch of messages
  int root = -1;            // if the collective has one
  double factor = 1;        // multiplies the inputs before the sum
  int64_t divide_by = 1;    // divides the sum
};

constexpr int kAll = -1;  // no single peer

struct Batch {  // collectives and messages between startCoalescing and endCoalescing, and messages that progress together
  int device = -1;  // of its tensors
  Tensors inputs, outputs;
  Messages sends, receives;
  std::vector<WorkP> on_host;
  std::string first_of_host, first_of_device;  // the first message of each kind of memory
  OpenedBy opened_by = {};
};

// The collectives of a group that its ranks have begun, in the store of the group. Ranks begin them in the same order.
class Begun {
 public:
  Begun(StoreP store, std::string kind, int rank, int size)
      : store_(std::move(store)), kind_(std::move(kind)), rank_(rank), size_(size) {}
  // Record that this rank begins a collective. Return a function that tells whether all ranks have begun it.
  std::function<bool()> begin(const std::string& name) {
    if (size_ == 1) return [] { return true; };
    auto number = ++count_;
    auto text = std::to_string(number) + " " + name;
    store_->set(key_of(rank_), text);
    return [store = store_, number, text, keys = keys_of_others()] {
      return std::all_of(keys.begin(), keys.end(), [&](auto& key) {
        if (!store->check({key})) return false;
        auto theirs = store->get_to_str(key);
        return theirs == text || std::stoll(theirs) > number;
      });
    };
  }

 private:
  std::string key_of(int rank) const { return "sim.begun." + kind_ + "." + std::to_string(rank); }
  std::vector<std::string> keys_of_others() const {
    std::vector<std::string> keys;
    for (int rank = 0; rank < size_; rank++)
      if (rank != rank_) keys.push_back(key_of(rank));
    return keys;
  }

  StoreP store_;
  std::string kind_;
  int rank_, size_;
  int64_t count_ = 0;
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

// Work of gloo in host memory. A wait for it is reported to the peers, like waits for the device.
class HostWork final : public c10d::Work {
 public:
  HostWork(WorkP work, std::string what, std::function<bool()> is_in_flight)
      : work_(std::move(work)), what_(std::move(what)), is_in_flight_(std::move(is_in_flight)) {}
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  int sourceRank() const override { return work_->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!is_in_flight_) return wait_in_thread(timeout);
    wait_for_peers(what_, [this] { return work_->isCompleted(); }, is_in_flight_);
    return work_->wait(timeout);
  }
  std::vector<Tensor> result() override { return work_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return work_->getFuture(); }

 private:
  // Messages of gloo say that they are complete only after a wait for them.
  bool wait_in_thread(std::chrono::milliseconds timeout) {
    struct Wait {
      std::atomic<bool> is_over{false};
      std::exception_ptr error;
    };
    auto waiting = std::make_shared<Wait>();
    std::thread([waiting, work = work_, timeout] {
      try {
        work->wait(timeout);
      } catch (...) {
        waiting->error = std::current_exception();
      }
      waiting->is_over = true;
    }).detach();
    wait_for_peers(what_, [waiting] { return waiting->is_over.load(); });
    if (waiting->error) std::rethrow_exception(waiting->error);
    return true;
  }

  WorkP work_;
  std::string what_;
  std::function<bool()> is_in_flight_;  // null for messages
};

Tensors aliases(const Tensors& tensors) {
  Tensors out;
  for (auto& tensor : tensors) out.push_back(alias_of(tensor));
  return out;
}

class SimBackend final : public c10d::Backend {
 public:
  SimBackend(c10::intrusive_ptr<c10d::Backend> gloo, StoreP store, std::vector<int> ranks)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), store_(std::move(store)), ranks_(std::move(ranks)),
        begun_(std::make_shared<Begun>(store_, "device", rank_, size_)), begun_on_host_(store_, "host", rank_, size_) {
    if (size_ > 1) watch_for_held_up_host();
  }
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return true; }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }

  WorkP broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Collective collective{
        .start = [=](auto& gloo, auto& in, auto& out) { return gloo.broadcast(out.empty() ? in : out, options); },
        .root = static_cast<int>(options.rootRank)};
    (options.rootRank == rank_ ? collective.inputs : collective.outputs) = tensors;
    return issue("broadcast", OpType::BROADCAST, std::move(collective));
  }
  WorkP allreduce(Tensors& tensors, const c10d::AllreduceOptions& requested) override {
    if (on_host(tensors)) return on_gloo("all_reduce", gloo_->allreduce(tensors, requested));
    Collective collective{.inputs = tensors, .outputs = tensors, .in_place = true};
    auto options = requested;
    options.reduceOp = op_of_gloo(requested.reduceOp, collective);
    collective.start = [=](auto& gloo, auto&, auto& out) { return gloo.allreduce(out, options); };
    return issue("all_reduce", OpType::ALLREDUCE, std::move(collective));
  }
  WorkP allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& requested) override {
    if (on_host(tensors)) return on_gloo("all_reduce", gloo_->allreduce_coalesced(tensors, requested));
    c10d::AllreduceOptions options;
    options.reduceOp = requested.reduceOp;
    return last_of(tensors.size(), [&](size_t i) {
      Tensors tensor{tensors[i]};
      return allreduce(tensor, options);
    });
  }
  WorkP reduce(Tensors& tensors, const c10d::ReduceOptions& requested) override {
    if (on_host(tensors)) return on_gloo("reduce", gloo_->reduce(tensors, requested));
    bool is_root = requested.rootRank == rank_;
    Collective collective{.inputs = tensors, .outputs = is_root ? tensors : Tensors{}, .in_place = is_root,
        .root = static_cast<int>(requested.rootRank)};
    auto options = requested;
    options.reduceOp = op_of_gloo(requested.reduceOp, collective);
    collective.start = [=](auto& gloo, auto& in, auto& out) { return gloo.reduce(out.empty() ? in : out, options); };
    return issue("reduce", OpType::REDUCE, std::move(collective));
  }
  WorkP _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) { return gloo._allgather_base(out[0], in[0], options); };
    return issue("all_gather", OpType::_ALLGATHER_BASE, {.inputs = {in}, .outputs = {out}, .start = start});
  }
  WorkP allgather(std::vector<Tensors>& outs, Tensors& in, const c10d::AllgatherOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists{out};
      return gloo.allgather(lists, in, options);
    };
    return issue("all_gather", OpType::ALLGATHER, {.inputs = in, .outputs = outs.at(0), .start = start});
  }
  WorkP allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return last_of(outs.size(), [&](size_t i) { return _allgather_base(outs[i], ins[i], options); });
  }
  WorkP _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    if (on_host({out})) return on_gloo("reduce_scatter", gloo_->_reduce_scatter_base(out, in, options));
    auto store = [rank = rank_, size = size_](Tensors& in, Tensors& out) {
      out[0].copy_(in[0].reshape(-1).chunk(size)[rank].view_as(out[0]));
    };
    Collective collective{.inputs = {in}, .outputs = {out}, .store = store};
    c10d::AllreduceOptions reduce;
    reduce.reduceOp = op_of_gloo(options.reduceOp, collective);
    collective.start = [reduce](auto& gloo, auto& in, auto&) { return gloo.allreduce(in, reduce); };
    return issue("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, std::move(collective));
  }
  WorkP reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    return last_of(outs.size(), [&](size_t i) { return _reduce_scatter_base(outs[i], ins[i], options); });
  }
  WorkP reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    if (on_host(outs)) return on_gloo("reduce_scatter", gloo_->reduce_scatter(outs, ins, options));
    auto whole = at::stack(ins.at(0));
    return _reduce_scatter_base(outs.at(0), whole, options);
  }
  WorkP gather(std::vector<Tensors>& outs, Tensors& in, const c10d::GatherOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists(out.empty() ? 0 : 1, out);
      return gloo.gather(lists, in, options);
    };
    return issue("gather", OpType::GATHER, {.inputs = in, .outputs = outs.empty() ? Tensors{} : outs[0], .start = start,
        .root = static_cast<int>(options.rootRank)});
  }
  WorkP scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    auto start = [options](auto& gloo, auto& in, auto& out) {
      std::vector<Tensors> lists(in.empty() ? 0 : 1, in);
      return gloo.scatter(out, lists, options);
    };
    return issue("scatter", OpType::SCATTER, {.inputs = ins.empty() ? Tensors{} : ins[0], .outputs = outs, .start = start,
        .root = static_cast<int>(options.rootRank)});
  }
  WorkP alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
      const c10d::AllToAllOptions& options) override {
    auto start = [out_sizes, in_sizes, options](auto& gloo, auto& in, auto& out) mutable {
      return gloo.alltoall_base(out[0], in[0], out_sizes, in_sizes, options);
    };
    return issue("all_to_all", OpType::ALLTOALL_BASE, {.inputs = {in}, .outputs = {out}, .start = start});
  }
  WorkP send(Tensors& tensors, int to, int tag) override {
    return add_message(to, tensors, tag, /*is_send=*/true, [&] { return gloo_->send(tensors, to, tag); });
  }
  WorkP recv(Tensors& tensors, int from, int tag) override {
    return add_message(from, tensors, tag, /*is_send=*/false, [&] { return gloo_->recv(tensors, from, tag); });
  }
  void startCoalescing() override {
    Lock lock;
    auto& batch = batches_[std::this_thread::get_id()];
    batch = {};
    batch.opened_by = opened_by_caller();
  }
  WorkP endCoalescing() override {
    auto* open = batch_of_thread();
    TORCH_CHECK(open != nullptr, "simccl: endCoalescing() was called, but expected startCoalescing() before it");
    auto batch = std::move(*open);
    drop_batch_of_thread();
    if (!batch.on_host.empty()) return c10::make_intrusive<HostWorks>(std::move(batch.on_host));
    if (batch.sends.empty() && batch.receives.empty())  // only collectives, each issued on its own
      return work_of(stream_of(batch.device < 0 ? current_device() : batch.device, kAll), {}, {}, OpType::COALESCED);
    return issue(std::move(batch), kAll, OpType::COALESCED);  // on the stream of the collectives, like NCCL
  }
  WorkP barrier(const c10d::BarrierOptions& options) override {
    settle();
    return on_gloo("barrier", gloo_->barrier(options));
  }

 private:
  template <class F>
  static WorkP last_of(size_t count, F&& issue_one) {
    WorkP last;
    for (size_t i = 0; i < count; i++) last = issue_one(i);
    return last;
  }

  // Return the operation for gloo, which has sums, but no averages and no PREMUL_SUM. The device does the rest.
  c10d::ReduceOp op_of_gloo(const c10d::ReduceOp& op, Collective& collective) const {
    if (op == c10d::ReduceOp::AVG) {
      collective.divide_by = size_;
      return c10d::ReduceOp::SUM;
    }
    if (op != c10d::ReduceOp::PREMUL_SUM) return op;
    auto* supplement = static_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_NOT_IMPLEMENTED(supplement != nullptr && !supplement->tensor_factor.defined(),
        "simccl: PREMUL_SUM got a factor on the device, but takes a number of Python only");
    collective.factor = supplement->double_factor;
    return c10d::ReduceOp::SUM;
  }

  // Gloo runs collectives of host memory while the host waits. Meanwhile the device continues.
  bool on_host(const Tensors& tensors) {
    bool host = !tensors.empty() && tensors[0].is_cpu();
    TORCH_CHECK(!host || batch_of_thread() == nullptr, "simccl: collectives of host memory are not coalesced");
    if (host) settle();
    return host;
  }

  WorkP on_gloo(const std::string& name, WorkP work, bool is_message = false) {
    Lock lock;
    std::function<bool()> is_in_flight;
    if (!is_message) is_in_flight = begun_on_host_.begin(name);
    return c10::make_intrusive<HostWork>(std::move(work), name + ", called at " + line_of_program(here()), std::move(is_in_flight));
  }

  // The batch that this thread has open, or null. An exception in the context of the batch leaves it open: drop it then,
  // because the batch is never issued.
  Batch* batch_of_thread() {
    Lock lock;
    auto found = batches_.find(std::this_thread::get_id());
    if (found == batches_.end()) return nullptr;
    if (!has_ended(found->second.opened_by)) return &found->second;
    batches_.erase(found);
    return nullptr;
  }
  void drop_batch_of_thread() {
    Lock lock;
    batches_.erase(std::this_thread::get_id());
  }

  static void check_one_kind_of_memory(const Batch& batch) {
    TORCH_CHECK(batch.first_of_host.empty() || batch.first_of_device.empty(),
        "simccl: a batch got host memory (", batch.first_of_host, ") and device memory (", batch.first_of_device,
        "), but expected one of the two. Use a batch for each");
  }

  template <class F>
  WorkP add_message(int peer, const Tensors& tensors, int tag, bool is_send, F&& call_gloo) {
    auto name = (is_send ? "send to rank " : "recv from rank ") + std::to_string(ranks_.at(peer));
    auto* open = batch_of_thread();
    bool is_host = !tensors.empty() && tensors[0].is_cpu();
    if (open != nullptr) {
      auto& first = is_host ? open->first_of_host : open->first_of_device;
      if (first.empty()) first = name;
      check_one_kind_of_memory(*open);
    }
    if (is_host) {  // sent by gloo; the peer may first need queued messages
      begin_queued();
      auto work = on_gloo(name, call_gloo(), /*is_message=*/true);
      if (open != nullptr) open->on_host.push_back(work);
      return work;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(!anybody_captures(), "simccl: messages are not captured by graphs");
    Batch alone;
    auto& batch = open != nullptr ? *open : alone;
    auto pair = std::to_string(is_send ? rank_ : peer) + ">" + std::to_string(is_send ? peer : rank_) + "/";
    auto place = here();
    for (auto& tensor : tensors) {
      (is_send ? batch.inputs : batch.outputs).push_back(tensor);
      (is_send ? batch.sends : batch.receives).push_back({pair, name, tag, place});
    }
    return open != nullptr ? nullptr : issue(std::move(alone), peer, is_send ? OpType::SEND : OpType::RECV);
  }

  WorkP issue(Batch batch, int peer, OpType op) {
    std::string name;
    {
      Lock lock;
      for (auto* messages : {&batch.sends, &batch.receives})
        for (auto& message : *messages) {
          name += (name.empty() ? "" : ", ") + message.name;
          message.key += std::to_string(messages_[message.key]++);
        }
    }
    auto start = [store = store_, sends = batch.sends, receives = batch.receives](auto&, auto& in, auto& out) -> WorkP {
      send_messages(store, sends, in);
      return receives.empty() ? nullptr : receive_messages(store, receives, out);
    };
    Collective collective{.inputs = batch.inputs, .outputs = batch.outputs, .start = start, .is_message = true};
    return issue(peer == kAll ? "batch_isend_irecv (" + name + ")" : name, op, std::move(collective), peer);
  }

  StreamKey stream_of(int device, int peer) {
    Lock lock;
    auto [found, made] = streams_.try_emplace({device, peer}, 0);
    if (made) found->second = new_stream(device);
    return {device, found->second};
  }

  WorkP work_of(StreamKey stream, Tensors inputs, Tensors outputs, OpType op) const {
    return c10::make_intrusive<SimWork>(record(stream), std::move(inputs), std::move(outputs), rank_, op);
  }

  WorkP issue(const std::string& name, OpType op, Collective collective, int peer = kAll) {
    auto& tensors = collective.outputs.empty() ? collective.inputs : collective.outputs;
    TORCH_CHECK(!tensors.empty(), "simccl: ", name, " got no tensors");
    if (on_host(tensors)) return on_gloo(name, collective.start(*gloo_, collective.inputs, collective.outputs));
    int device = tensors[0].device().index();
    if (auto* batch = batch_of_thread()) {
      TORCH_CHECK(batch->device < 0 || batch->device == device, "simccl: coalesced collectives got tensors on sim:", device,
          ", but expected sim:", batch->device, ", the device of the first one. Coalesce the collectives of one device");
      batch->device = device;
    }
    std::vector<Range> ranges;
    auto dtype = tensors[0].scalar_type();  // checked at the call, as in NCCL
    for (auto* list : {&collective.inputs, &collective.outputs})
      for (auto& tensor : *list) {
        bool write = list == &collective.outputs;
        TORCH_CHECK(tensor.device().type() == kSim, "simccl: ", name, " got a tensor on ", tensor.device());
        TORCH_CHECK_TYPE(write || collective.is_message || tensor.scalar_type() == dtype,
            "simccl: ", name, " got inputs of ", tensor.scalar_type(), " for ", dtype);
        TORCH_CHECK(!write || tensor.is_non_overlapping_and_dense(), "simccl: ", name, " got an output that is not contiguous");
        ranges.push_back(range_of(tensor, write));
      }
    auto stream = stream_of(device, peer);
    block(stream, record(current(device)));
    enqueue(stream, name, task_of(name, collective), ranges, {{size_}});
    return work_of(stream, std::move(collective.inputs), std::move(collective.outputs), op);
  }

  // The task does not keep the tensors, so that memory that is freed too early is found.
  Task task_of(const std::string& name, const Collective& collective) const {
    struct Running {
      Tensors in, out;
      WorkP work;
      std::function<bool()> is_in_flight;  // null for messages
    };
    auto running = std::make_shared<Running>();
    auto in = aliases(collective.inputs), out = aliases(collective.outputs);
    auto begun = collective.is_message ? nullptr : begun_;
    auto begun_name = collective.root < 0 ? name : name + " with root " + std::to_string(collective.root);
    auto start = [running, in, out, begun_name, begun, gloo = gloo_, begin = collective.start, in_place = collective.in_place,
                     factor = collective.factor] {
      Below below;
      for (auto& tensor : in) running->in.push_back(tensor.clone(at::MemoryFormat::Contiguous));
      if (factor != 1)
        for (auto& tensor : running->in) tensor.mul_(factor);
      for (size_t i = 0; i < out.size(); i++) {
        running->out.push_back(in_place ? running->in[i] : at::empty(out[i].sizes(), out[i].options()));
        auto range = range_of(out[i], true);
        poison(range.begin, range.end - range.begin);
      }
      running->work = begin(*gloo, running->in, running->out);
      if (begun) running->is_in_flight = begun->begin(begun_name);
    };
    auto finish = [running, out, store = collective.store, divide_by = collective.divide_by] {
      Below below;
      if (running->work) running->work->wait();  // raises its error
      if (store) store(running->in, running->out);
      for (size_t i = 0; i < out.size(); i++) {
        if (divide_by > 1) running->out[i].div_(divide_by);
        auto to = out[i];
        to.copy_(running->out[i]);
      }
      *running = {};
    };
    if (collective.is_message && out.empty()) return {[start, finish] { start(), finish(); }, nullptr, nullptr, nullptr, true};
    Task task{start, [running] { return !running->work || running->work->isCompleted(); }, finish, nullptr, collective.is_message};
    task.is_in_flight = [running] { return running->is_in_flight && running->is_in_flight(); };
    return task;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  StoreP store_;
  std::vector<int> ranks_;  // global ranks, by rank of the group
  std::map<std::pair<int, int>, int64_t> streams_;  // by device and peer (kAll: collectives), like NCCL
  std::map<std::string, int64_t> messages_;  // number of messages, by "sender>receiver/"
  std::map<std::thread::id, Batch> batches_;  // open batches; a thread adds to its own only
  std::shared_ptr<Begun> begun_;  // collectives of the device
  Begun begun_on_host_;  // collectives of host memory, and barriers
};
}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("make_backend", [](const c10::intrusive_ptr<c10d::Backend>& gloo, const StoreP& store, std::vector<int> ranks)
      -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<SimBackend>(gloo, store->clone(), std::move(ranks)); });
  m.def("meet_peers", [](const StoreP& store, int rank, int size) { meet_peers(store->clone(), rank, size); });
  m.def("leave_peers", &leave_peers);
}
}  // namespace sim
