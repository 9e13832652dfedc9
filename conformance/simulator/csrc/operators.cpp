// All other operators: the meta kernel gives the outputs at once, and the CPU kernel is queued.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <unordered_map>

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using Stack = torch::jit::Stack;

namespace sim {
namespace {
template <class F>
IValue mapped(const IValue& value, F&& f) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(f(value.toTensor())) : value;
  if (!value.isTensorList() && !value.isOptionalTensorList()) return value;
  auto out = value.toList().copy();
  for (size_t i = 0; i < out.size(); i++) out.set(i, mapped(out.get(i), f));
  return out;
}
template <class F>
void each(const IValue& value, F&& f) {
  mapped(value, [&](const Tensor& tensor) {
    f(tensor);
    return tensor;
  });
}

Tensors tensors_of(const IValue& value) { return value.isTensor() ? Tensors{value.toTensor()} : value.toTensorVector(); }

bool is_wrapped(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }
Tensor wrapped_as(const Tensor& tensor, Tensor copy) {
  if (is_wrapped(tensor)) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

Tensor empty_on(c10::Device device, const Tensor& like) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().device(device));
}

void call_below(DispatchKey key, const c10::OperatorHandle& op, Stack* stack, bool quiet = true) {
  Below below(quiet);
  op.redispatchBoxed(DispatchKeySet(key), stack);
}

