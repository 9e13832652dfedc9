// Graphs: what a capturing stream is given does not run. It is kept, with its addresses, and each replay issues it anew.
//
// As on CUDA, a stream that waits for an event of a capture joins it and has to be waited for before it ends; nothing of
// it may be asked by the host, nor, by its mode, anything else, or it is lost; what is allocated meanwhile is of the
// graph's own pool. That is poison before its first use in each replay. A replay stands in the current stream, behind the
// one before; inside, what the capture did not order may run in any order.
#include "headers.h"

#include "tensors.h"

#include <ATen/core/GraphImplInterface.h>

#include <thread>

namespace sim {
namespace {
struct Step {  // a recording, a wait for one, or work
  StreamKey stream;
  RecordingP records, waits;
  std::string name;
  Task task;
  std::vector<Range> ranges;
};

class Graph;
std::map<StreamKey, Graph*> capturing;  // under the runtime's lock
Graph* capture_of(StreamKey stream) {
  auto found = capturing.find(stream);
  return found == capturing.end() ? nullptr : found->second;
}

class Graph final : public at::GraphImplInterface {
 public:
  ~Graph() override { reset(); }
  void instantiate() override {}
  c10::MempoolId_t pool() const override { return pool_; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, "sim writes no graphs to files"); }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    Lock lock;
    auto stream = current(current_device());
    TORCH_CHECK(!ready_, "sim: the graph holds a capture already: reset() it first");
    TORCH_CHECK(stream.second != 0, "sim: a graph is captured in a stream that is not the default stream");
    TORCH_CHECK(!is_capturing(stream), "sim: ", stream_name(stream), " is being captured already");
    TORCH_CHECK(!by_shapes_alone(), "sim: nothing is captured by shapes alone");
    static int64_t captures = 0;
    number_ = ++captures;
    pool_ = pool == kNoPool ? c10::MempoolId_t{number_, 0} : pool;
    hold_pool(pool_, 1);
    mode_ = mode;
    thread_ = std::this_thread::get_id();
    capturing[origin_ = stream] = this;
    clocks_[stream];
    ready_ = true;
  }

  void capture_end() override {
    Lock lock;
    TORCH_CHECK(capture_of(origin_) == this, "sim: no capture to end");
    for (auto& [stream, clock] : clocks_)
      if (lost_.empty() && clocks_[origin_][stream] < clock[stream]) lost_ = stream_name(stream) + " joined it and was not waited for";
    if (lost_.empty() && current(current_device()) != origin_) lost_ = "it does not end in the stream that it began in";
    auto why = lost_;
    std::erase_if(capturing, [&](auto& entry) { return entry.second == this; });
    if (!why.empty()) reset();
    TORCH_CHECK(why.empty(), "sim: the capture is lost: ", why);
  }

  void replay() override {
    auto place = here();
    Lock lock;
    TORCH_CHECK(ready_ && capture_of(origin_) != this, "sim: a graph is replayed once it is captured");
    auto stream = current(origin_.first);
    if (auto* other = capture_of(stream)) other->lose("a graph is replayed in it");
    std::map<RecordingP, RecordingP> recordings;
    if (replayed_) block(stream, replayed_);
    streams_[origin_] = stream;
    for (auto& step : steps_) {
      auto [found, made] = streams_.try_emplace(step.stream);
      auto& at = found->second;
      if (made) at = {step.stream.first, new_stream(step.stream.first)};
      if (step.waits) block(at, recordings.at(step.waits));
      if (step.records) recordings[step.records] = record(at);
      if (!step.task.run) continue;
      auto ranges = step.ranges;
      for (auto& range : ranges) {
        if (!range.life || range.life->pool == pool_) continue;
        range.life = allocation_at(range.begin);  // whose it is now
        TORCH_CHECK(range.life && !range.life->freed, "sim: a graph ", range.write ? "writes" : "reads", " memory, in ", step.name,
            ", that was freed since it was captured: keep it as long as the graph");
      }
      issue(at, step.name + ", replayed,", step.task, std::move(ranges), place);
    }
    replayed_ = record(stream);
  }

