// Accesses to the same memory that nothing orders, in whichever order they ran this time.
//
// Between streams, vector clocks find them: each operation is compared, when it is called, with earlier operations on the
// same memory. Between device and host, the protection of pinned pages finds them. Until the host knows that a task is
// done, it may not touch pages that the task writes, and may not write to pages that the task reads. An access of the host
// is reported and then allowed.
#include "device.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>

extern "C" __attribute__((weak)) void _Py_DumpTraceback(int file, PyThreadState* thread);  // CPython's function for signal handlers

namespace sim {
namespace {
constexpr size_t kMost = 1000;  // hazards kept
constexpr size_t kPages = 2048;  // pinned blocks watched at a time
constexpr size_t kSteps = 400, kWithSteps = 20;  // steps kept, and hazards that get them
constexpr std::ptrdiff_t kEarlier = 5;           // steps before the earlier access
constexpr StreamKey kHost{-1, 0};

struct Access {
  OperationP operation;
  bool write;
  AllocationP life;  // kept alive, so that no later allocation has its address
};
struct Cell {  // a range that the same operations touched
  const char* end;
  std::vector<Access> accesses;
};

struct Closed {  // a pinned block that is closed to the host; the signal handler reads it
  std::atomic<char*> begin{nullptr};
  std::atomic<size_t> size{0};
  std::atomic<bool> will_be_written{false};
};
struct Touch {
  std::atomic<int> state{0};  // 0 free, 1 being written, 2 to be reported
  const char* block;  // its first byte
  bool will_be_written;
  int frames;  // a pipe with the traceback
};

struct KeptStep {
  StreamKey stream;
  int64_t tick;
  OperationP operation;  // null: a wait
  PlaceP place;
  StreamKey source;
  int64_t source_tick = -1;
};

struct Log {
  bool on = false;
  std::deque<KeptStep> steps;
  std::map<const char*, Cell> cells;
  std::vector<Hazard> hazards;
  std::set<std::string> seen;
  std::map<const char*, std::vector<Access>> unseen;  // accesses that the host does not know to be done, by pinned block
};
Log& log() { return only<Log>(); }
std::array<Closed, kPages> closed;
std::array<Touch, 64> touches;
struct sigaction former_action;

void reopen(Closed& block) {
  mprotect(block.begin.load(), block.size.load(), PROT_READ | PROT_WRITE);
  block.begin.store(nullptr);
}

void keep(KeptStep step) {
  auto& steps = log().steps;
  if (steps.size() == kSteps) steps.pop_front();
  steps.push_back(std::move(step));
}

std::string name_of(StreamKey stream) { return stream == kHost ? "host" : stream_name(stream); }

std::vector<ProgramStep> steps_since(int64_t tick) {
  std::vector<ProgramStep> out;
  auto& steps = log().steps;
  auto first = std::find_if(steps.begin(), steps.end(), [&](auto& step) { return step.operation && step.tick >= tick; });
  for (auto step = first - std::min(kEarlier, first - steps.begin()); step != steps.end(); ++step)
    out.push_back({name_of(step->stream), step->tick, step->operation ? step->operation->name : "", line_of_program(step->place),
        step->operation ? "" : name_of(step->source), step->source_tick});
  return out;
}

void add(Hazard hazard) {
  auto& l = log();
  auto& [now, now_stream, now_place, before, before_stream, before_place, missing] = hazard.texts;
  auto key = now + now_place + before + before_place + missing;
  if (l.hazards.size() == kMost || !l.seen.insert(key).second) return;
  if (l.hazards.size() < kWithSteps) hazard.steps = steps_since(hazard.before_tick);
  l.hazards.push_back(std::move(hazard));
}

bool is_before(const Operation& operation, const Clock& clock) {
  auto seen = clock.find(operation.stream);
  return seen != clock.end() && seen->second >= operation.tick;
}

// Split cells at `begin` and `end`, and fill gaps between the two. Return the first cell at or after `begin`.
std::map<const char*, Cell>::iterator cut(const char* begin, const char* end) {
  auto& cells = log().cells;
  for (auto* at : {begin, end}) {
    auto next = cells.upper_bound(at);
    if (next == cells.begin()) continue;
    auto cell = std::prev(next);
    if (cell->first == at || cell->second.end <= at) continue;
    cells.emplace(at, cell->second);
    cell->second.end = at;
  }
  for (auto at = begin; at < end;) {
    auto next = cells.lower_bound(at);
    auto until = next == cells.end() ? end : std::min(end, next->first);
    at = cells.try_emplace(at, Cell{until, {}}).first->second.end;
  }
  return cells.find(begin);
}

std::string describe(const Operation& operation, bool write) { return operation.name + (write ? " writes" : " reads"); }

void report_race(const Operation& now, bool write, const Access& before, bool same_life) {
  auto& earlier = *before.operation;
  auto on = stream_name(now.stream), earlier_stream = stream_name(earlier.stream);
  std::string missing = same_life
      ? on + " does not wait for " + earlier_stream + " (wait_stream, or wait_event of an event recorded there afterwards)"
      : "the memory was freed while " + earlier_stream + " used it, and given out again: record_stream on that stream before it is freed";
  add({{describe(now, write), on, text(now.place), describe(earlier, before.write), earlier_stream, text(earlier.place), missing},
      now.tick, earlier.tick, {}});
}

void on_fault(int, siginfo_t* info, void*) {
  auto* address = static_cast<char*>(info->si_addr);
  for (auto& block : closed) {
    auto* begin = block.begin.load();
    if (begin == nullptr || address < begin || address >= begin + block.size.load()) continue;
    mprotect(begin, block.size.load(), PROT_READ | PROT_WRITE);
    for (auto& touch : touches) {
      int expected = 0;
      if (!touch.state.compare_exchange_strong(expected, 1)) continue;
      touch.block = begin;
      touch.will_be_written = block.will_be_written.load();
      int ends[2] = {-1, -1};
      auto* thread = PyGILState_GetThisThreadState();
      if (_Py_DumpTraceback != nullptr && thread != nullptr && pipe(ends) == 0) {
        fcntl(ends[1], F_SETFL, O_NONBLOCK);
        _Py_DumpTraceback(ends[1], thread);
        close(ends[1]);
      }
      touch.frames = ends[0];
      touch.state.store(2);
      break;
    }
    return;
  }
  sigaction(SIGSEGV, &former_action, nullptr);  // an access to other memory: it is repeated, and the former handler gets it
}

std::string frames_from(int file) {  // as text of Python's traceback
  if (file < 0) return text(here());
  std::string all;
  char buffer[4096];
  for (ssize_t n; (n = read(file, buffer, sizeof buffer)) > 0;) all.append(buffer, static_cast<size_t>(n));
  close(file);
  return all;
}

const Access* latest_unseen(const char* pinned) {
  auto found = log().unseen.find(pinned);
  return found == log().unseen.end() || found->second.empty() ? nullptr : &found->second.back();
}

void add_host(const std::string& what, const std::string& where, const Access* access, const std::string& missing) {
  if (access == nullptr) return add({{what, "host", where, "a task", "", "", missing}, -1, -1, {}});
  auto& before = *access->operation;
  add({{what, "host", where, describe(before, access->write), stream_name(before.stream), text(before.place), missing}, -1,
      before.tick, {}});
}

void report_touches() {
  for (auto& touch : touches) {
    if (touch.state.load() != 2) continue;
    auto* what = touch.will_be_written ? "the host touches" : "the host writes";
    add_host(what, frames_from(touch.frames), latest_unseen(touch.block),
        "the host does not wait for the stream (synchronize it, or an event recorded there afterwards)");
    touch.state.store(0);
  }
}
}  // namespace

void log_hazards(bool on) {
  Lock lock;
  log().on = on;
  static bool handled = false;
  if (!on || std::exchange(handled, true)) return;
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &former_action);
}

