// Places in the Python program: a few frames, kept as code objects until a report needs their text.
#include "device.h"

#include <algorithm>

namespace sim {
constexpr int kFrames = 24;
static auto& last_of_program = *new PlaceP(std::make_shared<Place>());  // of any thread that runs Python

PlaceP here() {
  if (!Py_IsInitialized()) return last_of_program;
  auto gil = PyGILState_Ensure();
  auto place = std::make_shared<Place>();
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && place->frames.size() < kFrames) {
    place->frames.emplace_back(PyFrame_GetCode(frame), PyFrame_GetLasti(frame));  // code objects are never freed
    auto* back = PyFrame_GetBack(frame);
    Py_DECREF(reinterpret_cast<PyObject*>(frame));
    frame = back;
  }
  Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  if (place->frames.empty()) {
    *place = *last_of_program;
    place->in_backward = true;
  } else {
    last_of_program = place;
  }
  PyGILState_Release(gil);
  return place;
}

static std::vector<std::string> frames_of(const PlaceP& place) {
  std::vector<std::string> frames;
  if (!place || !Py_IsInitialized()) return frames;
  auto gil = PyGILState_Ensure();
  for (auto& [code, instruction] : place->frames) {
    auto* file = PyUnicode_AsUTF8(code->co_filename);
    auto* name = PyUnicode_AsUTF8(code->co_qualname);
    auto line = std::to_string(PyCode_Addr2Line(code, std::max(instruction, 0)));
    frames.push_back(std::string(file ? file : "?") + ":" + line + " " + (name ? name : "?"));
  }
  PyGILState_Release(gil);
  return frames;
}

std::string text(const PlaceP& place) {
  std::string out, separator = place && place->in_backward ? "(in a thread of autograd) " : "";
  for (auto& frame : frames_of(place)) out += std::exchange(separator, " < ") + frame;
  return out;
}

static std::vector<std::string> library_folders;
void set_library_folders(std::vector<std::string> folders) { library_folders = std::move(folders); }

std::string line_of_program(const PlaceP& place) {
  auto frames = frames_of(place);
  for (auto& frame : frames) {
    auto is_in = [&](auto& folder) { return frame.starts_with(folder); };
    if (frame[0] != '<' && std::none_of(library_folders.begin(), library_folders.end(), is_in)) return frame;
  }
  return frames.empty() ? "an unknown line" : frames[0];
}

OpenedBy opened_by_caller() {
  auto gil = PyGILState_Ensure();
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  auto* generator = frame == nullptr ? nullptr : PyFrame_GetGenerator(frame);
  OpenedBy opened_by;
  if (generator != nullptr)
    opened_by = OpenedBy(reinterpret_cast<PyObject*>(frame), [](PyObject* object) {
      auto state = PyGILState_Ensure();
      Py_DECREF(object);
      PyGILState_Release(state);
    });
  else
    Py_XDECREF(reinterpret_cast<PyObject*>(frame));
  Py_XDECREF(generator);
  PyGILState_Release(gil);
  return opened_by;
}

bool has_ended(const OpenedBy& frame) {
  if (!frame) return false;
  auto gil = PyGILState_Ensure();
  auto* generator = PyFrame_GetGenerator(reinterpret_cast<PyFrameObject*>(frame.get()));
  Py_XDECREF(generator);
  PyGILState_Release(gil);
  return generator == nullptr;
}
}  // namespace sim
