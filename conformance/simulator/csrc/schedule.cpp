// Streams are queues, and a seed says which one moves.
//
// Nothing here runs by itself: work lies in its queue until the host has to wait for it or the schedule lets it go on.
// So the same program under the same seed takes the same course. The clock is looked at in two places only, where ranks
// in other processes may wait for what lies in a queue here; what it decides is told by `take_unreplayable`.
#include "device.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <ctime>
#include <mutex>
#include <random>
#include <thread>

namespace sim {
namespace {
using Time = std::chrono::steady_clock;
constexpr auto kPatience = std::chrono::seconds(3);     // with a collective, before other streams go on
constexpr auto kHeldUp = std::chrono::milliseconds(1500);  // a host of several that calls nothing is waiting elsewhere
constexpr auto kHang = std::chrono::seconds(300);

enum class Kind { Run, Record, Wait, Collective };

struct Entry {
  Kind kind;
  OperationP operation;
  Task task;
  RecordingP recording;
  std::vector<std::pair<AllocationP, bool>> memory;  // and whether it is written
  bool started = false;
};

enum class Pace { Late, Early, Drawn };

struct Queue {
  StreamKey key;
  std::deque<Entry> entries;
  bool busy = false;
  Pace pace = Pace::Late;
  Clock clock;
};

enum class Order { Serial, Late, MainFirst, SideFirst, Drawn };

struct Runtime {
  std::recursive_mutex mutex;
  std::map<StreamKey, Queue> queues;
  std::map<int, int64_t> next_stream;
  std::map<StreamKey, int> priorities;
  Order order = Order::Late;
  std::mt19937_64 draws{0};
  Clock host;
  int64_t ticks = 0;  // of all streams: a later operation has a larger one
  int depth = 0;      // of tasks that run now
  int64_t executed = 0, collectives = 0;
  int64_t first_tick = 0;
  uint64_t course = 0;  // a digest of what ran and what memory was given, in their order
  std::exception_ptr error;
  std::map<std::pair<std::string, std::vector<std::pair<PyCodeObject*, int>>>, std::pair<PlaceP, int64_t>> waits;
  std::vector<std::string> unreplayable;
  Time::time_point last_call = Time::now();
};
Runtime& runtime() {
  static auto* one = new Runtime;
  return *one;
}

int devices = 1;
thread_local int thread_device = 0;
thread_local std::map<int, int64_t> thread_streams;

void join(Clock& clock, const Clock& other) {
  for (auto& [key, tick] : other) {
    auto& mine = clock[key];
    mine = std::max(mine, tick);
  }
}

Pace draw_pace(StreamKey key) {
  auto& r = runtime();
  switch (r.order) {
    case Order::Serial: return Pace::Early;
    case Order::Late: return Pace::Late;
    case Order::MainFirst: return key.second == 0 ? Pace::Early : Pace::Late;
    case Order::SideFirst: return key.second == 0 ? Pace::Late : Pace::Early;
    case Order::Drawn: return static_cast<Pace>(r.draws() % 3);
  }
  return Pace::Late;
}

Queue& queue_of(StreamKey key) {
  auto [found, made] = runtime().queues.try_emplace(key);
  if (made) {
    found->second.key = key;
    found->second.pace = draw_pace(key);
  }
  return found->second;
}

void pop(Queue& queue) {
  for (auto& [memory, write] : queue.entries.front().memory) {
    (write ? memory->pending_writes : memory->pending_reads)--;
    if (memory->pinned()) close_to_host(memory);
    if (memory->pending() == 0) forget_finished(memory);
  }
  queue.entries.pop_front();
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
      "sim: " + entry.operation->name + " failed on the device: " + what + "\n  it was called at " + text(entry.operation->place)));
}

// Runs something of the head of a queue, outside of which nothing of the queue may move meanwhile.
template <class F>
void run_part(Queue& queue, F&& part) {
  auto& r = runtime();
  queue.busy = true;
  r.depth++;
  for (auto& [memory, write] : queue.entries.front().memory) open_to_device(memory);
  try {
    part();
  } catch (...) {
    keep_error(queue.entries.front());
  }
  r.depth--;
  queue.busy = false;
}

