// The parts that torch requires of every device: a guard, hooks and a generator.
#include "tensors.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

namespace sim {
namespace {
RecordingP recording_of(void* event) { return event == nullptr ? nullptr : *static_cast<RecordingP*>(event); }
DeviceIndex or_current(DeviceIndex device) { return device < 0 ? current_device() : device; }
Stream stream_of(int device, int64_t id) { return Stream(Stream::UNSAFE, device_of(device), id); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device device) const override { return device_of(exchange_device(index_of(device))); }
  Device getDevice() const override { return device_of(current_device()); }
  void setDevice(Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(Device device) const noexcept override { setDevice(device); }
  Stream getStream(Device device) const override { return stream_of(index_of(device), current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream_of(index_of(device), new_stream(index_of(device))); }
  Stream exchangeStream(Stream to) const override { return stream_of(to.device_index(), exchange_stream(key_of(to))); }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<RecordingP*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new RecordingP;
    *static_cast<RecordingP*>(*event) = sim::record(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (auto recording = recording_of(event)) sim::block(key_of(stream), recording);
  }
  bool queryEvent(void* event) const override {
    auto recording = recording_of(event);
    return !recording || query(recording);
  }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  bool isStreamCapturing(const Stream& stream) const override { return is_capturing(key_of(stream)); }
  bool queryStream(const Stream& stream) const override { return query(sim::record(key_of(stream))); }
  void synchronizeStream(const Stream& stream) const override { synchronize_stream(key_of(stream), "synchronize of a stream"); }
  void synchronizeEvent(void* event) const override {
    if (auto recording = recording_of(event)) wait_on_host(recording, "synchronize of an event");
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(or_current(device), "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    record_use(data.get(), key_of(stream));
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The CPU's generator draws numbers during the call. A task of the stream stores them.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(int device)
      : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->host = host.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(or_current(device)); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return at::make_generator<Generator>(or_current(device)); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { exchange_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return exchange_device(device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchange_device(or_current(device)); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(impl->device());
    auto fresh = device_allocator()->allocate(size);
    auto keep = std::min(size, impl->nbytes());
    if (keep != 0 && impl->data() != nullptr) {
      auto *to = static_cast<char*>(fresh.get()), *from = static_cast<char*>(impl->mutable_data());
      enqueue(current(current_device()), "resize_", {[=] { std::memcpy(to, from, keep); }},
          {{to, to + keep, true}, {from, from + keep, false}});
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(size);
  }
};

REGISTER_ALLOCATOR(kSim, device_allocator())
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
}  // namespace

const at::Generator& default_generator(int device) {
  static auto* all = new std::vector<at::Generator>;
  while (static_cast<int>(all->size()) <= device) all->push_back(at::make_generator<Generator>(static_cast<int>(all->size())));
  return (*all)[device];
}

at::Generator host_generator(const std::optional<at::Generator>& generator, int device) {
  const auto& found = generator && generator->defined() ? *generator : default_generator(device);
  return found.device().type() == kSim ? static_cast<Generator*>(found.unsafeGetGeneratorImpl())->host : found;
}
}  // namespace sim
