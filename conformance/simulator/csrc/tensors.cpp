// Tensors of the device: creation, resizing, views and copies.
#include "tensors.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;

namespace sim {
Below::Below(bool quiet)
    : guard(DispatchKeySet(DispatchKey::BackendSelect),
          c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset | c10::python_ks |
              DispatchKeySet({DispatchKey::PythonDispatcher, DispatchKey::Functionalize,
                  DispatchKey::FuncTorchDynamicLayerFrontMode, DispatchKey::FuncTorchDynamicLayerBackMode})) {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  static Silent silent;
  if (quiet) silence.emplace(&silent);
}

Tensor Aliases::of(const Tensor& tensor) {
  auto& alias = tensors_[tensor.unsafeGetTensorImpl()];
  if (alias.defined()) return alias;
  auto* from = tensor.storage().unsafeGetStorageImpl();
  auto found = storages_.find(from);
  if (found == storages_.end()) {
    c10::DataPtr data(from->mutable_data(), Device(c10::kCPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), from->nbytes(), std::move(data), nullptr, false);
    found = storages_.emplace(from, std::move(storage)).first;
  }
  alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

Range range_of(const Tensor& tensor, bool write) {
  if (!tensor.defined() || tensor.numel() == 0 || tensor.storage().data() == nullptr) return {nullptr, nullptr, write};
  auto size = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  auto offset = tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  auto* begin = static_cast<const char*>(tensor.storage().data()) + offset;
  return {begin, begin + size, write};
}

namespace {
using Sizes = at::IntArrayRef;

// TensorImpl::has_compatible_shallow_copy_type lets `cpu.data = device` pass among a fixed list of backends that lacks
// PrivateUse1. MTIA's bit is in it, and is outranked by PrivateUse1's when a kernel is chosen.
DispatchKeySet keys() { return DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(c10::BackendComponent::MTIABit); }

Tensor empty(Sizes size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, device_allocator(), keys(), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), keys(), c10::dtype_or_default(dtype));
}

void grow(const Tensor& tensor) {
  if (tensor.numel() == 0) return;
  auto need = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (need > tensor.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), need);
}
const Tensor& resize_(const Tensor& self, Sizes size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  impl->set_sizes_contiguous(size);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  grow(self);
  return self;
}
Tensor& set_nothing(Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}
void record_stream(Tensor& self, c10::Stream stream) { record_use(self.storage().data(), key_of(stream)); }

// Copy between aliases, also of host tensors, because their `.data` may have changed when the copy runs.
void enqueue_copy(StreamKey stream, const char* name, const Tensor& from, const Tensor& to) {
  Aliases aliases;
  Task task{[x = aliases.of(from), y = aliases.of(to)]() mutable { Below below; y.copy_(x); }};
  enqueue(stream, name, task, {range_of(from, false), range_of(to, true)});
}

// Copy on the stream of the first device, after and before the work of the second device's stream.
void copy_between_devices(const Tensor& from, const Tensor& to) {
  auto source = current(from.device().index()), target = current(to.device().index());
  block(source, record(target));
  enqueue_copy(source, "copy between devices", from, to);
  block(target, record(source));
}

void copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current(to.device().index());
  auto pinned = is_pinned(from.storage().data());
  if (non_blocking && !pinned) {  // like CUDA: pageable memory is read before the call returns
    auto staged = [&] { Below below; return from.detach().clone(); }();
    auto alias = alias_of(to);
    TORCH_CHECK(!is_capturing(stream),
        "sim: a copy from memory that is not pinned is captured, and no replay would read it again");
    Task task{[staged, alias]() mutable { Below below; alias.copy_(staged); }};
    return enqueue(stream, "copy from pageable memory", task, {range_of(to, true)});
  }
  enqueue_copy(stream, "copy from the host", from, to);
  if (non_blocking) record_use(from.storage().data(), stream);
  else synchronize_stream(stream, "a copy from the host");
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto stream = current(from.device().index());
  auto later = non_blocking && is_pinned(to.storage().data());
  if (later && to.is_contiguous()) {
    Lock lock;
    auto memory = allocation_at(to.storage().data());
    auto range = range_of(to, true);
    if (memory && !memory->pending && !is_capturing(stream)) {
      open_to_device(memory);
      poison(range.begin, range.end - range.begin);
    }
  }
  enqueue_copy(stream, "copy to the host", from, to);
  if (later) record_use(to.storage().data(), stream);
  else synchronize_stream(stream, "a copy to the host");
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  at::assert_no_internal_overlap(to);
  auto source = from.sizes() == to.sizes() ? from : from.expand_as(to);
  c10::DeviceGuard guard(to.is_cpu() ? from.device() : to.device());
  if (source.is_cpu()) {
    copy_from_host(source, to, non_blocking);
  } else if (to.is_cpu()) {
    copy_to_host(source, to, non_blocking);
  } else if (source.device() != to.device()) {
    copy_between_devices(source, to);
  } else {
    enqueue_copy(current(to.device().index()), "copy_", source, to);
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const Tensor& self) {
  synchronize_stream(current(self.device().index()), "item");
  if (by_shapes_alone()) return c10::Scalar(0);  // programs read found_inf, for which 0 means no
  auto alias = alias_of(self);
  Below below;
  return at::_local_scalar_dense(alias);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", set_nothing);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}
// A copy resolves these views itself. With the fallbacks it would call itself endlessly.
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
}  // namespace
}  // namespace sim