void note_access(const OperationP& operation, const Clock& clock, const std::vector<Range>& ranges) {
  auto& l = log();
  if (!l.on) return;
  report_touches();
  keep({operation->stream, operation->tick, operation, operation->place, {}});
  for (auto& range : ranges) {
    if (range.begin >= range.end) continue;
    auto& memory = range.life;
    if (memory && memory->pinned()) l.unseen[memory->begin].push_back({operation, range.write, memory});
    for (auto cell = cut(range.begin, range.end); cell != l.cells.end() && cell->first < range.end; ++cell) {
      auto& accesses = cell->second.accesses;
      for (auto& before : accesses)
        if ((before.write || range.write) && !is_before(*before.operation, clock))
          report_race(*operation, range.write, before, before.life == memory);
      std::erase_if(accesses, [&](auto& before) {
        return range.write ? is_before(*before.operation, clock) : !before.write && before.operation->stream == operation->stream;
      });
      accesses.push_back({operation, range.write, memory});
    }
  }
}

void note_reuse(const AllocationP& pinned) {
  open_to_device(pinned);
  auto& l = log();
  if (auto* access = l.on ? latest_unseen(pinned->begin) : nullptr)
    add_host("the host's allocator gives out again", text(here()), access,
        "it was freed before the host knew that the stream was through with it: keep it until then");
  l.unseen.erase(pinned->begin);
}

void note_wait(StreamKey stream, int64_t tick, const RecordingP& recording) {
  auto last = recording->clock.find(recording->stream);
  if (log().on && last != recording->clock.end()) keep({stream, tick, nullptr, here(), recording->stream, last->second});
}

void note_host(const Clock& host) {
  auto& l = log();
  if (!l.on) return;
  report_touches();
  for (auto& [begin, accesses] : l.unseen) {
    auto memory = accesses.front().life;
    auto known = std::erase_if(accesses, [&](auto& access) { return is_before(*access.operation, host); });
    if (known != 0) close_to_host(memory);
  }
  std::erase_if(l.unseen, [](auto& block) { return block.second.empty(); });
}

void forget_accesses(const char* begin, const char* end) {
  auto& cells = log().cells;
  if (log().on) cells.erase(cut(begin, end), cells.lower_bound(end));
}
void forget_all_accesses() {
  report_touches();
  auto& l = log();
  l.cells.clear();
  l.seen.clear();
  l.unseen.clear();
  l.steps.clear();
  for (auto& block : closed)
    if (block.begin.load() != nullptr) reopen(block);
}

void open_to_device(const AllocationP& memory) {
  if (!memory->pinned()) return;
  for (auto& block : closed)
    if (block.begin.load() == memory->begin) reopen(block);
}

void close_to_host(const AllocationP& pinned) {
  open_to_device(pinned);
  if (!log().on || latest_unseen(pinned->begin) == nullptr) return;
  auto& unseen = log().unseen[pinned->begin];
  bool written = std::any_of(unseen.begin(), unseen.end(), [](auto& access) { return access.write; });
  for (auto& block : closed) {
    if (block.begin.load() != nullptr) continue;
    block.size.store(pinned->size);
    block.will_be_written.store(written);
    block.begin.store(pinned->begin);
    mprotect(pinned->begin, pinned->size, written ? PROT_NONE : PROT_READ);
    return;
  }
}

std::vector<Hazard> take_hazards() {
  Lock lock;
  report_touches();
  return std::exchange(log().hazards, {});
}
}  // namespace sim