bool step_any(bool only_drawn);

// Waits until the collective at the head of a queue is complete: true where it is.
bool complete(Queue& queue) {
  auto& r = runtime();
  auto is_complete = queue.entries.front().task.is_complete;
  auto since = Time::now();
  auto until = since + kPatience;
  queue.busy = true;
  for (auto nap = std::chrono::microseconds(5); !is_complete(); nap = std::min(nap * 2, std::chrono::microseconds(500))) {
    r.mutex.unlock();
    std::this_thread::sleep_for(nap);
    r.mutex.lock();
    r.last_call = Time::now();
    if (r.last_call > since + kHang) {
      queue.busy = false;
      auto& head = *queue.entries.front().operation;
      TORCH_CHECK(false, "sim: ", head.name, " on ", stream_name(head.stream), " has waited for its peers for ",
          std::chrono::duration_cast<std::chrono::seconds>(kHang).count(), " s; it was called at ", text(head.place));
    }
    if (r.last_call < until) continue;
    // Peers may be held up by what lies in another queue here: it goes on, as it would on a real device.
    if (!step_any(false)) until = r.last_call + kPatience;
    else r.unreplayable.push_back("other streams went on while " + queue.entries.front().operation->name + " waited for its peers");
  }
  queue.busy = false;
  return true;
}

// Moves the head of a queue: true where anything moved. A collective that has begun ends only when it is needed, so that
// no real time decides when.
bool step(Queue& queue, bool needed) {
  if (queue.busy || queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  if (head.kind == Kind::Wait && !head.recording->done) return false;
  if (head.kind == Kind::Record) head.recording->done = true;
  if (head.kind == Kind::Run || (head.kind == Kind::Collective && !head.started)) {
    head.started = true;
    runtime().executed++;
    note_course(static_cast<uint64_t>(head.operation->tick - runtime().first_tick));
    auto run = std::move(head.task.run);
    run_part(queue, run);
    if (head.kind == Kind::Collective) return true;
  } else if (head.kind == Kind::Collective) {
    if (!needed || !complete(queue)) return false;
    note_course(~static_cast<uint64_t>(head.operation->tick - runtime().first_tick));
    run_part(queue, queue.entries.front().task.finish);
  }
  pop(queue);
  return true;
}

bool step_any(bool only_drawn) {
  auto& r = runtime();
  std::vector<Queue*> ready;
  for (auto& [key, queue] : r.queues)
    if (!queue.entries.empty() && (!only_drawn || queue.pace == Pace::Drawn)) ready.push_back(&queue);
  while (!ready.empty()) {
    auto at = r.draws() % ready.size();
    if (step(*ready[at], false)) return true;
    ready.erase(ready.begin() + at);
  }
  return false;
}

bool towards(const RecordingP& recording) {
  auto& queue = queue_of(recording->stream);
  if (queue.entries.empty()) return false;
  auto& head = queue.entries.front();
  if (head.kind == Kind::Wait && !head.recording->done) return towards(head.recording);
  return step(queue, true);
}

void run_early_streams() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [key, queue] : runtime().queues)
      if (queue.pace == Pace::Early)
        while (step(queue, runtime().order == Order::Serial)) moved = true;
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

void throw_error() {
  auto& r = runtime();
  if (r.error) std::rethrow_exception(std::exchange(r.error, nullptr));
}

void tell_host(const RecordingP& recording) {
  auto& host = runtime().host;
  join(host, recording->clock);
  note_host(host);
}

void count_wait(const char* why) {
  auto place = here();
  auto& [kept, count] = runtime().waits[{why, place->frames}];
  kept = place;
  count++;
}

std::vector<Queue*> queues_of(int device) {
  std::vector<Queue*> found;
  for (auto& [key, queue] : runtime().queues)
    if (device < 0 || key.first == device) found.push_back(&queue);
  return found;
}
}  // namespace

Lock::Lock() {
  if (Py_IsInitialized() && PyGILState_Check()) thread_ = PyEval_SaveThread();
  runtime().mutex.lock();
}
Lock::~Lock() {
  runtime().mutex.unlock();
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}