  void reset() override {
    std::vector<Step> gone;  // what they hold goes outside of the lock
    Lock lock;
    std::erase_if(capturing, [&](auto& entry) { return entry.second == this; });
    if (std::exchange(ready_, false)) hold_pool(pool_, -1);
    gone.swap(steps_);
    clocks_.clear();
    lost_.clear();
  }

  int64_t number() const { return number_; }
  bool forbids() const {
    return mode_ != at::GraphCaptureMode::Relaxed && (mode_ != at::GraphCaptureMode::ThreadLocal || thread_ == std::this_thread::get_id());
  }
  [[noreturn]] void lose(const std::string& why) {
    if (lost_.empty()) lost_ = why;
    TORCH_CHECK(false, "sim: a graph is being captured, and the capture is lost: ", lost_);
  }
  void keep(Step step) {
    if (!lost_.empty()) lose(lost_);
    auto& clock = clocks_[step.stream];
    if (step.records) step.records->clock = clock;
    else if (!step.waits) clock[step.stream] = ++ticks_;
    steps_.push_back(std::move(step));
  }
  void wait(StreamKey stream, const RecordingP& recording) {
    if (recording->capture != number_) lose(stream_name(stream) + " is captured, and waits for what is not");
    if (stream.second == 0) lose("the default stream waits for what is captured, and cannot be captured itself");
    capturing[stream] = this;
    join(clocks_[stream], recording->clock);
    keep({stream, nullptr, recording});
  }

 private:
  int64_t number_ = 0;  // of all captures
  c10::MempoolId_t pool_{0, 0};
  at::GraphCaptureMode mode_ = at::GraphCaptureMode::Default;
  std::thread::id thread_;
  StreamKey origin_;
  std::map<StreamKey, Clock> clocks_;  // of the streams that are captured
  int64_t ticks_ = 0;
  std::string lost_;  // why
  bool ready_ = false;
  std::vector<Step> steps_;
  std::map<StreamKey, StreamKey> streams_;  // by those that were captured: which a replay runs in
  RecordingP replayed_;
};
}  // namespace

bool anybody_captures() { return !capturing.empty(); }
c10::MempoolId_t pool_of(StreamKey stream) {
  Lock lock;
  auto* graph = capture_of(stream);
  return graph == nullptr ? kNoPool : graph->pool();
}

bool keep_recording(StreamKey stream, const RecordingP& recording) {
  auto* graph = capture_of(stream);
  if (graph == nullptr) return false;
  recording->capture = graph->number();
  graph->keep({stream, recording});
  return true;
}

bool keep_wait(StreamKey stream, const RecordingP& recording) {
  auto* graph = capture_of(stream);
  if (graph == nullptr && recording->capture == 0) return false;
  auto* its = capture_of(recording->stream);
  if (graph == nullptr && its != nullptr && its->number() == recording->capture) graph = its;
  TORCH_CHECK(graph != nullptr, "sim: ", stream_name(stream), " waits for an event of a capture that is over");
  graph->wait(stream, recording);
  return true;
}

bool keep_work(StreamKey stream, const std::string& name, const Task& task, std::vector<Range> ranges) {
  auto* graph = capture_of(stream);
  if (graph == nullptr) return false;
  for (auto& range : ranges) {
    range.life = allocation_at(range.begin);
    if (!range.life || range.life->pool != graph->pool() || !std::exchange(range.life->stale, false)) continue;
    auto [first, poisoning, whole] = first_use(range.life, name);
    graph->keep({stream, nullptr, nullptr, first, poisoning, {whole}});
  }
  graph->keep({stream, nullptr, nullptr, name, task, std::move(ranges)});
  return true;
}

void refuse_in_capture(const char* what, const RecordingP& recording) {
  for (auto& [stream, graph] : capturing)
    if (!recording || recording->capture == graph->number() || graph->forbids()) graph->lose(std::string("the host may not call ") + what + " meanwhile");
  TORCH_CHECK(!recording || recording->capture == 0, "sim: ", what, " of an event of a capture, which only replays come to");
}

void register_graphs() {
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kSim, false), [](const at::GraphImplArgs&) { return std::make_unique<Graph>(); });
}
}  // namespace sim
