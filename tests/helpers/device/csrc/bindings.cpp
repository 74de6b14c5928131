// What Python sees of the device.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "functions.h"
#include "generator.h"
#include "graph.h"
#include "recorder.h"

namespace {

using namespace emulated;

py::dict statistics_of(const Pool& pool) {
  std::lock_guard lock(state_mutex());
  py::dict result;
  result["allocated_bytes"] = pool.statistics.allocated_bytes;
  result["peak_bytes"] = pool.statistics.peak_bytes;
  result["allocated_bytes_by_stream"] = py::dict();
  for (auto& [stream, bytes] : pool.statistics.allocated_bytes_by_stream) {
    result["allocated_bytes_by_stream"][py::int_(stream)] = bytes;
  }
  return result;
}

// For each launch its operation, its stream, the counts of its clock by stream, and the bytes that it touches.
py::list recorded_launches() {
  py::list result;
  for (auto& launch : stop_recording()) {
    result.append(py::make_tuple(launch.operation, launch.stream, launch.clock.counts(), launch.bytes));
  }
  return result;
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_device", &register_device);
  module.def(
      "launch_function",
      &launch_function,
      py::arg("operation"),
      py::arg("function"),
      py::arg("arguments"),
      py::arg("is_written"));
  module.def("statistics", [] { return statistics_of(device_memory()); });
  module.def("reset_peak", [] {
    std::lock_guard lock(state_mutex());
    device_memory().statistics.peak_bytes = device_memory().statistics.allocated_bytes;
  });
  py::class_<Graph>(module, "Graph")
      .def(py::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay);

  module.def("set_delays", &set_delays, py::arg("seed"), py::arg("most_us"));
  module.def("set_link", &set_link, py::arg("latency_s"), py::arg("bytes_per_s"));
  module.def("hold_streams", &hold_streams, py::arg("are_held"));
  module.def("start_recording", &start_recording);
  module.def("stop_recording", &recorded_launches);
  module.def("set_detecting", &set_detecting, py::arg("is_on"));
  py::enum_<Edge>(module, "Edge").value("WAIT", Edge::WAIT).value("EVENT", Edge::EVENT).value("HOLD", Edge::HOLD);
  module.def("leave_out", &leave_out, py::arg("edge"), py::arg("number"));
  module.def("edges_since_then", &edges_since_then, py::arg("edge"));
  module.def("name_storage", &name_storage, py::arg("tensor"), py::arg("name"));
  module.def(
      "make_process_group",
      [](const c10::intrusive_ptr<c10d::Backend>& host) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<emulated::ProcessGroup>(host);
      },
      py::arg("host"));
  module.def("default_generator", [] { return emulated::default_generator(); });
}