// Results of meta kernels by call, for each thread. Empty if the CPU kernel must run to know the result.
thread_local std::unordered_map<std::string, std::optional<Stack>> learnt;
constexpr size_t kLearnt = 20'000;

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    const auto& formal = schema_.arguments();
    args_.assign(stack->end() - static_cast<int64_t>(formal.size()), stack->end());
    for (size_t i = 0; i < args_.size(); i++) {
      auto* alias = formal[i].alias_info();
      writes_.push_back(alias != nullptr && alias->isWrite());
      if (formal[i].real_type()->str().find("Generator") != std::string::npos) generator_ = static_cast<int>(i);
    }
    find_device();
  }

  void run() {
    c10::DeviceGuard guard(device_of(device_));
    stream_ = current(device_);
    infer();
    to_cpu();
    for (size_t i = 0; i < args_.size(); i++)
      each(args_[i], [&](const Tensor& tensor) {
        if (!tensor.is_cpu()) ranges_.push_back(range_of(tensor, writes_[i]));
      });
    if (known_ && !was_learnt_ && !by_shapes_alone()) try_once();
    if (known_ && !was_learnt_) learn(fresh_ ? meta_ : Stack{});
    if (draws_in_place() && !by_shapes_alone()) draw();
    else if (known_) queue();
    else run_now();
    torch::jit::drop(*stack_, args_.size());
    for (auto& result : results_) stack_->push_back(std::move(result));
  }

 private:
  const std::string& name() const { return schema_.name(); }

  bool is_layer_norm() const { return name().starts_with("aten::native_layer_norm"); }

  // Accelerators compute these in float32 if the inputs are halves. The CPU's layer norm has statistics in the input's
  // dtype, and its fused SGD skips elements that fill complete vector registers.
  bool widens_halves() const { return is_layer_norm() || name().starts_with("aten::_fused_sgd_"); }

  void check_same_device(bool same, const Tensor& tensor) const {
    TORCH_CHECK(same, "Expected all tensors to be on the same device, but found at least two devices, ", device_of(device_),
        " and ", tensor.device(), "! (", name(), ")");
  }

  void find_device() {
    for (auto& arg : args_)
      each(arg, [&](const Tensor& tensor) {
        if (tensor.is_cpu()) return;
        TORCH_CHECK(tensor.device().type() == kSim, name(), ": got a tensor on ", tensor.device(), " among those on sim");
        int index = tensor.device().index();
        check_same_device(device_ < 0 || device_ == index, tensor);
        device_ = index;
      });
    for (auto& arg : args_)
      if (device_ < 0 && arg.isDevice()) device_ = index_of(arg.toDevice());
    if (device_ < 0) device_ = current_device();
  }

  template <class F>
  Stack args_on(c10::Device device, F&& tensor_on) const {
    Stack out;
    for (auto& arg : args_) out.push_back(arg.isDevice() ? IValue(device) : mapped(arg, tensor_on));
    return out;
  }

  // The CPU kernel runs later, and would then reject dtypes or numbers that it does not support. So it is called once during
  // the call, on tensors of ones (of zeros if they may be indices).
  void try_once() {
    if (!name().starts_with("aten::")) return;
    bool pointwise = op_.hasTag(at::Tag::pointwise);
    auto tried = args_on(c10::kCPU, [&](const Tensor& tensor) {
      Below below;
      auto copy = empty_on(c10::kCPU, tensor);
      if (is_layer_norm() && at::isReducedFloatingType(copy.scalar_type())) copy = copy.to(at::kFloat);
      copy.fill_(pointwise || tensor.is_floating_point() || tensor.is_complex() ? 1 : 0);
      return wrapped_as(tensor, copy);
    });
    call_below(DispatchKey::CPU, op_, &tried);
  }

  // A key with everything that decides the result of the meta kernel, including which arguments are the same tensor. A number
  // that is combined with elements counts by its magnitude only.
  std::string cache_key() const {
    std::ostringstream out;
    out << &schema_ << by_shapes_alone() << c10::get_default_dtype_as_scalartype();
    bool elementwise = op_.hasTag(at::Tag::pointwise) || name().starts_with("aten::_foreach_") ||
        name().starts_with("aten::_fused_");
    std::vector<const void*> seen;
    std::function<void(const IValue&)> add = [&](const IValue& value) {
      out << '|';
      if (value.isTensor() && value.toTensor().defined()) {
        auto& tensor = value.toTensor();
        seen.push_back(tensor.unsafeGetTensorImpl());
        out << std::find(seen.begin(), seen.end(), seen.back()) - seen.begin() << ' ' << tensor.scalar_type() << tensor.is_cpu()
            << is_wrapped(tensor) << tensor.sizes() << tensor.strides();
      } else if (value.isList()) {
        out << value.toListRef().size();
        for (auto& one : value.toListRef()) add(one);
      } else if (value.isDouble() && elementwise) {
        auto number = value.toDouble();
        out << std::fpclassify(number) << (number > 0) << (number < 0);
        for (auto limit : {1., 127., 255., 32767., 65504., 2147483647., 9.2e18, 3.4028235e38}) out << (std::abs(number) > limit);
      } else if (!value.isTensor()) {
        out << value;
      }
    };
    for (auto& arg : args_) add(arg);
    return out.str();
  }

  void learn(std::optional<Stack> what) {
    if (call_.empty()) return;
    if (learnt.size() == kLearnt) learnt.clear();
    learnt[call_] = std::move(what);
  }

  // Infer the results by the meta kernel. If there is none, or it raises, the CPU kernel runs at once and raises the error.
  void infer() {
    for (auto& value : schema_.returns()) {
      if (value.alias_info() != nullptr && value.alias_info()->isWrite()) continue;
      TORCH_CHECK(value.alias_info() == nullptr, "sim: ", name(), " is a view, and has no kernel of its own for sim");
      fresh_ = true;
      if (value.type()->str().find("Tensor") == std::string::npos) known_ = by_shapes_alone();
    }
    bool draws = generator_ >= 0 || op_.hasTag(at::Tag::nondeterministic_seeded);
    if (draws && !by_shapes_alone()) known_ = false;
    if (!known_) return;
    if (name().starts_with("aten::")) call_ = cache_key();  // a program may replace an operator that it has defined
    if (auto found = learnt.find(call_); found != learnt.end()) {
      was_learnt_ = true;
      known_ = found->second.has_value();
      if (known_) meta_ = *found->second;
      return;
    }
    try {
      call_meta();
    } catch (const c10::NotImplementedError&) {
      known_ = !fresh_ && (by_shapes_alone() || !has_out());
      if (!known_) learn(std::nullopt);
    } catch (const std::exception&) {
      known_ = false;  // an error is raised by the call, even if the operator only writes to its arguments
    }
  }

  void call_meta() {
    std::unordered_map<c10::TensorImpl*, Tensor> made;
    meta_ = args_on(c10::kMeta, [&](const Tensor& tensor) {
      if (tensor.is_cpu() && is_wrapped(tensor)) return tensor;
      auto& out = made[tensor.unsafeGetTensorImpl()];
      if (out.defined()) return out;
      Tensor meta(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
      return out = wrapped_as(tensor, meta);
    });
    if (generator_ >= 0) meta_[generator_] = IValue();
    auto in = meta_;
    call_below(DispatchKey::Meta, op_, &meta_, /*quiet=*/false);
    for (size_t i = 0; i < args_.size(); i++)
      if (is_out(i) && resize_as(args_[i].toTensor(), in[i].toTensor())) call_.clear();
  }

  // Return whether argument `i` is an `out`, which the operator may resize.
  bool is_out(size_t i) const { return writes_[i] && args_[i].isTensor() && schema_.arguments()[i].kwarg_only(); }

  bool has_out() const {
    for (size_t i = 0; i < args_.size(); i++)
      if (is_out(i)) return true;
    return false;
  }

  // Give `out` the sizes of `like`. Return whether it had others.
  static bool resize_as(const Tensor& out, const Tensor& like) {
    if (out.sizes() == like.sizes()) return false;
    out.resize_(like.sizes());
    if (out.strides() != like.strides()) out.as_strided_(like.sizes(), like.strides());
    return true;
  }

  void to_cpu() {
    bool of_cpu_alone = name().find("mkldnn") != std::string::npos;
    bool runs = !of_cpu_alone && op_.hasComputedKernelForDispatchKey(DispatchKey::CPU);
    TORCH_CHECK_NOT_IMPLEMENTED(by_shapes_alone() || runs,
        "sim runs ", name(), " by its kernel for the CPU, which it does not have");
    bool takes_host_indices = name().starts_with("aten::index") || name().starts_with("aten::_index_put_impl_") ||
        name().starts_with("aten::_unsafe_index");
    cpu_ = args_on(c10::kCPU, [&](const Tensor& tensor) {
      if (!tensor.is_cpu()) return aliases_.of(tensor);
      check_same_device(tensor.dim() == 0 || takes_host_indices, tensor);
      Below below;
      return wrapped_as(tensor, tensor.clone());
    });
    if (generator_ < 0) return;
    auto& given = args_[generator_];
    cpu_[generator_] = host_generator(given.isNone() ? std::nullopt : std::optional<at::Generator>(given.toGenerator()), device_);
  }

  bool draws_in_place() const {
    if (generator_ < 0 || fresh_) return false;
    for (size_t i = 0; i < args_.size(); i++)
      if (!writes_[i] && (args_[i].isTensor() || args_[i].isTensorList())) return false;
    return true;
  }

  // Draw at once, in the host's order, and store the numbers in the stream's order.
  void draw() {
    TORCH_CHECK(!is_capturing(stream_), "sim: ", name(),
        " draws its numbers on the host, which no replay of a graph would do again");
    std::vector<std::pair<Tensor, Tensor>> pairs;
    for (size_t i = 0; i < args_.size(); i++) {
      if (!writes_[i]) continue;
      cpu_[i] = mapped(args_[i], [&](const Tensor& tensor) {
        Below below;
        pairs.emplace_back(aliases_.of(tensor), empty_on(c10::kCPU, tensor));
        return pairs.back().second;
      });
    }
    call_below(DispatchKey::CPU, op_, &cpu_);
    enqueue(stream_, name(), {[pairs]() mutable { Below below; for (auto& [to, from] : pairs) to.copy_(from); }}, ranges_);
    for (size_t i = 0; i < schema_.returns().size(); i++) results_.push_back(*returned(i));
  }

  const IValue* returned(size_t i) const {  // the argument that is returned, or null
    auto* alias = schema_.returns()[i].alias_info();
    if (alias == nullptr) return nullptr;
    for (size_t j = 0; j < args_.size(); j++) {
      auto* other = schema_.arguments()[j].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return &args_[j];
    }
    TORCH_CHECK(false, "sim: ", name(), " returns no argument of its own");
  }

  template <class F>
  void give_back(F&& fresh) {
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      auto* arg = returned(i);
      results_.push_back(arg != nullptr ? *arg : fresh(i));
    }
  }

  void queue() {
    std::vector<std::pair<size_t, IValue>> outs;
    give_back([&](size_t i) {
      auto out = mapped(meta_[i], [&](const Tensor& meta) {
        auto tensor = empty_on(device_of(device_), meta);
        ranges_.push_back(range_of(tensor, true));
        return tensor;
      });
      outs.emplace_back(i, mapped(out, [&](const Tensor& tensor) { return aliases_.of(tensor); }));
      return out;
    });
    Sizes sizes;
    for (auto& arg : args_)
      if (by_shapes_alone()) each(arg, [&](const Tensor& tensor) { sizes.push_back(tensor.sizes().vec()); });
    auto run = [op = op_, cpu = std::move(cpu_), outs = std::move(outs), widen = widens_halves(), writes = writes_]() mutable {
      Below below;
      std::vector<std::pair<Tensor, Tensor>> narrowed;
      for (size_t i = 0; widen && i < cpu.size(); i++)
        cpu[i] = mapped(cpu[i], [&](const Tensor& tensor) {
          if (!at::isReducedFloatingType(tensor.scalar_type())) return tensor;
          auto wide = tensor.to(at::kFloat);
          if (writes[i]) narrowed.emplace_back(tensor, wide);
          return wide;
        });
      call_below(DispatchKey::CPU, op, &cpu);
      for (auto& [to, from] : narrowed) to.copy_(from);
      for (auto& [i, out] : outs) {
        auto to = tensors_of(out), from = tensors_of(cpu[i]);
        // Statistics that were not requested are empty from the CPU's kernels, but not from CUDA's and the meta kernels.
        for (size_t j = 0; j < to.size(); j++)
          if (to[j].defined() && (from[j].numel() != 0 || to[j].numel() == 0)) to[j].copy_(from[j]);
      }
    };
    enqueue(stream_, name(), {std::move(run)}, ranges_, sizes);
  }

  // Run while the host waits, because the results depend on data or are known only to the CPU kernel.
  void run_now() {
    TORCH_CHECK(!by_shapes_alone(), "sim: what ", name(), " returns depends on data, so its shapes alone do not say it");
    for (size_t i = 0; i < args_.size(); i++)
      if (is_out(i)) cpu_[i] = empty_on(c10::kCPU, args_[i].toTensor());
    auto passed = cpu_;
    auto cpu = std::make_shared<Stack>(std::move(cpu_));
    auto error = std::make_shared<std::exception_ptr>();
    enqueue(stream_, name(), {[op = op_, cpu, error] {
      try {
        call_below(DispatchKey::CPU, op, cpu.get(), /*quiet=*/false);
      } catch (...) {
        *error = std::current_exception();
      }
    }}, ranges_);
    synchronize_stream(stream_, name().c_str());
    if (*error) std::rethrow_exception(*error);
    auto fill = [&](const Tensor& tensor, const Tensor& from) {
      Task filling{[from, to = alias_of(tensor)]() mutable { Below below; to.copy_(from); }};
      enqueue(stream_, name() + " (its result)", filling, {range_of(tensor, true)});
    };
    for (size_t i = 0; i < args_.size(); i++) {
      if (!is_out(i)) continue;
      resize_as(args_[i].toTensor(), passed[i].toTensor());
      fill(args_[i].toTensor(), passed[i].toTensor());
    }
    give_back([&](size_t i) {
      return mapped((*cpu)[i], [&](const Tensor& from) {
        auto tensor = empty_on(device_of(device_), from);
        fill(tensor, from);
        return tensor;
      });
    });
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Stack* stack_;
  Stack args_, meta_, cpu_;
  std::vector<bool> writes_;
  int generator_ = -1, device_ = -1;
  StreamKey stream_;
  bool known_ = true, fresh_ = false, was_learnt_ = false;
  std::string call_;  // key of the call; empty if its result is not kept
  Aliases aliases_;
  std::vector<Range> ranges_;
  std::vector<IValue> results_;
};

void call(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// torch calls these on such a device by names that have neither a meta kernel nor a CPU kernel.
template <bool backward>
void convolution(const c10::OperatorHandle&, Stack* stack) {
  auto* name = backward ? "aten::convolution_backward" : "aten::convolution";
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (backward) {  // its fourth argument is bias_sizes
    auto out_channels = (*(stack->end() - 10)).toTensor().size(1);
    stack->insert(stack->end() - 7, IValue(std::vector<int64_t>{out_channels}));
  }
  call(op, stack);
}

// The CPU kernel would draw when it runs, from the CPU's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

#define BOXED(function) torch::CppFunction::makeFromBoxedFunction<&function>()

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(BOXED(call)); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("native_layer_norm", BOXED(call));  // otherwise the composite kernel runs
  m.impl("mse_loss", BOXED(call));           // likewise, and would warn about a resized result
  m.impl("convolution_overrideable", BOXED(convolution<false>));
  m.impl("convolution_backward_overrideable", BOXED(convolution<true>));
  m.impl("native_dropout", native_dropout);
}
}  // namespace
}  // namespace sim
