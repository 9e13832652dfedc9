// torch's large headers, compiled once for the files that need them.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