int current_device() { return thread_device; }
int device_count() { return devices; }
void set_device_count(int count) { devices = count; }
void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < devices, "sim: got device ", device, ", but there are ", devices,
      "; ask for more when the simulator is enabled");
  thread_device = device;
}
int64_t current_stream(int device) { return thread_streams[device]; }
int64_t exchange_stream(int device, int64_t stream) { return std::exchange(thread_streams[device], stream); }
int64_t new_stream(int device, int priority) {
  Lock lock;
  auto stream = ++runtime().next_stream[device];
  runtime().priorities[{device, stream}] = priority;
  queue_of({device, stream});
  return stream;
}

void note_course(uint64_t what) {
  auto& course = runtime().course;
  course = (course ^ what) * 0x9E3779B97F4A7C15u;
  course ^= course >> 29;
}

void enqueue(StreamKey stream, std::string name, Task task, const std::vector<Range>& ranges, const Sizes& sizes) {
  if (by_shapes_alone()) {
    Asked one{"run", stream, 0, 0, 0, std::move(name), sizes};
    for (auto& range : ranges) (range.write ? one.writes : one.reads) += range.end - range.begin;
    return note(std::move(one));
  }
  auto place = here();
  Lock lock;
  auto& r = runtime();
  auto& queue = queue_of(stream);
  r.last_call = Time::now();
  join(queue.clock, r.host);
  Entry entry{task.is_complete ? Kind::Collective : Kind::Run, nullptr, std::move(task), nullptr, {}};
  if (entry.kind == Kind::Collective) r.collectives++;
  for (auto& range : ranges) {
    if (range.begin >= range.end) continue;
    auto memory = allocation_at(range.begin);
    if (!memory) continue;
    entry.memory.emplace_back(memory, range.write);
    (range.write ? memory->pending_writes : memory->pending_reads)++;
    if (!std::exchange(memory->stale, false)) continue;
    Entry first{Kind::Run, nullptr, {[memory] { poison(memory->begin, memory->size); }, {}, {}}, nullptr, {}};
    queue.clock[stream] = ++r.ticks;
    first.operation = std::make_shared<Operation>(Operation{"the first use of memory given out again, by " + name, stream, r.ticks, place});
    note_access(first.operation, queue.clock, {{memory->begin, memory->begin + memory->size, true}});
    queue.entries.push_back(std::move(first));
  }
  queue.clock[stream] = ++r.ticks;
  entry.operation = std::make_shared<Operation>(Operation{std::move(name), stream, r.ticks, place});
  note_access(entry.operation, queue.clock, ranges);
  for (auto& [memory, write] : entry.memory)
    if (memory->pinned()) close_to_host(memory);
  queue.entries.push_back(std::move(entry));
  let_time_pass();
}

RecordingP record(StreamKey stream) {
  Lock lock;
  auto& queue = queue_of(stream);
  auto recording = std::make_shared<Recording>();
  join(queue.clock, runtime().host);
  recording->stream = stream;
  recording->clock = queue.clock;
  recording->done = queue.entries.empty() && !queue.busy;
  note({"record", stream, reinterpret_cast<int64_t>(recording.get())});
  if (!recording->done) queue.entries.push_back({Kind::Record, nullptr, {}, recording, {}});
  return recording;
}

void block(StreamKey stream, const RecordingP& recording) {
  Lock lock;
  note({"wait", stream, reinterpret_cast<int64_t>(recording.get())});
  auto& queue = queue_of(stream);
  join(queue.clock, recording->clock);
  if (!recording->done) queue.entries.push_back({Kind::Wait, nullptr, {}, recording, {}});
}

bool query(const RecordingP& recording) {
  Lock lock;
  auto& r = runtime();
  r.last_call = Time::now();
  // Who asks again and again must be told yes one day, so a question moves the device, and now and then is answered no.
  if (!recording->done && !r.depth && !(r.order == Order::Drawn && r.draws() % 4 == 0)) {
    towards(recording);
    run_early_streams();
  }
  if (recording->done) tell_host(recording);
  return recording->done;
}

