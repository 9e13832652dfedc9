// The runtime's lock, and the current device and streams of each thread.
#include "device.h"

#include <c10/util/Exception.h>

#include <mutex>
#include <thread>

namespace sim {
using Mutex = std::recursive_mutex;
static int devices = 1;
static thread_local c10::DeviceIndex thread_device = 0;
static thread_local std::map<int, int64_t> thread_streams;
static thread_local int thread_locks = 0;

Lock::Lock() {
  if (Py_IsInitialized() && PyGILState_Check()) thread_ = PyEval_SaveThread();
  if (thread_locks++ == 0) meet_backwards(thread_device);
  only<Mutex>().lock();
}
Lock::~Lock() {
  only<Mutex>().unlock();
  thread_locks--;
  if (thread_ != nullptr) PyEval_RestoreThread(thread_);
}
void nap(std::chrono::microseconds time) {
  only<Mutex>().unlock();
  std::this_thread::sleep_for(time);
  only<Mutex>().lock();
}

c10::DeviceIndex current_device() { return thread_device; }
int device_count() { return devices; }
void set_device_count(int count) { devices = count; }
c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < devices, "sim: got device ", int{device}, ", but there are ", devices,
      "; ask for more when the simulator is enabled");
  return std::exchange(thread_device, device);
}
int64_t current_stream(int device) { return thread_streams[device]; }
int64_t exchange_stream(StreamKey stream) { return std::exchange(thread_streams[stream.first], stream.second); }
std::string stream_name(StreamKey stream) {
  auto which = stream.second == 0 ? " default stream" : " stream " + std::to_string(stream.second);
  return "sim:" + std::to_string(stream.first) + which;
}
}  // namespace sim
