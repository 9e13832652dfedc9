// Tensors of the device, and CPU tensors over the same memory, with which tasks compute.
#pragma once
#include <ATen/ATen.h>

#include "device.h"

namespace sim {
constexpr auto kSim = c10::DeviceType::PrivateUse1;
using Tensors = std::vector<at::Tensor>;

inline c10::Device device_of(int index) { return c10::Device(kSim, static_cast<c10::DeviceIndex>(index)); }
inline int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
inline StreamKey current(int device) { return {device, current_stream(device)}; }

// -- tensors.cpp: creation, resizing, views, copies and CPU aliases
// Guard that disables autograd, autocast and modes of the thread that runs a task, and warnings, which the meta kernel gave.
struct Below {
  c10::impl::ForceDispatchKeyGuard guard;
  std::optional<c10::WarningUtils::WarningHandlerGuard> silence;
  explicit Below(bool quiet = true);
};

class Aliases {  // CPU tensors over the same memory; tensors of one storage share one storage
 public:
  at::Tensor of(const at::Tensor& tensor);

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
};
inline at::Tensor alias_of(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : Aliases().of(tensor); }
Range range_of(const at::Tensor& tensor, bool write);
// -- guard.cpp: the parts that torch requires of every device
at::Generator host_generator(const std::optional<at::Generator>& generator, int device);
const at::Generator& default_generator(int device);
}  // namespace sim
