// Memory of the simulated device: the host can't read it, and what is freed is poisoned and handed out at once.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <set>
#include <tuple>
#include <unordered_map>

#include "streams.hpp"

namespace simulated {

constexpr int kMostDevices = 8;
constexpr size_t kArena = size_t(32) << 30;   // of addresses; pages come when they are written
constexpr size_t kMemory = size_t(16) << 30;  // of a device

inline int device_count() {
  static int count = [] {
    auto* wanted = getenv("SIMULATED_DEVICES");
    int all = wanted ? atoi(wanted) : 2;
    TORCH_CHECK(all >= 0 && all <= kMostDevices, "SIMULATED_DEVICES=", all, ": from 0 to ", kMostDevices);
    auto* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return all;
    int listed = *visible ? 1 : 0;  // as CUDA reads it, but for numbers that are not there
    for (auto* c = visible; *c; c++) listed += *c == ',';
    return std::min(all, listed);
  }();
  return count;
}
inline void require_device(DeviceIndex d) {
  TORCH_CHECK(d >= 0 && d < device_count(), "CUDA error: invalid device ordinal (simulated: ", (int)d, " of ",
              device_count(), ")");
}

// --- addresses ----------------------------------------------------------------------------------------------------------

// A tensor's address lies in pages that nobody may touch; kernels use as many bytes at another place, its twin.
struct Arena {
  char* base = nullptr;
  char* twin = nullptr;
};
inline Arena arenas[kMostDevices];

inline const Arena& arena(DeviceIndex d) {
  static std::once_flag once;
  std::call_once(once, [] {
    constexpr int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    for (int i = 0; i < device_count(); i++) {
      arenas[i].base = static_cast<char*>(mmap(nullptr, kArena, PROT_NONE, kind, -1, 0));
      arenas[i].twin = static_cast<char*>(mmap(nullptr, kArena, PROT_READ | PROT_WRITE, kind, -1, 0));
      TORCH_CHECK(arenas[i].base != MAP_FAILED && arenas[i].twin != MAP_FAILED, "simulated: no address space");
    }
  });
  require_device(d);
  return arenas[d];
}
inline int device_of(const void* p) {
  auto* address = static_cast<const char*>(p);
  for (int d = 0; d < kMostDevices; d++)
    if (arenas[d].base && address >= arenas[d].base && address < arenas[d].base + kArena) return d;
  return -1;
}
inline void* twin(const void* p) {
  int d = device_of(p);
  return d < 0 ? const_cast<void*>(p) : arenas[d].twin + (static_cast<const char*>(p) - arenas[d].base);
}

// A host that reads or writes device memory dies of it; this says why, and faulthandler on which line of Python.
inline struct sigaction before_ours;
inline void on_fault(int, siginfo_t* info, void*) {
  if (device_of(info->si_addr) >= 0) {
    constexpr char text[] = "simulated: the host has read or written memory of a device; the line is the first below\n";
    [[maybe_unused]] auto written = write(STDERR_FILENO, text, sizeof text - 1);
  }
  sigaction(SIGSEGV, &before_ours, nullptr);  // who returns from here meets the fault again
}
inline void tell_of_faults() {
  struct sigaction ours {};
  ours.sa_sigaction = on_fault;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGSEGV, &ours, &before_ours);
}

// --- the current device and its streams -----------------------------------------------------------------------------------

inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_streams[kMostDevices] = {};

inline Stream stream_of(DeviceIndex d, StreamId id) { return Stream(Stream::UNSAFE, Device(kType, d), id); }
inline Stream current(DeviceIndex d) {
  require_device(d);
  return stream_of(d, current_streams[d]);
}

// --- device memory ----------------------------------------------------------------------------------------------------------

