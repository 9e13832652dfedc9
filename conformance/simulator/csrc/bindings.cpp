// Functions for Python.
#include "tensors.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace sim { void bind_collectives(py::module_& m); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  bind_collectives(m);
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("drain", &drain);
  m.def("begin_fresh_memory", &begin_fresh_memory);
  m.def("set_schedule", &set_schedule);
  m.def("log_hazards", &log_hazards);
  m.def("set_library_folders", &set_library_folders);
  m.def("course", &course);
  m.def("take_unreplayable", &take_unreplayable);
  m.def("take_hazards", [] {
    py::list out;
    for (auto& hazard : take_hazards()) {
      py::list steps;
      for (auto& step : hazard.steps)
        steps.append(py::make_tuple(step.stream, step.tick, step.name, step.place, step.source, step.source_tick));
      out.append(py::make_tuple(hazard.texts, hazard.now_tick, hazard.before_tick, steps));
    }
    return out;
  });
  m.def("take_waits", &take_waits);
  m.def("trace_by_shapes_alone", &trace_by_shapes_alone);
  m.def("take_trace", [] {
    py::list out;
    for (auto& entry : take_trace()) {
      auto number = reinterpret_cast<int64_t>(entry.object);
      out.append(py::make_tuple(
          entry.kind, entry.name, entry.stream.second, number, entry.reads, entry.writes, entry.sizes));
    }
    return out;
  });
  m.def("default_generator", &default_generator);
  m.def("cpu_alias", &alias_of);
  // Queue a Python function on the current stream, with the tensors that it reads and writes.
  m.def("launch", [](std::string name, std::function<void()> function, const Tensors& reads, const Tensors& writes, int device) {
    std::vector<sim::Range> ranges;
    for (auto& tensor : reads) ranges.push_back(range_of(tensor, false));
    for (auto& tensor : writes) ranges.push_back(range_of(tensor, true));
    enqueue(current(device), std::move(name), {std::move(function)}, ranges);
  });
  m.def("register_graphs", &register_graphs);
}
