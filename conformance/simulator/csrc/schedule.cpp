// Streams are queues, and a seed says which one moves.
//
// Nothing here runs by itself: work is in its queue until the host has to wait for it or the schedule lets it run.
// So the same program under the same seed takes the same course. Only two decisions depend on the clock, because ranks in
// other processes may wait for work of a queue here. `take_unreplayable` reports them.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <ctime>
#include <deque>
#include <random>
#include <thread>

namespace sim {
namespace {
using Time = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(3);     // with a collective, before other streams go on
constexpr auto kGiveUp = std::chrono::seconds(20);      // with a collective that the host does not need yet
constexpr auto kReport = std::chrono::seconds(1);       // between two reports of a wait
constexpr auto kHeldUp = std::chrono::milliseconds(1500);  // a host of several that calls nothing is waiting elsewhere
constexpr auto kHang = std::chrono::seconds(300);

struct Entry {  // work, a recording, or a wait for a recording
  OperationP operation = nullptr;
  Task task = {};  // without `run` once a collective has begun
  std::vector<Range> ranges = {};
  RecordingP records = nullptr, waits = nullptr;
};

enum class Pace { Late, Early, Drawn };

struct Queue {
  std::deque<Entry> entries;
  bool busy = false;
  bool has_failed = false;  // an error, after which nothing of the queue runs
  Pace pace = Pace::Late;
  Clock clock;
};

enum class Order { Serial, Late, MainFirst, SideFirst, Drawn };

struct Runtime {
  std::map<StreamKey, Queue> queues;
  std::map<int, int64_t> next_stream;
  std::map<StreamKey, Capture*> captures;
  Order order = Order::Late;
  std::mt19937_64 draws{0};
  Clock host;
  int64_t ticks = 0;  // of all streams; later operations have larger ticks
  int depth = 0;      // number of nested tasks that run now
  int64_t first_tick = 0;
  uint64_t course = 0;  // digest of tasks and allocations, in their order
  std::exception_ptr error;  // the first one, until the schedule is set again
  bool error_was_raised = false;
  Waits waits;
  std::vector<std::string> unreplayable;
  Time::time_point last_call = Time::now();
};
Runtime& runtime() { return only<Runtime>(); }

Pace draw_pace(StreamKey key) {
  auto& r = runtime();
  if (r.order == Order::Drawn) return static_cast<Pace>(r.draws() % 3);
  bool early = r.order == Order::Serial || r.order == (key.second == 0 ? Order::MainFirst : Order::SideFirst);
  return early ? Pace::Early : Pace::Late;
}

Queue& queue_of(StreamKey key) {
  auto [found, made] = runtime().queues.try_emplace(key);
  if (made) found->second.pace = draw_pace(key);
  return found->second;
}

void pop(Queue& queue) {
  for (auto& range : queue.entries.front().ranges) {
    if (!range.life) continue;
    if (range.life->pinned()) close_to_host(range.life);
    range.life->pending--;
  }
  queue.entries.pop_front();
}

[[noreturn]] void raise_error() {
  runtime().error_was_raised = true;
  std::rethrow_exception(runtime().error);
}

void keep_error(const Entry& entry) {
  auto& r = runtime();
  if (r.error) return;
  std::string what = "unknown error";
  try {
    throw;
  } catch (const c10::Error& error) {
    what = error.what_without_backtrace();
  } catch (const std::exception& error) {
    what = error.what();
  }
  r.error = std::make_exception_ptr(std::runtime_error(
      "sim: " + entry.operation->name + " failed on the device: " + what +
      "\n  it was called at " + text(entry.operation->place)));
}

// Run a function of the head of a queue. Nothing else of the queue may move meanwhile.
void run_part(Queue& queue, const std::function<void()>& part) {
  auto& r = runtime();
  queue.busy = true;
  r.depth++;
  for (auto& range : queue.entries.front().ranges)
    if (range.life) open_to_device(range.life);
  try {
    part();
  } catch (...) {
    keep_error(queue.entries.front());
    queue.has_failed = true;
  }
  r.depth--;
  queue.busy = false;
}

enum class End { Never, IfSoon, Surely };  // whether to wait for the peers of a task that has begun

bool step(Queue& queue, End end);
bool step_any(bool only_drawn);

// End one task whose peers are done.
bool end_any() {
  for (auto& [key, queue] : runtime().queues) {
    if (queue.busy || queue.entries.empty()) continue;
    auto& task = queue.entries.front().task;
    if (!task.run && task.is_complete && task.is_complete()) return step(queue, End::Surely);
  }
  return false;
}

// Run the next step that the head of a queue needs, unless that step waits for peers.
bool towards_begin(Queue& queue) {
  if (queue.busy || queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  if (head.waits && !head.waits->done) return towards_begin(queue_of(head.waits->stream));
  return step(queue, End::Never);
}

// Begin tasks that peers may need before they can complete `task`. Streams do not wait for each other by themselves,
// so a message in one stream must not hold back messages of other streams.
void begin_messages(const Task& task) {
  auto is_needed = [&](auto& entry) {
    return entry.task.run && (entry.task.is_message || (task.is_message && entry.task.is_complete));
  };
  for (auto& [key, queue] : runtime().queues)
    while (std::any_of(queue.entries.begin(), queue.entries.end(), is_needed) && towards_begin(queue)) {}
}

// Return whether a collective that has begun here is in flight. Its end may let this rank continue.
bool is_any_in_flight() {
  auto& queues = runtime().queues;
  return std::any_of(queues.begin(), queues.end(), [](auto& item) {
    auto& entries = item.second.entries;
    if (entries.empty()) return false;
    auto& task = entries.front().task;
    return !task.run && task.is_in_flight && task.is_in_flight();
  });
}

// Wait until the collective or message at the head of a queue is complete. Return false if it gave up, as `IfSoon` allows.
bool complete(Queue& queue, End end) {
  auto& r = runtime();
  auto& task = queue.entries.front().task;
  auto& operation = queue.entries.front().operation;
  if (end == End::IfSoon && task.gave_up) return task.is_complete();
  auto since = Time::now();
  auto until = since + kPatience;
  struct Busy {
    bool& is_so;
    ~Busy() { is_so = false; }
  } busy{queue.busy};
  busy.is_so = true;
  begin_messages(task);
  for (auto time = std::chrono::microseconds(5); !task.is_complete(); time = std::min(time * 2, std::chrono::microseconds(500))) {
    nap(time);
    if (r.error) raise_error();  // the peers may wait for work of the failed stream
    r.last_call = Time::now();
    TORCH_CHECK(r.last_call < since + kHang, "sim: ", operation->name, " on ", stream_name(operation->stream),
        " has waited for its peers for ", kHang.count(), " s; it was called at ", text(operation->place));
    if (r.last_call < until) continue;
    // Peers may wait for work in another queue here. That queue moves, as it would on a real device.
    if (step_any(false) || end_any()) {
      r.unreplayable.push_back("other streams went on while " + operation->name + " waited for its peers");
      note_progress();
      continue;
    }
    until = r.last_call + kReport;
    bool others_wait = false;
    if (is_any_in_flight()) note_progress();
    else others_wait = report_wait(operation->name + ", called at " + line_of_program(operation->place), end == End::IfSoon);
    if (end == End::IfSoon && (others_wait || r.last_call > since + kGiveUp)) {
      r.unreplayable.push_back("the program went on before the peers of " + operation->name);
      note_progress();
      task.gave_up = true;
      return false;
    }
  }
  note_progress();
  return true;
}

// Move the head of a queue. Return whether anything moved. A collective that has begun ends only when it is needed, so that
// its end does not depend on time.
bool step(Queue& queue, End end) {
  if (queue.busy || queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  if (head.waits && !head.waits->done) return false;
  if (head.records) head.records->done = true;
  if (queue.has_failed) {
    pop(queue);
    return true;
  }
  if (auto run = std::exchange(head.task.run, nullptr)) {
    note_course(static_cast<uint64_t>(head.operation->tick - runtime().first_tick));
    run_part(queue, run);
    if (head.task.is_complete && !queue.has_failed) return true;
  } else if (head.task.is_complete) {
    if (end == End::Never || !complete(queue, end)) return false;
    note_course(~static_cast<uint64_t>(head.operation->tick - runtime().first_tick));
    run_part(queue, head.task.finish);
  }
  pop(queue);
  return true;
}

// Return whether `step` moves the head of a queue without waiting for peers.
bool can_step(const Queue& queue) {
  if (queue.busy || queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  bool has_begun = !head.task.run && head.task.is_complete;
  return !has_begun && (!head.waits || head.waits->done);
}

// Step a queue that is drawn. Draw only if a queue can move: the clock decides how often the host looks during a wait, so a
// look at queues that cannot move must not change the schedule.
bool step_any(bool only_drawn) {
  auto& r = runtime();
  std::vector<Queue*> ready;
  for (auto& [key, queue] : r.queues)
    if (can_step(queue) && (!only_drawn || queue.pace == Pace::Drawn)) ready.push_back(&queue);
  return !ready.empty() && step(*ready[r.draws() % ready.size()], End::Never);
}

// Move the step that the end of a queue needs first.
bool towards_end(Queue& queue, End end) {
  if (queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  if (head.waits && !head.waits->done) return towards_end(queue_of(head.waits->stream), end);
  return step(queue, end);
}

// In program order, a collective ends where it is called. A message may end later, because its peer may first wait for
// something that this host does next.
End end_of_early(const Queue& queue) {
  if (runtime().order != Order::Serial || queue.entries.empty() || queue.entries.front().task.is_message) return End::Never;
  return End::IfSoon;
}

void run_early_streams() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [key, queue] : runtime().queues)
      if (queue.pace == Pace::Early)
        while (step(queue, end_of_early(queue))) moved = true;
  }
}

void let_time_pass() {
  auto& r = runtime();
  if (r.depth) return;
  if (r.order == Order::Drawn) {
    if (r.draws() % 64 == 0)
      for (auto& [key, queue] : r.queues)
        if (r.draws() % 2) queue.pace = static_cast<Pace>(r.draws() % 3);
    while (r.draws() % 3 == 0 && step_any(true)) {}
  }
  run_early_streams();
}

void tell_host(const RecordingP& recording) {
  auto& host = runtime().host;
  if (auto last = recording->clock.find(recording->stream); last != recording->clock.end() && host[last->first] < last->second)
    note_wait({-1, 0}, 0, recording);
  join(host, recording->clock);
  note_host(host);
}

// Refuse a call of the host about `recording`, or about the complete device if that is null, if a capture forbids it.
void refuse_in_capture(const std::string& what, const RecordingP& recording) {
  for (auto& [stream, capture] : runtime().captures)
    if (!recording || recording->capture == capture->number() || capture->forbids())
      capture->lose("the host may not call " + what + " meanwhile");
  TORCH_CHECK(!recording || recording->capture == 0, "sim: ", what, " of an event of a capture, which only replays come to");
}
}  // namespace

void join(Clock& clock, const Clock& other) {
  for (auto& [key, tick] : other) clock[key] = std::max(clock[key], tick);
}

int64_t new_stream(int device) {
  Lock lock;
  auto stream = ++runtime().next_stream[device];
  queue_of({device, stream});
  return stream;
}

void give_stream_to(Capture* capture, StreamKey stream) { runtime().captures[stream] = capture; }
void end_capture(Capture* capture) {
  std::erase_if(runtime().captures, [&](auto& entry) { return entry.second == capture; });
}
Capture* capture_of(StreamKey stream) {
  Lock lock;
  auto found = runtime().captures.find(stream);
  return found == runtime().captures.end() ? nullptr : found->second;
}
bool anybody_captures() { return !runtime().captures.empty(); }

void note_course(uint64_t what) {
  auto& course = runtime().course;
  course = (course ^ what) * 0x9E3779B97F4A7C15u;
  course ^= course >> 29;
}

void append(StreamKey stream, Work work, const PlaceP& place) {
  auto& r = runtime();
  auto& queue = queue_of(stream);
  r.last_call = Time::now();
  join(queue.clock, r.host);
  queue.clock[stream] = ++r.ticks;
  auto operation = std::make_shared<Operation>(Operation{std::move(work.name), stream, r.ticks, place});
  Entry entry{std::move(operation), std::move(work.task), std::move(work.ranges)};
  note_access(entry.operation, queue.clock, entry.ranges);
  for (auto& range : entry.ranges) {
    if (!range.life) continue;
    range.life->pending++;
    if (range.life->pinned()) close_to_host(range.life);
  }
  queue.entries.push_back(std::move(entry));
  let_time_pass();
}

RecordingP record(StreamKey stream) {
  Lock lock;
  auto recording = std::make_shared<Recording>();
  recording->stream = stream;
  if (auto* capture = capture_of(stream)) {
    capture->keep_recording(stream, recording);
    return recording;
  }
  auto& queue = queue_of(stream);
  join(queue.clock, runtime().host);
  recording->clock = queue.clock;
  recording->done = queue.entries.empty() && !queue.busy;
  trace({"record", stream, recording.get()});
  if (!recording->done) queue.entries.push_back({.records = recording});
  return recording;
}

void block(StreamKey stream, const RecordingP& recording) {
  Lock lock;
  auto* capture = capture_of(stream);
  if (auto* other = capture_of(recording->stream); !capture && other && other->number() == recording->capture) capture = other;
  if (capture != nullptr) return capture->keep_wait(stream, recording);
  TORCH_CHECK(recording->capture == 0, "sim: ", stream_name(stream), " waits for an event of a capture that is over");
  trace({"wait", stream, recording.get()});
  auto& queue = queue_of(stream);
  if (recording->stream != stream) note_wait(stream, queue.clock[stream], recording);
  join(queue.clock, recording->clock);
  if (!recording->done) queue.entries.push_back({.waits = recording});
}

bool query(const RecordingP& recording) {
  Lock lock;
  auto& r = runtime();
  refuse_in_capture("query", recording);
  r.last_call = Time::now();
  // A program that repeats the query must get yes eventually, so a query moves the device. At random the answer is no.
  if (!recording->done && !r.depth && !(r.order == Order::Drawn && r.draws() % 4 == 0)) {
    towards_end(queue_of(recording->stream), End::IfSoon);
    run_early_streams();
  }
  if (recording->done) tell_host(recording);
  return recording->done;
}

void wait_on_host(const RecordingP& recording, const char* why) {
  Lock lock;
  auto& r = runtime();
  if (why != nullptr) r.waits[{why, text(here())}]++;
  refuse_in_capture(why == nullptr ? "synchronize" : why, recording);
  TORCH_CHECK(!r.depth || recording->done, "sim: a task on the device waits for the device");
  trace({"host_wait", recording->stream, recording.get()});
  auto since = r.last_call = Time::now();
  while (!recording->done && !r.error) {
    auto draws = r.draws;
    bool moved = r.order == Order::Drawn && r.draws() % 2 && step_any(true);
    if (!moved) moved = towards_end(queue_of(recording->stream), End::Surely);
    run_early_streams();
    if (moved) continue;
    // Another thread is waiting for a collective at the head of the queue. The clock decides how often this thread looks.
    r.draws = draws;
    TORCH_CHECK(Time::now() - since < kHang, "sim: the device does not get to what the host waits for");
    nap(std::chrono::microseconds(50));
  }
  if (r.error) raise_error();
  tell_host(recording);
}

void synchronize_stream(StreamKey stream, const char* why) { wait_on_host(record(stream), why); }

void synchronize_device(int device, const char* why) {
  std::vector<RecordingP> recordings;
  {
    Lock lock;
    refuse_in_capture("synchronize", nullptr);
    if (why != nullptr) runtime().waits[{why, text(here())}]++;
    for (auto& [key, queue] : runtime().queues)
      if (key.first == device) recordings.push_back(record(key));
  }
  for (auto& recording : recordings) wait_on_host(recording, nullptr);
}
void drain() {
  for (int device = 0; device < device_count(); device++) synchronize_device(device, nullptr);
}

void begin_queued() {
  Lock lock;
  auto& r = runtime();
  r.last_call = Time::now();
  while (!r.depth && step_any(false)) {}
}

void settle() {
  Lock lock;
  begin_queued();
  if (runtime().depth) return;
  for (auto& [key, queue] : runtime().queues)
    while (towards_end(queue, End::IfSoon)) {}
}

void wait_for_peers(const std::string& what, const std::function<bool()>& is_over, const std::function<bool()>& is_in_flight) {
  Lock lock;
  auto& r = runtime();
  auto until = Time::now() + kReport;
  for (auto time = std::chrono::microseconds(50); !is_over(); time = std::min(time * 2, std::chrono::microseconds(5000))) {
    nap(time);
    if (r.error) raise_error();
    r.last_call = Time::now();
    if (r.last_call < until) continue;
    until = r.last_call + kReport;
    bool moved = false;
    while (step_any(false) || end_any()) moved = true;
    if (moved) r.unreplayable.push_back("the device went on during " + what);
    if (moved || is_any_in_flight() || (is_in_flight && is_in_flight())) note_progress();
    else report_wait(what);
  }
  note_progress();
}

// A host may wait for something else than the device, such as a peer's message, while a peer waits for a collective in a
// queue here. After some time without a call the device continues by itself, like a real one.
void watch_for_held_up_host() {
  static bool watched = false;
  if (std::exchange(watched, true)) return;
  std::thread([] {
    auto& r = runtime();
    constexpr int kNaps = 5;
    auto worked = std::clock();
    for (int idle = 0;;) {
      std::this_thread::sleep_for(kHeldUp / kNaps);
      auto used = std::clock() - std::exchange(worked, std::clock());
      idle = used * 500 < CLOCKS_PER_SEC ? idle + 1 : 0;  // a host that computes or imports is not held up
      Lock lock;
      if (r.depth || idle < kNaps || Time::now() - r.last_call < kHeldUp) continue;
      bool moved = false;
      try {
        while (step_any(false) || end_any()) moved = true;
      } catch (...) {  // the store of the peers may be gone; the next wait of the host raises it
        if (!r.error) r.error = std::current_exception();
      }
      if (moved) r.unreplayable.emplace_back("the device went on while the host was held up by something else");
    }
  }).detach();
}

void forget_raised_error() {
  Lock lock;
  if (runtime().error_was_raised) runtime().error = nullptr;
}

void set_schedule(uint64_t seed, int rank) {
  be_host();
  Lock lock;
  auto& r = runtime();
  r.error = nullptr;
  r.error_was_raised = false;
  constexpr uint64_t kFixed = 4;
  r.order = seed < kFixed ? static_cast<Order>(seed) : Order::Drawn;
  r.draws.seed(seed * 1000003 + static_cast<uint64_t>(rank));
  r.course = 0;
  r.first_tick = r.ticks;
  r.host.clear();  // later accesses are not compared with those of the former schedule
  r.waits.clear();
  r.unreplayable.clear();
  forget_all_accesses();
  std::erase_if(r.queues, [](auto& entry) { return entry.second.entries.empty() && !entry.second.busy; });
  for (auto& [key, queue] : r.queues) {
    queue.pace = draw_pace(key);
    queue.has_failed = false;
  }
}

Waits take_waits() { return take_all(runtime().waits); }
std::vector<std::string> take_unreplayable() { return take_all(runtime().unreplayable); }
uint64_t course() {
  Lock lock;
  return runtime().course;
}
}  // namespace sim
