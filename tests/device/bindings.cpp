// What Python needs of the simulated device: what torch._C has in a build with CUDA, and what tests set and read.
#include <torch/csrc/utils/pybind.h>

#include "collectives.hpp"

namespace py = pybind11;
using namespace simulated;

namespace {

std::map<int64_t, PointPtr> gates;
int64_t last_gate = 0, last_graph = 0;

std::shared_ptr<Graph> begin_capture() {
  std::lock_guard<std::mutex> lock(capture_lock);
  TORCH_CHECK(!captured, "simulated: one graph is captured at a time");
  captured = std::make_shared<Graph>();
  captured->id = ++last_graph;
  capturing = true;
  return captured;
}
void end_capture(const std::shared_ptr<Graph>& graph) {
  std::lock_guard<std::mutex> lock(capture_lock);
  TORCH_CHECK(captured == graph, "simulated: this graph is not the one that is captured");
  captured = nullptr;
  capturing = false;
  TORCH_CHECK(!graph->broken, "CUDA error: operation failed due to a previous error during capture");
}
void replay(const std::shared_ptr<Graph>& graph) {
  refuse_capture("the replay of a graph");
  counts().launches++;
  auto& q = queue(current(current_device));
  q.put({[graph, &q] {
           for (auto& [from, work] : graph->works) {
             q.clock += work.nanoseconds;
             work.run();
           }
         },
         0});
}

py::dict counted() {
  auto& c = counts();
  py::dict made;
  made["launches"] = c.launches.load();
  made["to_device"] = c.to_device.load();
  made["to_host"] = c.to_host.load();
  made["on_device"] = c.on_device.load();
  made["waits"] = c.waits.load();
  made["collectives"] = c.collectives.load();
  made["synchronous"] = c.synchronous.load();
  return made;
}

}  // namespace

PYBIND11_MODULE(simulated_bindings, m) {
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def_readonly("id", &Graph::id);

  // For torch._C.
  m.def("device_count", &device_count);
  m.def("is_in_bad_fork", [] { return forked.load(); });
  m.def("current_device", [] { return int(current_device); });
  m.def("set_device", [](int d) { set_device(DeviceIndex(d)); });
  m.def("current_stream", [](int d) { return current(d < 0 ? current_device : DeviceIndex(d)).id(); });
  m.def("set_stream", [](int d, StreamId id) {
    set_device(DeviceIndex(d));
    current_streams[d] = id;
  });
  m.def("synchronize", [] { Guard().synchronizeDevice(current_device); }, py::call_guard<py::gil_scoped_release>());
  m.def("elapsed_milliseconds", [](int64_t first, int64_t last) {
    return elapsed_milliseconds(reinterpret_cast<void*>(first), reinterpret_cast<void*>(last));
  });
  m.def("default_generator", [](int d) { return default_generator(DeviceIndex(d)); });
  m.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  m.def("get_sync_debug_mode", [] { return sync_debug_mode.load(); });
  m.def("memory", [](int d) {
    auto stats = memory()->getDeviceStats(DeviceIndex(d)).allocated_bytes[0];
    return py::make_tuple(stats.current, stats.peak);
  });
  m.def("memory_info", [](int d) { return memory()->getMemoryInfo(DeviceIndex(d)); });
  m.def("reset_peak", [](int d) { memory()->resetPeakStats(DeviceIndex(d)); });
  m.def("capturing", [] { return capturing.load(); });
  m.def("begin_capture", &begin_capture);
  m.def("end_capture", &end_capture);
  m.def("replay", &replay);
  m.def("collectives",
        [](const c10::intrusive_ptr<c10d::Backend>& gloo, int64_t limit) -> c10::intrusive_ptr<c10d::Backend> {
          return c10::make_intrusive<Collectives>(gloo, std::chrono::milliseconds(limit));
        });

  // For tests.
  m.def("stress", [](int64_t seed, int64_t jitter, int64_t side, int64_t main, bool spins) {
    auto& s = stress();
    s.seed = seed;
    s.jitter = jitter;
    s.side = side;
    s.main = main;
    s.spins = spins;
  });
  m.def("limit_memory", [](size_t bytes) { memory()->bound = bytes; });
  m.def("counts", &counted);
  m.def("delay", [](int d, StreamId id, int64_t milliseconds) {
    put(queue(DeviceIndex(d), id), [=] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); },
        milliseconds * 1'000'000);
  });
  m.def("hold_back", [](int d, StreamId id) {
    auto gate = std::make_shared<Point>(nullptr);
    auto& q = queue(DeviceIndex(d), id);
    q.put({[&q, gate] { q.stop_at(gate); }, 0});
    gates[++last_gate] = gate;
    return last_gate;
  });
  m.def("let_go", [](int64_t number) {
    gates.at(number)->reach(0);
    gates.erase(number);
  });
  m.def("tell_of_faults", &tell_of_faults);
}
