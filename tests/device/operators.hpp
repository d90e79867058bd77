// Operators of the simulated device: torch's own CPU kernels, run in a stream's thread on the twins of the tensors.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

#include <optional>
#include <unordered_set>

#include "runtime.hpp"

namespace simulated {

using at::Tensor;
using c10::IValue;
using c10::IntArrayRef;
using c10::SymIntArrayRef;
using torch::jit::Stack;

inline bool ours(const Tensor& t) { return t.defined() && t.device().type() == kType; }

// A CPU tensor over a tensor's twin. It does not keep the memory: what is freed too early is poisoned under it.
inline Tensor twin_of(const Tensor& t) {
  auto* start = static_cast<char*>(const_cast<void*>(t.storage().data()));
  if (!start) return at::detail::empty_strided_cpu(t.sizes(), t.strides(), t.scalar_type());
  auto* place = static_cast<char*>(twin(start)) + t.storage_offset() * t.element_size();
  auto made = at::from_blob(place, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

// --- memory and views ---------------------------------------------------------------------------------------------------------

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, memory(), c10::DispatchKeySet(kKey),
                                           c10::dtype_or_default(dtype));
}
inline Tensor empty_memory_format(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                                  std::optional<Device> device, std::optional<bool> pin,
                                  std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, memory(), c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
inline Tensor as_strided(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride,
                         std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
inline Tensor view(const Tensor& self, SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}
inline Tensor reshape_alias(const Tensor& self, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline const Tensor& resize_(const Tensor& self, SymIntArrayRef symbolic, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(symbolic);
  c10::DeviceGuard guard(self.device());
  auto need = at::detail::computeStorageNbytesContiguous(sizes, self.element_size(), self.storage_offset());
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (need > storage->nbytes()) {
    auto fresh = memory()->allocate(need);
    if (auto bytes = storage->nbytes()) {
      auto *to = twin(fresh.get()), *from = twin(storage->data());
      put(queue(current(self.device().index())), [=] { memcpy(to, from, bytes); });
      counts().on_device++;
    }
    storage->set_data_ptr_noswap(std::move(fresh));
    storage->set_nbytes(need);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}
inline Tensor& set_storage_offset(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size,
                                  IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t count = source.nbytes() / self.element_size();
  return set_storage_offset(self, std::move(source), 0, {count}, {1});
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline Tensor& set_empty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  auto fresh = at::detail::empty_generic({0}, memory(), c10::DispatchKeySet(kKey), self.scalar_type(), std::nullopt);
  return set_storage_offset(self, fresh.storage(), 0, {0}, {1});
}
inline void record_stream(Tensor& self, Stream stream) {
  memory()->recordStream(self.storage().data_ptr(), stream);
}

// --- copies -------------------------------------------------------------------------------------------------------------------

inline void run_copy(const Tensor& to, const Tensor& from) {
  at::NoGradGuard no_grad;
  at::native::copy_(const_cast<Tensor&>(to), from, false);
}
inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  Tensor from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (self.numel() == 0) return self;
  if (ours(self) && ours(from)) {
    auto to = twin_of(self), twin = twin_of(from);
    auto &reads = queue(current(from.device().index())), &writes = queue(current(self.device().index()));
    counts().on_device++;
    if (&reads == &writes) {
      put(reads, [to, twin] { run_copy(to, twin); });
      return self;
    }
    hold(reads, mark(writes));  // (as CUDA: the copy is in the source's stream, and the target's waits for it)
    put(reads, [to, twin] { run_copy(to, twin); });
    hold(writes, mark(reads));
    return self;
  }
  if (ours(self)) {
    auto to = twin_of(self);
    auto& q = queue(current(self.device().index()));
    counts().to_device++;
    bool later = pinned()->has(from.storage().data());  // pageable memory is read now, pinned memory when the copy runs
    if (!non_blocking) host_waits("a copy to the device");
    Tensor read = later ? from : from.clone();
    put(q, [to, read] { run_copy(to, read); });
    if (later) pinned()->uses(from.storage().data(), mark(q));
    if (!non_blocking) drain(q);
    return self;
  }
  auto twin = twin_of(from);
  auto& q = queue(current(from.device().index()));
  Tensor to = self;
  counts().to_host++;
  bool later = non_blocking && pinned()->has(self.storage().data());
  if (!later) host_waits("a copy to the host");
  put(q, [to, twin] { run_copy(to, twin); });
  if (later) pinned()->uses(self.storage().data(), mark(q));
  else drain(q);
  return self;
}
inline Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, self, non_blocking);
}
inline Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  Tensor target = to;
  return copy_(target, self, false);
}
inline at::Scalar local_scalar_dense(const Tensor& self) {
  host_waits("the value of an element");
  counts().to_host++;
  auto twin = twin_of(self);
  drain(queue(current(self.device().index())));
  return twin.item();
}
inline bool equal(const Tensor& one, const Tensor& other) {
  TORCH_CHECK(one.device() == other.device(), "Cannot compare two tensors on different devices. Got: ", one.device(),
              " and ", other.device());
  if (one.sizes() != other.sizes()) return false;
  host_waits("torch.equal");
  auto a = twin_of(one), b = twin_of(other);
  drain(queue(current(one.device().index())));
  return at::equal(a, b);
}

// --- every other operator -----------------------------------------------------------------------------------------------------

// Operators whose results have sizes that only the device knows, so that CUDA makes the host wait, too.
inline bool waits_by_nature(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>{
      "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
      "aten::bincount", "aten::repeat_interleave", "aten::is_nonzero", "aten::nonzero_numpy"};
  return names->count(name) > 0;
}

// Which operators the host has waited for in the simulation only.
inline std::mutex synchronous_lock;
inline std::map<std::string, int64_t>& synchronous_operators() {
  static auto* all = new std::map<std::string, int64_t>;
  return *all;
}
inline void note_synchronous(const std::string& name) {
  std::lock_guard<std::mutex> lock(synchronous_lock);
  synchronous_operators()[name]++;
}

template <class F>
IValue map_tensors(const IValue& value, const F& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const auto& t : value.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (const auto& t : value.toOptionalTensorVector())
      made.push_back(t && t->defined() ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return made;
  }
  return value;
}

inline Tensor moved(const Tensor& t, Device to);  // sparse.hpp

// A call of an operator on the device: what it is given, where it runs, and what is to be made for its results.
class Call {
 public:
  Call(const c10::OperatorHandle& op, std::vector<IValue> args)
      : op_(op), schema_(op.schema()), name_(op.operator_name().name), args_(std::move(args)) {
    find_device();
    translate();
    for (auto& each : schema_.returns()) {
      auto* alias = each.alias_info();
      TORCH_CHECK(!alias || alias->isWrite(), "simulated: the view ", name_, " is not implemented");
      makes_ |= !alias;
      auto kind = each.real_type()->kind();
      known_ &= kind == c10::TypeKind::TensorType || kind == c10::TypeKind::ListType;
    }
    for (auto& each : schema_.arguments()) out_ |= each.is_out();
  }