struct Block {
  DeviceIndex device;
  char* address;
  size_t size;
  StreamId stream;
  int64_t graph;                // whose private pool it belongs to; 0: to none
  size_t asked = 0;             // bytes, rounded as CUDA rounds them
  std::set<StreamId> users;     // other streams that use it, by record_stream
  std::vector<PointPtr> until;  // what those still had to do when it was freed
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto d = current_device;
    Device device(kType, d);
    if (!bytes) return {nullptr, nullptr, &release_block, device};
    auto id = current(d).id();
    size_t asked = (bytes + 511) / 512 * 512, size = class_of(asked);
    int64_t graph = 0;
    if (capturing) {
      std::lock_guard<std::mutex> lock(capture_lock);
      if (captured) graph = captured->id;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    reap();
    auto& use = use_[d];
    if (use.current + asked > std::min(limit(), kMemory))
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory (simulated). Tried to allocate ", bytes,
                                                 " bytes; GPU ", (int)d, " has ", limit(), ", of which ",
                                                 use.current, " are in use"));
    auto& list = free_[{d, graph ? -graph : id, size}];
    Block* block;
    if (list.empty()) {
      TORCH_CHECK(use.top + size <= kArena, "simulated: the addresses of cuda:", (int)d, " are used up");
      block = new Block{d, arena(d).base + use.top, size, id, graph};
      use.top += size;
      poison(block);
    } else {
      block = list.back();
      list.pop_back();
      block->stream = id;
    }
    block->asked = asked;
    live_[block->address] = block;
    use.current += asked;
    use.peak = std::max(use.peak, use.current);
    return {block->address, block, &release_block, device};
  }
  void recordStream(const c10::DataPtr& data, Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = live_.find(data.get());
    if (found != live_.end() && found->second->stream != stream.id()) found->second->users.insert(stream.id());
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(twin(to), twin(from), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* each : {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]}) {
      each->current = use_[d].current;
      each->peak = use_[d].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override {
    std::lock_guard<std::mutex> lock(mutex_);
    use_[d].peak = use_[d].current;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {std::min(limit(), kMemory) - use_[d].current, kMemory};
  }
  std::atomic<size_t> bound{kMemory};  // bytes of a device that tests leave it

 private:
  struct Use {
    size_t current = 0, peak = 0, top = 0;
  };
  size_t limit() const { return bound; }
  static size_t class_of(size_t bytes) {
    if (bytes > 1 << 20) return (bytes + (1 << 20) - 1) >> 20 << 20;
    size_t size = 512;
    while (size < bytes) size *= 2;
    return size;
  }
  // NaN in every floating-point format, and an index that is out of every range. In the order of the block's stream,
  // and at once even where a graph is captured: it may be somebody else's memory when the graph is replayed.
  static void poison(Block* block) {
    auto* place = twin(block->address);
    auto size = block->asked ? block->asked : block->size;
    queue(block->device, block->stream).put({[place, size] { memset(place, 0xff, size); }, 0, false});
  }
  void recycle(Block* block) {
    if (!block->graph) poison(block);
    free_[{block->device, block->graph ? -block->graph : block->stream, block->size}].push_back(block);
  }
  static void release_block(void* context);
  void release(Block* block) {
    if (forked) return;
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(block->address);
    use_[block->device].current -= block->asked;
    for (auto id : block->users) block->until.push_back(mark(queue(block->device, id), false));
    block->users.clear();
    if (block->until.empty()) recycle(block);
    else pending_.push_back(block);
  }
  void reap() {
    for (size_t i = 0; i < pending_.size();) {
      auto* block = pending_[i];
      bool done = true;
      for (auto& each : block->until) done &= each->reached();
      if (!done) {
        i++;
        continue;
      }
      block->until.clear();
      recycle(block);
      pending_.erase(pending_.begin() + i);
    }
  }

  std::mutex mutex_;
  std::unordered_map<void*, Block*> live_;
  std::map<std::tuple<DeviceIndex, int64_t, size_t>, std::vector<Block*>> free_;
  std::vector<Block*> pending_;
  Use use_[kMostDevices];
};
inline DeviceMemory* memory() {
  static auto* one = new DeviceMemory;
  return one;
}
inline void DeviceMemory::release_block(void* context) {
  if (context) memory()->release(static_cast<Block*>(context));
}

// --- pinned memory of the host ------------------------------------------------------------------------------------------------

// As CUDA's, it is handed out anew only after the copies that use it: a block is kept until they have run.
class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &unpin, Device(at::kCPU)};
    void* place = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    TORCH_CHECK(place, "simulated: no memory to pin");
    memset(place, 0, bytes);  // who reads flags before they have come finds that nothing is wrong
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[static_cast<char*>(place)].size = bytes;
    return {place, place, &unpin, Device(at::kCPU)};
  }
  bool has(const void* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(p) != blocks_.end();
  }
  void uses(const void* p, PointPtr until) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = find(p);
    if (found != blocks_.end()) found->second.until.push_back(std::move(until));
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  struct Pinned {
    size_t size = 0;
    std::vector<PointPtr> until;
  };
  using Blocks = std::map<char*, Pinned>;
  Blocks::iterator find(const void* p) {
    auto* address = static_cast<char*>(const_cast<void*>(p));
    auto found = blocks_.upper_bound(address);
    if (found == blocks_.begin()) return blocks_.end();
    --found;
    return address < found->first + found->second.size ? found : blocks_.end();
  }
  static bool done(const Pinned& block) {
    for (auto& each : block.until)
      if (!each->reached()) return false;
    return true;
  }
  static void unpin(void* place);
  void give(char* place) {
    std::lock_guard<std::mutex> lock(mutex_);
    freed_.push_back(blocks_.extract(place));
    for (size_t i = 0; i < freed_.size();) {
      if (!forked && !done(freed_[i].mapped())) {
        i++;
        continue;
      }
      memset(freed_[i].key(), 0xff, freed_[i].mapped().size);  // who reads it still is seen
      free(freed_[i].key());
      freed_.erase(freed_.begin() + i);
    }
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::vector<Blocks::node_type> freed_;
};
inline PinnedMemory* pinned() {
  static auto* one = new PinnedMemory;
  return one;
}
inline void PinnedMemory::unpin(void* place) {
  if (place) pinned()->give(static_cast<char*>(place));
}

}  // namespace simulated
