// Sparse tensors on the simulated device. What makes them, takes them apart and copies them is the same function in torch
// for the CPU and for CUDA, made of operators on indices and values; everything else is computed on the host.
#pragma once

#include "operators.hpp"

namespace simulated {

inline bool is_sparse(const Tensor& t) { return t.defined() && t.layout() != at::kStrided; }

// A copy on another device, of any layout; the host waits.
inline Tensor moved(const Tensor& t, Device to) {
  if (!t.defined()) return t;
  if (t.layout() == at::kStrided) return t.to(to);
  if (t.layout() == at::kSparse)
    return at::_sparse_coo_tensor_unsafe(t._indices().to(to), t._values().to(to), t.sizes(), t.scalar_type(),
                                         at::kSparse, to, false, t.is_coalesced());
  bool by_rows = t.layout() == at::kSparseCsr || t.layout() == at::kSparseBsr;
  auto compressed = by_rows ? t.crow_indices() : t.ccol_indices(), plain = by_rows ? t.col_indices() : t.row_indices();
  return at::_sparse_compressed_tensor_unsafe(compressed.to(to), plain.to(to), t.values().to(to), t.sizes(),
                                              t.scalar_type(), t.layout(), to, std::nullopt);
}

// Where a call is to make its results: on the device that it names, or else where its first tensor is.
inline std::optional<Device> device_of_call(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<Device> found;
  for (auto i = stack.size() - op.schema().arguments().size(); i < stack.size(); i++) {
    if (stack[i].isDevice() && stack[i].toDevice().type() == kType) return stack[i].toDevice();
    map_tensors(stack[i], [&](const Tensor& t) {
      if (!found && ours(t)) found = t.device();
      return t;
    });
  }
  return found;
}

inline bool is_shared_with_cpu(const std::string& name) {
  static auto* names = new std::unordered_set<std::string>{
      "aten::empty", "aten::empty_like", "aten::clone", "aten::copy_", "aten::zero_", "aten::_to_dense",
      "aten::sparse_dim", "aten::dense_dim", "aten::_dimI", "aten::_dimV", "aten::_nnz", "aten::is_coalesced",
      "aten::_indices", "aten::_values", "aten::indices", "aten::values", "aten::_coalesced_", "aten::crow_indices",
      "aten::col_indices", "aten::ccol_indices", "aten::row_indices", "aten::copy_sparse_to_sparse_",
      "aten::_sparse_coo_tensor_with_dims", "aten::_sparse_coo_tensor_with_dims_and_tensors",
      "aten::sparse_resize_", "aten::sparse_resize_and_clear_", "aten::resize_as_sparse_", "aten::unsqueeze",
      "aten::permute"};
  return names->count(name) > 0;
}

template <c10::DispatchKey kOfCpu>
void run_sparse(const c10::OperatorHandle& op, Stack* stack) {
  const auto& name = op.operator_name().name;
  c10::OptionalDeviceGuard guard(device_of_call(op, *stack));
  if (is_shared_with_cpu(name)) {
    op.callBoxedForDispatchKey(kOfCpu, *stack);
    return;
  }
  counts().launches++;
  counts().synchronous++;
  note_synchronous(name);
  refuse_capture(name.c_str());
  const auto& schema = op.schema();
  auto begin = stack->end() - schema.arguments().size();
  std::vector<IValue> args(begin, stack->end());
  stack->erase(begin, stack->end());
  Device device(kType, current_device);  // by the guard
  Stack host;
  for (auto& each : args) {
    host.push_back(map_tensors(each, [&](const Tensor& t) -> Tensor {
      if (!ours(t)) return t;
      return moved(t, at::kCPU);
    }));
    if (host.back().isDevice()) host.back() = Device(at::kCPU);
  }
  auto given = host;
  {
    at::NoGradGuard no_grad;
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    op.callBoxed(&host);
  }
  for (size_t i = 0; i < args.size(); i++) {
    auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !args[i].isTensor()) continue;
    auto target = args[i].toTensor();
    target.copy_(moved(given[i].toTensor(), device));
  }
  size_t next = 0;
  for (auto& each : schema.returns()) {
    auto result = host[next++];
    bool written = false;
    for (size_t i = 0; i < args.size() && each.alias_info(); i++) {
      auto* alias = schema.arguments()[i].alias_info();
      if (alias && alias->beforeSets() == each.alias_info()->beforeSets()) {
        stack->push_back(args[i]);
        written = true;
        break;
      }
    }
    if (!written) stack->push_back(map_tensors(result, [&](const Tensor& t) { return moved(t, device); }));
  }
}

}  // namespace simulated