void wait_on_host(const RecordingP& recording, const char* why) {
  if (why != nullptr) {
    auto place = here();
    Lock lock;
    count_wait(why);
  }
  Lock lock;
  auto& r = runtime();
  TORCH_CHECK(!r.depth || recording->done, "sim: a task on the device waits for the device");
  note({"host_wait", recording->stream, reinterpret_cast<int64_t>(recording.get())});
  r.last_call = Time::now();
  auto since = Time::now();
  while (!recording->done) {
    bool moved = r.order == Order::Drawn && r.draws() % 2 && step_any(true);
    if (!moved) moved = towards(recording);
    run_early_streams();
    if (moved) continue;
    // Another thread is waiting for a collective at the head of the queue.
    TORCH_CHECK(Time::now() - since < kHang, "sim: the device does not get to what the host waits for");
    r.mutex.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    r.mutex.lock();
  }
  tell_host(recording);
  throw_error();
}

void synchronize_stream(StreamKey stream, const char* why) { wait_on_host(record(stream), why); }

void synchronize_device(int device, const char* why) {
  std::vector<RecordingP> recordings;
  {
    Lock lock;
    if (why != nullptr) count_wait(why);
    for (auto* queue : queues_of(device)) recordings.push_back(record(queue->key));
  }
  for (auto& recording : recordings) wait_on_host(recording, nullptr);
}

void settle() {
  Lock lock;
  auto& r = runtime();
  r.last_call = Time::now();
  if (r.depth) return;
  while (step_any(false)) {}
  for (auto* queue : queues_of(-1))
    while (!queue->entries.empty() && !queue->busy) {
      auto& head = queue->entries.front();
      if (!(head.kind == Kind::Wait && !head.recording->done ? towards(head.recording) : step(*queue, true))) break;
    }
}

// A program may hold up its host by other means than the device's, a peer's message for one, while a peer waits for a
// collective that lies in a queue here. After a while without a call the device goes on by itself, as a real one does.
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
      std::lock_guard<std::recursive_mutex> guard(r.mutex);
      if (r.depth || idle < kNaps || Time::now() - r.last_call < kHeldUp) continue;
      bool moved = false;
      while (step_any(false)) moved = true;
      if (moved) r.unreplayable.emplace_back("the device went on while the host was held up by something else");
    }
  }).detach();
}

void set_schedule(uint64_t seed, int rank) {
  for (int device = 0; device < device_count(); device++) empty_cache(device);  // after all its work
  Lock lock;
  auto& r = runtime();
  constexpr uint64_t kFixed = 4;
  r.order = seed < kFixed ? static_cast<Order>(seed) : Order::Drawn;
  r.draws.seed(seed * 1000003 + static_cast<uint64_t>(rank));
  r.course = 0;
  r.first_tick = r.ticks;
  r.waits.clear();
  r.unreplayable.clear();
  forget_all_accesses();
  std::erase_if(r.queues, [](auto& entry) { return entry.second.entries.empty() && !entry.second.busy; });
  for (auto& [key, queue] : r.queues) queue.pace = draw_pace(key);
}

std::vector<Wait> take_waits() {
  Lock lock;
  std::vector<Wait> out;
  for (auto& [key, value] : runtime().waits) out.push_back({key.first, text(value.first), value.second});
  runtime().waits.clear();
  return out;
}
std::vector<std::string> take_unreplayable() {
  Lock lock;
  return std::exchange(runtime().unreplayable, {});
}
std::map<std::string, int64_t> counters() {
  Lock lock;
  auto& r = runtime();
  int64_t pending = 0;
  for (auto& [key, queue] : r.queues) pending += static_cast<int64_t>(queue.entries.size());
  return {{"executed", r.executed}, {"pending", pending}, {"collectives", r.collectives}, {"course", static_cast<int64_t>(r.course)}};
}
std::string stream_name(StreamKey stream) {
  return "sim:" + std::to_string(stream.first) + (stream.second == 0 ? " default stream" : " stream " + std::to_string(stream.second));
}
}  // namespace sim
