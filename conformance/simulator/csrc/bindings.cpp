// What Python sees.
#include "headers.h"

#include "tensors.h"

namespace py = pybind11;

namespace sim {
void bind_collectives(py::module_& m);

namespace {
// A function of Python as work of a stream, with the tensors that it reads and writes.
void launch_function(const std::string& name, py::object function, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, int device) {
  struct Held {
    py::object function;
    ~Held() {
      py::gil_scoped_acquire gil;
      function = py::object();
    }
  };
  auto held = std::make_shared<Held>(Held{std::move(function)});
  std::vector<Range> ranges;
  for (auto& tensor : reads) ranges.push_back(range_of(tensor, false));
  for (auto& tensor : writes) ranges.push_back(range_of(tensor, true));
  enqueue(current(device), name, {[held] {
    py::gil_scoped_acquire gil;
    try {
      held->function();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  }, {}, {}}, ranges);
}

py::dict memory_stats(int device) {
  auto stats = device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
  py::dict out;
  auto add = [&](const std::string& name, const c10::CachingAllocator::Stat& stat) {
    out[py::str(name + ".current")] = stat.current;
    out[py::str(name + ".peak")] = stat.peak;
    out[py::str(name + ".allocated")] = stat.allocated;
    out[py::str(name + ".freed")] = stat.freed;
  };
  add("allocation.all", stats.allocation[0]);
  add("segment.all", stats.segment[0]);
  add("allocated_bytes.all", stats.allocated_bytes[0]);
  add("reserved_bytes.all", stats.reserved_bytes[0]);
  out["num_ooms"] = stats.num_ooms;
  out["num_device_alloc"] = stats.num_device_alloc;
  return out;
}
}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  bind_collectives(m);
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("synchronize", [](int device) { synchronize_device(device, "synchronize"); });
  m.def("drain", [] { for (int device = 0; device < device_count(); device++) synchronize_device(device, nullptr); });
  m.def("set_schedule", &set_schedule);
  m.def("log_hazards", &log_hazards);
  m.def("fail_allocation", &fail_allocation);
  m.def("empty_cache", [] { for (int device = 0; device < device_count(); device++) empty_cache(device); });
  m.def("memory_stats", &memory_stats);
  m.def("reset_peak", [](int device) { device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(device)); });
  m.def("counters", &counters);
  m.def("take_unreplayable", &take_unreplayable);
  m.def("take_hazards", [] {
    std::vector<std::vector<std::string>> out;
    for (auto& h : take_hazards()) out.push_back({h.now, h.now_stream, h.now_place, h.before, h.before_stream, h.before_place, h.missing});
    return out;
  });
  m.def("take_waits", [] {
    std::vector<std::tuple<std::string, std::string, int64_t>> out;
    for (auto& wait : take_waits()) out.emplace_back(wait.why, wait.place, wait.count);
    return out;
  });
  m.def("trace_by_shapes_alone", &trace_by_shapes_alone);
  m.def("take_asked", [] {
    py::list out;
    for (auto& one : take_asked()) out.append(py::make_tuple(one.what, one.name, one.stream.second, one.number, one.reads, one.writes, one.sizes));
    return out;
  });
  m.def("default_generator", &default_generator);
  m.def("cpu_alias", &alias_of);
  m.def("launch", &launch_function);
}
