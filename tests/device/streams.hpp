// Streams of the simulated device: each is a thread that works off a queue, as slowly and as unevenly as a test wants.
#pragma once

#include <ATen/Parallel.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;

// The key CUDA is free in torch's build for the CPU: no kernel, no guard and no hooks are registered for it. The other
// key is what torch leaves to plugins, such as those of NPUs.
#ifdef SIMULATED_PLUGIN
#define SIMULATED_KEY PrivateUse1
#define SIMULATED_SPARSE SparsePrivateUse1
#define SIMULATED_SPARSE_CSR SparseCsrPrivateUse1
#else
#define SIMULATED_KEY CUDA
#define SIMULATED_SPARSE SparseCUDA
#define SIMULATED_SPARSE_CSR SparseCsrCUDA
#endif
constexpr auto kType = c10::DeviceType::SIMULATED_KEY;
constexpr auto kKey = c10::DispatchKey::SIMULATED_KEY;

// A device's time is counted, not measured: what a kernel takes, so that shares of it are the same at any load.
constexpr int64_t kKernel = 10'000;  // nanoseconds

// --- what tests set and read ------------------------------------------------------------------------------------------

struct Stress {
  std::atomic<int64_t> seed{0};
  std::atomic<int64_t> jitter{0};  // microseconds: before each piece of work, from none to this much
  std::atomic<int64_t> side{0};    // microseconds: before each on any stream but the default one
  std::atomic<int64_t> main{0};    // microseconds: before each on the default stream
  std::atomic<bool> spins{false};  // a host that waits computes, as cudaStreamSynchronize does by default
};
inline Stress& stress() {
  static auto* one = new Stress;
  return *one;
}

struct Counts {
  std::atomic<int64_t> launches{0}, to_device{0}, to_host{0}, on_device{0}, waits{0}, collectives{0};
  std::atomic<int64_t> synchronous{0};  // launches that wait in the simulation only, for want of a kernel for shapes
};
inline Counts& counts() {
  static auto* one = new Counts;
  return *one;
}

// --- processes --------------------------------------------------------------------------------------------------------

inline std::atomic<bool> started{false}, forked{false};

inline void require_no_fork() {
  TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use "
                       "the 'spawn' start method (simulated: the streams' threads stayed in the parent)");
}

// --- points and queues ------------------------------------------------------------------------------------------------

struct Queue;

// A place in a queue, which is reached when all before it is done. Without a queue: a gate that a test opens.
struct Point {
  explicit Point(Queue* q) : queue(q) {}
  Queue* const queue;

  void reach(int64_t at) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
      clock_ = at;
    }
    changed_.notify_all();
  }
  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  int64_t clock() {
    std::lock_guard<std::mutex> lock(mutex_);
    return clock_;
  }
  // True if it was reached within the time.
  bool wait(std::chrono::milliseconds limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return reached_; });
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  int64_t clock_ = 0;
};
using PointPtr = std::shared_ptr<Point>;

struct Work {
  std::function<void()> run;
  int64_t nanoseconds;
  bool counts = true;  // a stream that has it left is not idle
};

inline uint64_t mixed(uint64_t value) {  // splitmix64
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

struct Queue {
  Queue(DeviceIndex of, StreamId number) : device(of), id(number) {
    started = true;
    std::thread([this] {
      at::init_num_threads();  // else its first products are cut for as many threads as there are cores, later ones not
      work_off();
    }).detach();
  }
  const DeviceIndex device;
  const StreamId id;

  void put(Work work) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      left_ += work.counts;
      works_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return left_ == 0;
  }
  // In the queue's own thread: stop there until the point is reached.
  void stop_at(const PointPtr& point) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_at_ = point;
    }
    point->wait();
    clock = std::max(clock, point->clock());
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_at_ = nullptr;
  }
  // Does it stand before a gate, or behind a queue that does? Then it will not go on by itself.
  bool stuck(int depth = 0) {
    PointPtr at;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      at = stopped_at_;
    }
    if (!at || at->reached() || depth > 64) return false;
    return at->queue == nullptr || at->queue->stuck(depth + 1);
  }
  // What a piece of work has thrown is told to who waits for the queue next, as CUDA's errors are.
  void rethrow() {
    std::exception_ptr error;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      std::swap(error, error_);
    }
    if (error) std::rethrow_exception(error);
  }

  int64_t clock = 0;  // the thread's own

 private:
  void pause() {
    auto& s = stress();
    auto micros = id == 0 ? s.main.load() : s.side.load();
    if (auto most = s.jitter.load()) {
      auto drawn = mixed(mixed(s.seed ^ (uint64_t(device) << 48)) ^ (uint64_t(id) << 24) ^ turn_++);
      // Long pauses are rare: one of eight has all of the range, the others a sixteenth of it.
      micros += (drawn >> 33) % (drawn % 8 ? most / 16 + 1 : most);
    }
    if (micros) std::this_thread::sleep_for(std::chrono::microseconds(micros));
  }
  void work_off();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> works_;
  int64_t left_ = 0;
  PointPtr stopped_at_;
  std::exception_ptr error_;
  uint64_t turn_ = 0;
};

