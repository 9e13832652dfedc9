// The interface between the parts of the simulated device: first their data, then the functions of each file. A file calls
// only functions of files that are listed before it. ../__init__.py shows the path of an operator.
#pragma once
#include <Python.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace c10d {
class Store;
}

namespace sim {
struct Place {
  std::vector<std::pair<PyCodeObject*, int>> frames;  // innermost first; code and index of the instruction
  bool in_backward = false;                           // called by a thread of autograd; the frames are the caller's
};
using PlaceP = std::shared_ptr<const Place>;

using StreamKey = std::pair<int, int64_t>;  // device, stream
using Clock = std::map<StreamKey, int64_t>;
inline StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

struct Operation {  // an operation of a stream
  std::string name;
  StreamKey stream;
  int64_t tick;
  PlaceP place;
};
using OperationP = std::shared_ptr<const Operation>;

struct Recording {  // one recording of an event
  bool done = false;
  StreamKey stream;
  Clock clock;  // operations that precede it
  int64_t capture = 0;  // number of its capture; 0: none
};
using RecordingP = std::shared_ptr<Recording>;

constexpr c10::MempoolId_t kNoPool{0, 0};
struct Allocation {  // one life of a piece of memory, from its allocation until it is freed
  char* begin = nullptr;
  size_t size = 0;
  c10::MempoolId_t pool = kNoPool;  // of a graph
  StreamKey home;             // pinned memory: device -1
  std::set<StreamKey> users;  // other streams that it was recorded on
  std::vector<RecordingP> recordings;  // of the users' work when it was freed
  struct Block* block = nullptr;
  int64_t pending = 0;  // number of queued tasks that use it
  bool freed = false;
  bool stale = false;  // must be poisoned before its first use: memory of a graph, or used by tasks of its former life
  char* end() const { return begin + size; }
  bool pinned() const { return home.first < 0; }
};
using AllocationP = std::shared_ptr<Allocation>;
struct Range {
  const char* begin;
  const char* end;
  bool write;
  AllocationP life = nullptr;  // the allocation, once it is known
};

struct Task {  // queued work of a stream
  std::function<void()> run;
  std::function<bool()> is_complete = nullptr;  // of a collective, which continues elsewhere after `run` and ends with `finish`
  std::function<void()> finish = nullptr;
  std::function<bool()> is_in_flight = nullptr;  // whether all ranks have begun the collective, so that it will end
  bool is_message = false;  // a message, or a batch of messages
  bool gave_up = false;  // an earlier wait for its peers was given up
};
struct Work {
  std::string name;
  Task task;
  std::vector<Range> ranges;
};
using Sizes = std::vector<std::vector<int64_t>>;

template <class T>
T& only() {  // never destroyed, because threads and tensors outlive static objects
  static auto* one = new T;
  return *one;
}

// -- places.cpp: places in the Python program
PlaceP here();
std::string text(const PlaceP& place);  // "file:line function < file:line function ..."
std::string line_of_program(const PlaceP& place);  // the innermost frame outside library folders
void set_library_folders(std::vector<std::string> folders);  // of Python, installed packages and the simulator
using OpenedBy = std::shared_ptr<PyObject>;  // a frame
OpenedBy opened_by_caller();                  // the frame of the generator that is running; null if it is a function
bool has_ended(const OpenedBy& frame);        // whether the generator has ended, by return or exception

// -- backwards.cpp: the threads of autograd, which run the backwards of the devices
void be_host();  // from now on this thread starts backwards
void meet_backwards(int device);  // wait until an earlier backward has freed its tensors

// -- threads.cpp: the runtime's lock, and the current device and streams of each thread
class Lock {  // no thread waits for it or holds it together with the interpreter's lock
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;

