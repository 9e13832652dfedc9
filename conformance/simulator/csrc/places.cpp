// Where in the Python program something was asked for: a few frames, kept as code objects and turned to text when told.
#include "device.h"

namespace sim {
constexpr int kFrames = 24;
static auto& last_of_program = *new PlaceP(std::make_shared<Place>());  // of any thread that runs Python

PlaceP here() {
  if (!Py_IsInitialized()) return last_of_program;
  auto gil = PyGILState_Ensure();
  auto place = std::make_shared<Place>();
  auto* frame = PyThreadState_GetFrame(PyThreadState_Get());
  while (frame != nullptr && place->frames.size() < kFrames) {
    place->frames.emplace_back(PyFrame_GetCode(frame), PyFrame_GetLasti(frame));  // code objects are kept for good
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

std::string text(const PlaceP& place) {
  if (!place || !Py_IsInitialized()) return "";
  auto gil = PyGILState_Ensure();
  std::string out;
  for (auto& [code, instruction] : place->frames) {
    auto* file = PyUnicode_AsUTF8(code->co_filename);
    auto* name = PyUnicode_AsUTF8(code->co_qualname);
    auto line = std::to_string(PyCode_Addr2Line(code, std::max(instruction, 0)));
    out += (out.empty() ? "" : " < ") + std::string(file ? file : "?") + ":" + line + " " + (name ? name : "?");
  }
  PyGILState_Release(gil);
  return (place->in_backward ? "(in a thread of autograd) " : "") + out;
}
}  // namespace sim