  std::vector<IValue> run() {
    counts().launches++;
    std::vector<IValue> results;
    bool later = known_ && !waits_by_nature(name_) && (!(makes_ || out_) || make_results(results));
    if (later) {
      launch(results);
    } else {
      if (waits_by_nature(name_)) host_waits(name_.c_str());
      else {
        refuse_capture(name_.c_str());
        counts().synchronous++;
        note_synchronous(name_);
      }
      results = run_now();
    }
    return makes_ ? results : what_was_written();
  }

 private:
  static std::vector<IValue> call(const c10::OperatorHandle& op, const std::vector<IValue>& host) {
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    Stack stack(host.begin(), host.end());
    op.callBoxed(&stack);
    return stack;
  }

  [[noreturn]] void two_devices(Device other) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                Device(kType, device_), " and ", other, "! (when checking arguments of ", name_, ")");
  }
  void find_device() {
    bool found = false;
    auto meet = [&](const Tensor& t) {
      if (ours(t)) {
        if (found && t.device().index() != device_) two_devices(t.device());
        device_ = t.device().index();
        found = true;
      }
      return t;
    };
    for (auto& each : args_) map_tensors(each, meet);
    for (auto& each : args_)
      if (each.isDevice() && each.toDevice().type() == kType && !found) {
        device_ = each.toDevice().has_index() ? each.toDevice().index() : current_device;
        found = true;
      }
    if (!found) device_ = current_device;
  }
  // Arguments as the CPU's kernel gets them.
  void translate() {
    bool indexes = name_.find("index") != std::string::npos;
    for (size_t i = 0; i < args_.size(); i++) {
      host_.push_back(map_tensors(args_[i], [&](const Tensor& t) -> Tensor {
        if (ours(t)) {
          if (indexes && i > 0 && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte))
            host_waits("an index of booleans");
          return twin_of(t);
        }
        if (!t.defined()) return t;
        if (t.dim() > 0) {
          if (!indexes) two_devices(t.device());
          host_waits("an index on the host");
          counts().to_device++;
        }
        return t.clone();
      }));
      if (host_[i].isDevice()) host_[i] = Device(at::kCPU);
      if (is_generator(*schema_.arguments()[i].real_type())) {
        auto given = args_[i].isNone() ? default_generator(device_) : args_[i].toGenerator();
        if (auto* one = dynamic_cast<Generator*>(given.unsafeGetGeneratorImpl())) {
          std::lock_guard<std::mutex> lock(one->mutex_);
          given = one->next();
        }
        host_[i] = given;
      }
    }
  }
  static bool is_generator(const c10::Type& type) {
    if (type.kind() == c10::TypeKind::GeneratorType) return true;
    auto* optional = type.castRaw<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  // What the results look like, from the same operator on tensors without memory. False: no kernel tells.
  bool make_results(std::vector<IValue>& results) {
    static auto* without = new std::unordered_set<std::string>;
    static std::mutex lock;
    auto full_name = name_ + "." + op_.operator_name().overload_name;
    {
      std::lock_guard<std::mutex> guard(lock);
      if (without->count(full_name)) return false;
    }
    Stack stack;
    try {
      c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
      for (auto& each : args_) {
        stack.push_back(map_tensors(each, [](const Tensor& t) {
          return ours(t) ? Tensor(at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type())) : t;
        }));
        if (stack.back().isDevice()) stack.back() = Device(at::kMeta);
      }
      op_.callBoxed(&stack);
    } catch (const c10::NotImplementedError&) {
      std::lock_guard<std::mutex> guard(lock);
      without->insert(full_name);
      return false;
    } catch (const std::exception&) {
      return false;  // the kernel itself will say what is wrong, if anything is
    }
    size_t next = 0;
    for (size_t i = 0; i < args_.size(); i++)
      if (schema_.arguments()[i].is_out() && args_[i].isTensor()) {
        auto wanted = stack[next++].toTensor(), given = args_[i].toTensor();
        if (wanted.sizes() != given.sizes()) given.resize_(wanted.sizes());
        host_[i] = twin_of(given);
      }
    if (makes_)
      for (auto& each : stack) results.push_back(map_tensors(each, [&](const Tensor& t) { return made_like(t); }));
    return true;
  }
  Tensor made_like(const Tensor& t) const {
    if (!t.defined()) return t;
    return empty_strided(t.sizes(), t.strides(), t.scalar_type(), at::kStrided, Device(kType, device_), false);
  }
  Queue& stream() const { return queue(current(device_)); }

  void launch(const std::vector<IValue>& results) {
    std::vector<IValue> targets;
    for (auto& each : results)
      targets.push_back(map_tensors(each, [](const Tensor& t) { return t.defined() ? twin_of(t) : t; }));
    put(stream(), [op = op_, host = host_, targets] {
      auto made = call(op, host);
      for (size_t i = 0; i < targets.size(); i++) {
        if (targets[i].isTensor()) {
          fill(targets[i].toTensor(), made[i].toTensor());
        } else if (targets[i].isTensorList()) {
          auto to = targets[i].toTensorVector(), from = made[i].toTensorVector();
          for (size_t k = 0; k < to.size(); k++) fill(to[k], from[k]);
        }
      }
    });
  }
  static void fill(const Tensor& to, const Tensor& from) {
    if (to.defined() && to.numel() && from.numel()) run_copy(to, from);
  }
  std::vector<IValue> run_now() {
    drain(stream());
    std::vector<IValue> results;
    for (auto& each : call(op_, host_))
      results.push_back(map_tensors(each, [&](const Tensor& t) {
        if (t.defined() && t.layout() != at::kStrided) return moved(t, Device(kType, device_));
        auto made = made_like(t);
        if (t.defined() && t.numel()) {
          auto to = twin_of(made);
          drain(stream());  // its memory is poisoned first
          run_copy(to, t);
        }
        return made;
      }));
    return results;
  }
  // What an operator in place, or one with out=, returns: its arguments.
  std::vector<IValue> what_was_written() const {
    std::vector<IValue> results;
    for (auto& each : schema_.returns())
      for (size_t i = 0; i < args_.size(); i++) {
        auto* alias = schema_.arguments()[i].alias_info();
        if (alias && each.alias_info() && alias->beforeSets() == each.alias_info()->beforeSets()) {
          results.push_back(args_[i]);
          break;
        }
      }
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  const std::vector<IValue> args_;
  std::vector<IValue> host_;
  DeviceIndex device_ = 0;
  bool makes_ = false, known_ = true, out_ = false;
};

inline void run_operator(const c10::OperatorHandle& op, Stack* stack) {
  auto begin = stack->end() - op.schema().arguments().size();
  std::vector<IValue> args(begin, stack->end());
  stack->erase(begin, stack->end());
  for (auto& each : Call(op, std::move(args)).run()) stack->push_back(std::move(each));
}

// --- operators that need more than their CPU kernel -----------------------------------------------------------------------------

inline c10::OperatorHandle find(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}
inline void convolution(const c10::OperatorHandle&, Stack* stack) { run_operator(find("aten::convolution"), stack); }
inline void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  auto begin = stack->end() - 10;
  auto weight = begin[2].toTensor();
  int64_t channels = begin[6].toBool() ? weight.size(1) * begin[8].toInt() : weight.size(0);
  stack->insert(begin + 3, IValue(std::vector<int64_t>{channels}));
  run_operator(find("aten::convolution_backward"), stack);
}
inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true) || p == 0) return {input.clone(), at::ones_like(input, at::kBool)};
  auto mask = at::empty_like(input, at::kBool).bernoulli_(1 - p);
  return {input * mask * (p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}

}  // namespace simulated