inline std::mutex queues_lock;
inline std::map<std::pair<DeviceIndex, StreamId>, Queue*>& queues() {
  static auto* all = new std::map<std::pair<DeviceIndex, StreamId>, Queue*>;
  return *all;
}
inline Queue& queue(DeviceIndex device, StreamId id) {
  require_no_fork();
  std::lock_guard<std::mutex> lock(queues_lock);
  auto& found = queues()[{device, id}];
  if (!found) found = new Queue(device, id);
  return *found;
}
inline Queue& queue(const Stream& stream) { return queue(stream.device_index(), stream.id()); }
inline std::vector<Queue*> queues_of(DeviceIndex device) {
  std::lock_guard<std::mutex> lock(queues_lock);
  std::vector<Queue*> found;
  for (auto& [key, each] : queues())
    if (key.first == device) found.push_back(each);
  return found;
}

// --- graphs: while one is captured, work is noted in it and not done; a replay does it on one stream in that order ------

struct Graph {
  int64_t id = 0;
  std::vector<std::pair<Queue*, Work>> works;
  bool broken = false;
};
inline std::mutex capture_lock;
inline std::shared_ptr<Graph> captured;  // by capture_lock
inline std::atomic<bool> capturing{false};

// What CUDA refuses while a stream captures ends the capture, too.
inline void refuse_capture(const char* what) {
  if (!capturing) return;
  std::lock_guard<std::mutex> lock(capture_lock);
  if (!captured) return;
  captured->broken = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (simulated: ", what, ")");
}
inline void put(Queue& q, std::function<void()> run, int64_t nanoseconds = kKernel, bool counts = true) {
  if (capturing) {
    std::lock_guard<std::mutex> lock(capture_lock);
    if (captured) {
      captured->works.emplace_back(&q, Work{std::move(run), nanoseconds, counts});
      return;
    }
  }
  q.put({std::move(run), nanoseconds, counts});
}
inline PointPtr mark(Queue& q, bool also_captured = true) {
  auto point = std::make_shared<Point>(&q);
  auto reach = [point, &q] { point->reach(q.clock); };
  if (also_captured) put(q, reach, 0, false);
  else q.put({reach, 0, false});
  return point;
}
inline void hold(Queue& q, PointPtr point) {
  if (point->queue == &q) return;
  put(q, [&q, point] { q.stop_at(point); }, 0);
}

// --- the host waits ---------------------------------------------------------------------------------------------------

inline std::atomic<int> sync_debug_mode{0};

// An operation that makes the host wait for the device, by its nature.
inline void host_waits(const char* what) {
  refuse_capture(what);
  counts().waits++;
  TORCH_CHECK(sync_debug_mode != 2, "called a synchronizing CUDA operation (simulated: ", what, ")");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (simulated: ", what, ")");
}
// Waits until the point is reached. The error of a wait that can't end: a test holds the stream back.
inline void wait_for(const PointPtr& point) {
  auto* q = point->queue;
  auto require_moving = [&] {
    TORCH_CHECK(!q->stuck() || point->reached(), "simulated: the host waits for stream ", q->id, " of cuda:",
                (int)q->device, ", which a test holds back");
  };
  if (stress().spins) {
    while (!point->reached())
      for (int i = 0; i < 10'000 && !point->reached(); i++)
        if (i == 9'999) require_moving();
  } else {
    while (!point->wait(std::chrono::milliseconds(20))) require_moving();
  }
  q->rethrow();
}
inline void drain(Queue& q) { wait_for(mark(q, false)); }
inline void drain_device(DeviceIndex device) {
  for (auto* each : queues_of(device)) drain(*each);
}

}  // namespace simulated
