// What Python sees.
#include "headers.h"

#include "tensors.h"

namespace py = pybind11;

namespace sim {
void bind_collectives(py::module_& m);

namespace {
// A function of Python as work of a stream, with the tensors that it reads and writes.
void launch_function(const std::string& name, py::object function, const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, int device) {
  std::shared_ptr<py::object> held(new py::object(std::move(function)), [](auto* last) {
    py::gil_scoped_acquire gil;
    delete last;
  });
  std::vector<Range> ranges;
  for (auto& tensor : reads) ranges.push_back(range_of(tensor, false));
  for (auto& tensor : writes) ranges.push_back(range_of(tensor, true));
  enqueue(current(device), name, {[held] {
    py::gil_scoped_acquire gil;
    try {
      (*held)();
    } catch (py::error_already_set& error) {
      throw std::runtime_error(error.what());
    }
  }, {}, {}}, ranges);
}
}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  bind_collectives(m);
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("drain", [] { for (int device = 0; device < device_count(); device++) synchronize_device(device, nullptr); });
  m.def("set_schedule", &set_schedule);
  m.def("log_hazards", &log_hazards);
  m.def("fail_allocation", &fail_allocation);
  m.def("course", &course);
  m.def("take_unreplayable", &take_unreplayable);
  m.def("take_hazards", &take_hazards);
  m.def("take_waits", &take_waits);
  m.def("trace_by_shapes_alone", &trace_by_shapes_alone);
  m.def("take_asked", [] {
    py::list out;
    for (auto& one : take_asked()) out.append(py::make_tuple(one.what, one.name, one.stream.second, one.number, one.reads, one.writes, one.sizes));
    return out;
  });
  m.def("default_generator", &default_generator);
  m.def("cpu_alias", &alias_of);
  m.def("launch", &launch_function);
  m.def("register_graphs", &register_graphs);
}