 private:
  PyThreadState* thread_ = nullptr;
};
template <class T>
T take_all(T& from) {
  Lock lock;
  return std::exchange(from, {});
}
void nap(std::chrono::microseconds time);  // release the lock, which the caller holds, for this time

c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
int device_count();
void set_device_count(int count);
int64_t current_stream(int device);
int64_t exchange_stream(StreamKey stream);
std::string stream_name(StreamKey stream);

// -- trace.cpp: the calls of a program that runs by shapes alone
struct TraceEntry {
  std::string kind;  // run, record, wait, host_wait, allocate, free, use
  StreamKey stream{0, 0};
  const void* object = nullptr;  // memory, or a recording
  int64_t reads = 0, writes = 0;  // bytes
  std::string name = {};
  Sizes sizes = {};
};
bool by_shapes_alone();
void trace_by_shapes_alone(bool now);
void trace(TraceEntry entry);
std::vector<TraceEntry> take_trace();

// -- hazards.cpp: accesses to the same memory that nothing orders
// A step of the program: an operation, or a wait of a stream for the operations of another up to a tick. Operations have no
// source. The host is a stream without a tick.
struct ProgramStep {
  std::string stream;
  int64_t tick;
  std::string name, place, source;
  int64_t source_tick;
};
struct Hazard {
  std::array<std::string, 7> texts;  // later access, its stream and place; the same of the earlier one; the missing wait
  int64_t now_tick = -1, before_tick = -1;  // -1: the host
  std::vector<ProgramStep> steps;  // up to the later access; only the first hazards have them
};
void log_hazards(bool on);
void note_access(const OperationP& operation, const Clock& clock, const std::vector<Range>& ranges);
void note_reuse(const AllocationP& pinned);  // it is allocated again
void note_wait(StreamKey stream, int64_t tick, const RecordingP& recording);
void note_host(const Clock& host);           // the host knows that these operations are done
void forget_accesses(const char* begin, const char* end);
void forget_all_accesses();
void close_to_host(const AllocationP& pinned);  // if the host does not know that the tasks of the memory are done
void open_to_device(const AllocationP& allocation);
std::vector<Hazard> take_hazards();

// -- peers.cpp: reports of waiting ranks in the store of the default group
void meet_peers(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size);
// Report that this rank waits. Call it once a second during the wait, and not while a collective is in flight. Raise if no
// rank can go on. With `may_give_up`, this rank can go on, so return whether all other ranks wait instead of raising.
bool report_wait(const std::string& what, bool may_give_up = false);
void note_progress();  // this rank continues
void report_end();     // this rank ends

// -- schedule.cpp: streams are queues, and a seed says which one moves
void join(Clock& clock, const Clock& other);
int64_t new_stream(int device);
void append(StreamKey stream, Work work, const PlaceP& place);  // to its queue, not to a capture
RecordingP record(StreamKey stream);
void block(StreamKey stream, const RecordingP& recording);
bool query(const RecordingP& recording);
// Block the host. `why` is the function that the program called, for the count of its waits; null if it called none.
void wait_on_host(const RecordingP& recording, const char* why);
void synchronize_stream(StreamKey stream, const char* why);
void synchronize_device(int device, const char* why);
void drain();  // wait for all devices
void begin_queued();  // run all tasks that can run without waiting for peers
void settle();  // the host waits for something else; run everything that can run
// Block the host until `is_over`. Meanwhile the device continues. `is_in_flight`: whether peers will end the wait.
void wait_for_peers(const std::string& what, const std::function<bool()>& is_over, const std::function<bool()>& is_in_flight = nullptr);
void watch_for_held_up_host();
// A task that raises ends its stream: nothing after it runs, and every wait of the host raises, until the schedule is set.
void forget_raised_error();  // so that the device can be drained
void set_schedule(uint64_t seed, int rank);  // each rank draws separately

using Waits = std::map<std::pair<std::string, std::string>, int64_t>;  // counts by reason and place
Waits take_waits();
std::vector<std::string> take_unreplayable();
uint64_t course();  // digest of tasks and allocations, in their order
void note_course(uint64_t what);

class Capture {  // gets the work of its streams and runs none of it
 public:
  virtual int64_t number() const = 0;         // counted over all captures
  virtual c10::MempoolId_t pool() const = 0;  // from which its streams allocate
  virtual bool forbids() const = 0;           // whether this thread may query no device
  [[noreturn]] virtual void lose(const std::string& why) = 0;
  virtual void keep_work(StreamKey stream, Work work) = 0;
  virtual void keep_recording(StreamKey stream, const RecordingP& recording) = 0;
  virtual void keep_wait(StreamKey stream, const RecordingP& recording) = 0;  // the stream belongs to the capture from now on
};
void give_stream_to(Capture* capture, StreamKey stream);
void end_capture(Capture* capture);
Capture* capture_of(StreamKey stream);
inline bool is_capturing(StreamKey stream) { return capture_of(stream) != nullptr; }
bool anybody_captures();

// -- memory.cpp: allocations and their addresses
AllocationP allocation_at(const void* address);
bool is_pinned(const void* address);
void record_use(const void* address, StreamKey stream);
void poison(const char* begin, size_t size);
Work first_use(const AllocationP& stale, const std::string& by);  // the task that poisons the memory first
void hold_pool(c10::MempoolId_t pool, int by);
void begin_fresh_memory();  // the next schedule uses no block of earlier ones
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// -- launch.cpp: launches of work
// `sizes`: those of an operator's tensors, or the number of ranks of a collective.
void enqueue(StreamKey stream, std::string name, Task task, std::vector<Range> ranges, const Sizes& sizes = {});
void issue(StreamKey stream, Work work, const PlaceP& place);  // to a queue, from a capture too

// -- graphs.cpp: captures that can be replayed
void register_graphs();
}  // namespace sim
