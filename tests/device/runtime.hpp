// What torch asks of a device: which is current, its streams and events, its random numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#ifdef SIMULATED_PLUGIN
#include <ATen/detail/PrivateUse1HooksInterface.h>
#else
#include <ATen/detail/CUDAHooksInterface.h>
#endif
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.hpp"

namespace simulated {

inline void set_device(DeviceIndex d) {
  require_device(d);
  current_device = d;
}

// --- streams and events -------------------------------------------------------------------------------------------------------

struct Event {
  PointPtr point;
  bool timed;
};
inline Event* event_of(void* event) { return static_cast<Event*>(event); }

inline double elapsed_milliseconds(void* first, void* last) {
  auto *a = event_of(first), *b = event_of(last);
  TORCH_CHECK(a && b && a->point && b->point, "Both events must be recorded before calculating elapsed time.");
  TORCH_CHECK(a->timed && b->timed, "Both events must be created with argument 'enable_timing=True'.");
  TORCH_CHECK(a->point->reached() && b->point->reached(),
              "Both events must be completed before calculating elapsed time.");
  return double(b->point->clock() - a->point->clock()) / 1e6;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  Device exchangeDevice(Device d) const override {
    Device before(kType, current_device);
    if (d.has_index()) set_device(d.index());
    return before;
  }
  Device getDevice() const override { return Device(kType, current_device); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override { current_device = d.index(); }
  Stream getStream(Device d) const override { return current(index(d)); }
  Stream getDefaultStream(Device d) const override { return stream_of(index(d), 0); }
  Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<StreamId> last{0};
    return stream_of(index(d), ++last);
  }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream exchangeStream(Stream stream) const override {
    auto before = current(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return &queue(stream); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete event_of(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    event_of(*event)->point = mark(queue(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event && event_of(event)->point) hold(queue(stream), event_of(event)->point);
  }
  bool queryEvent(void* event) const override {
    refuse_capture("the query of an event");
    return !event || !event_of(event)->point || event_of(event)->point->reached();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  bool queryStream(const Stream& stream) const override {
    refuse_capture("the query of a stream");
    return queue(stream).idle();
  }
  bool isStreamCapturing(const Stream&) const override { return capturing; }
  void synchronizeStream(const Stream& stream) const override {
    host_waits("the synchronization of a stream");
    drain(queue(stream));
  }
  void synchronizeEvent(void* event) const override {
    refuse_capture("the synchronization of an event");
    if (!event || !event_of(event)->point) return;
    if (!event_of(event)->point->reached()) counts().waits++;
    wait_for(event_of(event)->point);
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    refuse_capture("the synchronization of a device");
    counts().waits++;
    drain_device(d < 0 ? current_device : d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    memory()->recordStream(data, stream);
  }
  double elapsedTime(void* first, void* last, const DeviceIndex) const override {
    return elapsed_milliseconds(first, last);
  }

 private:
  static DeviceIndex index(Device d) { return d.has_index() ? d.index() : current_device; }
};

// --- random numbers: a seed and an offset, as CUDA's have, so that the host knows without waiting what a kernel draws -----------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex d) : GeneratorImpl(Device(kType, d), c10::DispatchKeySet(kKey)) {}
  // What the next kernel draws from.
  at::Generator next() {
    return at::detail::createCPUGenerator(mixed(mixed(seed_) + offset_++));
  }
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device_type() == at::kCPU, "RNG state is wrong size");
    auto* words = static_cast<const uint64_t*>(state.data());
    memcpy(&seed_, words, 8);
    memcpy(&offset_, words + 1, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto made = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    uint64_t words[2] = {seed_, offset_};
    memcpy(made.mutable_data_ptr(), words, sizeof words);
    return made.getIntrusivePtr();
  }
  c10::GeneratorImpl* clone_impl() const override {
    auto* made = new Generator(device().index());
    made->seed_ = seed_;
    made->offset_ = offset_;
    return made;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};
inline const at::Generator& default_generator(DeviceIndex d) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(d < 0 ? current_device : d);
}

}  // namespace simulated

namespace at {

// (The registry wants it in this namespace.)
#ifdef SIMULATED_PLUGIN
struct SimulatedHooks final : PrivateUse1HooksInterface {
#else
struct SimulatedHooks final : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return simulated::device_count() > 0; }
  bool hasCUDART() const override { return true; }
  int getNumGPUs() const override { return simulated::device_count(); }
  DeviceIndex current_device() const override { return simulated::current_device; }
  Allocator* getCUDADeviceAllocator() const override { return simulated::memory(); }
  void deviceSynchronize(DeviceIndex d) const override { simulated::drain_device(d); }
  std::string showConfig() const override { return "simulated"; }
#endif
  void init() const override { simulated::require_no_fork(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return simulated::started; }
  DeviceIndex deviceCount() const override { return simulated::device_count(); }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex d) const override { simulated::set_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    auto before = simulated::current_device;
    simulated::set_device(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    auto before = simulated::current_device;
    if (d >= 0) simulated::set_device(d);
    return before;
  }
  bool isPinnedPtr(const void* p) const override { return simulated::pinned()->has(p); }
  Allocator* getPinnedMemoryAllocator() const override { return simulated::pinned(); }
  Device getDeviceFromPtr(void* p) const override {
    int d = simulated::device_of(p);
    TORCH_CHECK(d >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return Device(simulated::kType, static_cast<DeviceIndex>(d));
  }
  const Generator& getDefaultGenerator(DeviceIndex d = -1) const override { return simulated::default_generator(d); }
  Generator getNewGenerator(DeviceIndex d = -1) const override {
    return make_generator<simulated::Generator>(d < 0 ? simulated::current_device : d);
  }
};

}  // namespace at
