// Threads of autograd, which run the backwards of the devices.
//
// Such a thread wakes the caller of a backward before it releases the last node and its tensors. Timing would decide whether
// they are freed before the caller's next operation. So the caller's next call to the device first runs an empty backward,
// which the thread starts only after it has released them.
#include "device.h"

#include <c10/util/thread_name.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <thread>

namespace sim {
namespace {
namespace autograd = torch::autograd;

struct Nothing final : autograd::Node {
  autograd::variable_list apply(autograd::variable_list&&) override { return {}; }
};

std::atomic<uint64_t> used{0};  // devices, as bits, that threads of autograd have used since the host waited for them
std::atomic<std::thread::id> host;

bool runs_backwards() {
  static thread_local const bool is_so = c10::getThreadName().rfind("pt_autograd_", 0) == 0;
  return is_so;
}

void run_nothing(int device) {
  // Made without the dispatcher, whose modes would see an operator that the program does not call.
  c10::Device on(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, on));
  auto nothing = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<float>());
  auto node = c10::make_intrusive<Nothing>();
  node->add_input_metadata(nothing);
  autograd::Engine::get_default_engine().execute({autograd::Edge(node, 0)}, {nothing}, /*keep_graph=*/false, /*create_graph=*/false,
      /*accumulate_grad=*/true);
}
}  // namespace

void be_host() { host = std::this_thread::get_id(); }

void meet_backwards(int device) {
  auto bit = uint64_t{1} << (static_cast<unsigned>(device) % 64);
  if (runs_backwards()) {
    used |= bit;
    return;
  }
  // A host that runs nodes itself is in the middle of a backward.
  if (used == 0 || host.load() != std::this_thread::get_id() || autograd::get_current_graph_task_id() != -1) return;
  auto devices = used.exchange(0);
  for (int used_device = 0; devices != 0; used_device++, devices >>= 1) {
    if (devices & 1) run_nothing(used_device);
  }
}
}  // namespace sim
