// Graphs: work of a capturing stream does not run. The graph keeps it with its addresses, and each replay issues it again.
//
// As on CUDA, a stream that waits for an event of a capture joins the capture. The capture must wait for that stream before
// it ends. The capture is lost if the host queries it or, depending on the mode, the device. Memory that is allocated
// meanwhile belongs to the graph's own pool, and is poisoned before its first use in each replay. A replay runs in the
// current stream, after the previous replay. Work that the capture did not order may run in any order.
#include "tensors.h"

#include <ATen/core/GraphImplInterface.h>

#include <thread>

namespace sim {
namespace {
struct Step {  // a recording, a wait for a recording, or work
  StreamKey stream;
  RecordingP records = nullptr, waits = nullptr;
  Work work = {};
};

class Graph final : public at::GraphImplInterface, public Capture {
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
    origin_ = stream;
    give_stream_to(this, stream);
    clocks_[stream];
    ready_ = true;
  }

  void capture_end() override {
    Lock lock;
    TORCH_CHECK(capture_of(origin_) == this, "sim: no capture to end");
    for (auto& [stream, clock] : clocks_)
      if (lost_.empty() && clocks_[origin_][stream] < clock[stream])
        lost_ = stream_name(stream) + " joined it and was not waited for";
    if (lost_.empty() && current(current_device()) != origin_) lost_ = "it does not end in the stream that it began in";
    auto why = lost_;
    end_capture(this);
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
      if (!step.work.task.run) continue;
      auto work = step.work;
      for (auto& range : work.ranges) {
        if (!range.life || range.life->pool == pool_) continue;
        range.life = allocation_at(range.begin);  // its present owner
        TORCH_CHECK(range.life && !range.life->freed, "sim: a graph ", range.write ? "writes" : "reads", " memory, in ",
            work.name, ", that was freed since it was captured: keep it as long as the graph");
      }
      work.name += ", replayed,";
      issue(at, std::move(work), place);
    }
    replayed_ = record(stream);
  }

  void reset() override {
    std::vector<Step> gone;  // freed after the lock is released
    Lock lock;
    end_capture(this);
    if (std::exchange(ready_, false)) hold_pool(pool_, -1);
    gone.swap(steps_);
    clocks_.clear();
    lost_.clear();
  }

  int64_t number() const override { return number_; }
  bool forbids() const override {
    if (mode_ == at::GraphCaptureMode::ThreadLocal) return thread_ == std::this_thread::get_id();
    return mode_ != at::GraphCaptureMode::Relaxed;
  }
  [[noreturn]] void lose(const std::string& why) override {
    if (lost_.empty()) lost_ = why;
    TORCH_CHECK(false, "sim: a graph is being captured, and the capture is lost: ", lost_);
  }
  void keep_work(StreamKey stream, Work work) override {
    for (auto& range : work.ranges) {
      range.life = allocation_at(range.begin);
      if (!range.life || range.life->pool != pool_ || !std::exchange(range.life->stale, false)) continue;
      keep({stream, nullptr, nullptr, first_use(range.life, work.name)});
    }
    keep({stream, nullptr, nullptr, std::move(work)});
  }
  void keep_recording(StreamKey stream, const RecordingP& recording) override {
    recording->capture = number_;
    keep({stream, recording});
  }
  void keep_wait(StreamKey stream, const RecordingP& recording) override {
    if (recording->capture != number_) lose(stream_name(stream) + " is captured, and waits for what is not");
    if (stream.second == 0) lose("the default stream waits for what is captured, and cannot be captured itself");
    give_stream_to(this, stream);
    join(clocks_[stream], recording->clock);
    keep({stream, nullptr, recording});
  }

 private:
  void keep(Step step) {
    if (!lost_.empty()) lose(lost_);
    auto& clock = clocks_[step.stream];
    if (step.records) step.records->clock = clock;
    else if (!step.waits) clock[step.stream] = ++ticks_;
    steps_.push_back(std::move(step));
  }

  int64_t number_ = 0;
  c10::MempoolId_t pool_ = kNoPool;
  at::GraphCaptureMode mode_ = at::GraphCaptureMode::Default;
  std::thread::id thread_;
  StreamKey origin_;
  std::map<StreamKey, Clock> clocks_;  // of the captured streams
  int64_t ticks_ = 0;
  std::string lost_;  // the reason; empty if it is not lost
  bool ready_ = false;
  std::vector<Step> steps_;
  std::map<StreamKey, StreamKey> streams_;  // stream of a replay, by captured stream
  RecordingP replayed_;
};
}  // namespace

void register_graphs() {
  auto make = [](const at::GraphImplArgs&) { return std::make_unique<Graph>(); };
  at::GraphImplRegistry()->Register(c10::DeviceTypeName(kSim, false), make);
}
}  // namespace sim
