// The simulated device, under torch's key CUDA, or that of plugins: registered when this library is loaded, before torch
// looks for CUDA.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>
#ifdef SIMULATED_PLUGIN
#include <ATen/autocast_mode.h>
#endif

#include "sparse.hpp"

namespace simulated {

void Queue::work_off() {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  for (;;) {
    Work work;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !works_.empty(); });
      work = std::move(works_.front());
      works_.pop_front();
    }
    pause();
    clock += work.nanoseconds;
    try {
      work.run();
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    std::lock_guard<std::mutex> lock(mutex_);
    left_ -= work.counts;
  }
}

static std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

C10_REGISTER_GUARD_IMPL(SIMULATED_KEY, Guard)

TORCH_LIBRARY_IMPL(_, SIMULATED_KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operator>()); }

TORCH_LIBRARY_IMPL(aten, SIMULATED_KEY, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("equal", equal);
  m.impl("native_dropout", native_dropout);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  // One kernel for a list of tensors is one launch; without this torch takes it apart.
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto full = full_name(name);
    if (full.rfind("aten::_foreach_", 0) == 0 && full.find("out") == std::string::npos)
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_operator>());
  }
}

// What there is for sparse tensors of the CPU there is for those of the device; other operators are refused for both.
template <c10::DispatchKey kOfCpu>
void register_sparse(torch::Library& m) {
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (op && op->hasSchema() && op->hasKernelForDispatchKey(kOfCpu))
      m.impl(full_name(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_sparse<kOfCpu>>());
  }
}
TORCH_LIBRARY_IMPL(aten, SIMULATED_SPARSE, m) { register_sparse<c10::DispatchKey::SparseCPU>(m); }
TORCH_LIBRARY_IMPL(aten, SIMULATED_SPARSE_CSR, m) { register_sparse<c10::DispatchKey::SparseCsrCPU>(m); }
#ifdef SIMULATED_PLUGIN
// What torch has for autocast on CUDA, a plugin brings for its own.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv1d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}
#endif

// For who looks for what waits; the bindings do without the headers of the operators.
TORCH_LIBRARY(simulated, m) {
  m.def("synchronous_operators() -> str", [] {
    std::string text;
    std::lock_guard<std::mutex> lock(synchronous_lock);
    for (auto& [name, count] : synchronous_operators()) text += name + " " + std::to_string(count) + "\n";
    return text;
  });
}

// What torch's DistributedDataParallel asks for the times of its steps, in each twentieth or so. They are not simulated.
class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

static int registered = [] {
  c10::SetAllocator(kType, memory(), 0);
  at::setHostAllocator(kType, pinned(), 0);
  pthread_atfork(nullptr, nullptr, [] {
    if (started) forked = true;
  });
  return 0;
}();

}  // namespace simulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, simulated::kType, simulated::Timer)
}

namespace at {
#ifdef SIMULATED_PLUGIN
static int hooked = [] {
  RegisterPrivateUse1HooksInterface(new SimulatedHooks);
  return 0;
}();
#else
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", SimulatedHooks)
#endif
}
