// Autocast of the device: torch's own lists of operators.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

using namespace at;            // the lists name operators and types without their namespaces
using namespace at::autocast;

namespace {
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HIGH(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(HIGH)
  AT_FORALL_FP32_SET_OPT_DTYPE(DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(WIDEST)
}
}  // namespace
