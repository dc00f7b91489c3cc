// The search of layouts in weft.strategy._plan; its documentation is in strategy/python/_plan.pyi.

#include "tuning.h"

#include "layer_times.h"
#include "memory_model.h"
#include "weft/strategy/tuning/search.h"

#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace py = pybind11;

namespace weft::strategy {

namespace {

py::dict to_dict(const StepTime& time) {
  py::dict result;
  result["compute"] = time.compute;
  result["recomputation"] = time.recomputation;
  result["tensor_parallel"] = time.tensor_parallel;
  result["data_parallel"] = time.data_parallel;
  result["optimizer"] = time.optimizer;
  result["pipeline"] = time.pipeline;
  return result;
}

py::dict to_dict(const FoundLayout& layout) {
  const TrainingSpec& training = layout.training;
  py::dict result;
  result["mesh"] = training.mesh;
  result["sequences"] = training.sequences;
  result["accumulate_grad_batches"] = training.micro_batches;
  result["activation_checkpointing"] = checkpointing_name(training);
  result["optimizer_in_backward"] = training.steps_in_backward;
  result["sequence_parallel"] = training.sequence_parallel;
  result["offload"] = offload_name(training);
  result["zero_stage"] = training.zero_stage;
  result["first_blocks"] =
      training.pipeline ? training.pipeline->first_blocks : std::vector<int64_t>();
  result["pipeline_schedule"] =
      training.pipeline ? std::string(to_string(training.pipeline->schedule)) : std::string();
  result["num_micro_batches"] = training.pipeline ? training.pipeline->micro_batches : 1;
  result["seconds"] = to_dict(layout.time);
  result["model_flops"] = layout.time.model_flops;
  result["sent_bytes"] = layout.time.sent_bytes;
  result["bytes"] = usage_to_dict(layout.at_peak);
  return result;
}

py::tuple cluster_state(const Cluster& cluster) {
  const DeviceRates& device = cluster.device;
  return py::make_tuple(
      cluster.name,
      std::tuple(device.float32_flops,
                 device.half_flops,
                 device.bytes_per_second,
                 device.seconds_per_kernel,
                 device.overlaps),
      std::tuple(cluster.devices_per_host,
                 cluster.cores_per_host,
                 cluster.device_bytes,
                 cluster.seconds_per_wait),
      std::pair(cluster.within_host.seconds_per_message, cluster.within_host.bytes_per_second),
      std::pair(cluster.across_hosts.seconds_per_message, cluster.across_hosts.bytes_per_second),
      std::tuple(cluster.copy_bytes_per_second, cluster.host_bytes_per_second, cluster.host_bytes),
      cluster.layer_times);
}

Cluster cluster_of_state(const py::tuple& state) {
  const auto [float32_flops, half_flops, bytes_per_second, seconds_per_kernel, overlaps] =
      state[1].cast<std::tuple<double, double, double, double, bool>>();
  const auto [devices_per_host, cores_per_host, device_bytes, seconds_per_wait] =
      state[2].cast<std::tuple<int64_t, double, int64_t, double>>();
  const auto [copy_bytes_per_second, host_bytes_per_second, host_bytes] =
      state[5].cast<std::tuple<double, double, int64_t>>();
  const auto link_of = [&](std::size_t idx) {
    const auto [seconds, rate] = state[idx].cast<std::pair<double, double>>();
    return LinkRates{.seconds_per_message = seconds, .bytes_per_second = rate};
  };
  return {.name = state[0].cast<std::string>(),
          .device = {.float32_flops = float32_flops,
                     .half_flops = half_flops,
                     .bytes_per_second = bytes_per_second,
                     .seconds_per_kernel = seconds_per_kernel,
                     .overlaps = overlaps},
          .devices_per_host = devices_per_host,
          .cores_per_host = cores_per_host,
          .device_bytes = device_bytes,
          .within_host = link_of(3),
          .across_hosts = link_of(4),
          .seconds_per_wait = seconds_per_wait,
          .copy_bytes_per_second = copy_bytes_per_second,
          .host_bytes_per_second = host_bytes_per_second,
          .host_bytes = host_bytes,
          .layer_times = state[6].cast<std::optional<LayerTimes>>()};
}

template <auto kSeconds>
double collective_seconds(const Cluster& cluster,
                          double num_bytes,
                          int64_t num_ranks,
                          int64_t stride) {
  return kSeconds(group_of(cluster, num_ranks, stride), num_bytes);
}

py::dict search(const TrainingSpec& training,
                const Cluster& cluster,
                int64_t num_devices,
                int64_t global_sequences,
                int64_t memory_limit,
                std::optional<int64_t> pipeline_parallel,
                std::optional<int64_t> data_replicate,
                std::optional<int64_t> data_parallel,
                std::optional<int64_t> tensor_parallel,
                std::optional<int64_t> accumulate_grad_batches,
                const std::vector<int64_t>& zero_stages,
                const std::vector<std::string>& activation_checkpointing,
                const std::vector<bool>& optimizer_in_backward,
                const std::vector<bool>& sequence_parallel,
                const std::vector<std::string>& offload,
                int64_t max_results,
                bool finds_front) {
  LayoutSearch search = {.training = training,
                         .cluster = cluster,
                         .num_devices = num_devices,
                         .global_sequences = global_sequences,
                         .memory_limit = memory_limit,
                         .pipeline = pipeline_parallel,
                         .replicas = data_replicate,
                         .data = data_parallel,
                         .tensor = tensor_parallel,
                         .micro_batches = accumulate_grad_batches,
                         .zero_stages = zero_stages,
                         .checkpointing = {},
                         .steps_in_backward = optimizer_in_backward,
                         .offloads_states = {},
                         .sequence_parallel = sequence_parallel,
                         .max_results = max_results};
  for (const std::string& name : activation_checkpointing) {
    const auto [kind, blocks] = checkpointing_of(name);
    search.checkpointing.push_back(kind);
    search.training.checkpointed_blocks = blocks;
  }
  for (const std::string& name : offload) {
    search.offloads_states.push_back(offloads_of(name));
  }
  const LayoutSearchResult found = search_layouts(search);
  py::list layouts;
  for (const FoundLayout& layout : found.layouts) {
    layouts.append(to_dict(layout));
  }
  py::dict result;
  result["layouts"] = layouts;
  result["num_candidates"] = found.num_candidates;
  result["num_above_limit"] = found.num_above_limit;
  result["smallest"] = found.smallest ? py::object(to_dict(*found.smallest)) : py::none();
  py::list rejections;
  for (const Rejection& each : found.rejections) {
    rejections.append(py::make_tuple(each.tensor, each.reason));
  }
  result["rejections"] = rejections;
  py::list front;
  if (finds_front) {
    for (const FoundLayout& layout : search_front(search)) {
      front.append(to_dict(layout));
    }
  }
  result["front"] = front;
  return result;
}

}  // namespace

void bind_tuning(py::module_& module) {
  bind_layer_times(module);
  py::class_<Cluster>(module, "Cluster", py::is_final())
      .def(py::init(&named_cluster), py::arg("name"))
      .def_static("names", &cluster_names)
      .def_readonly("name", &Cluster::name)
      .def_readwrite("devices_per_host", &Cluster::devices_per_host)
      .def_readwrite("cores_per_host", &Cluster::cores_per_host)
      .def_readwrite("device_bytes", &Cluster::device_bytes)
      .def_readwrite("copy_bytes_per_second", &Cluster::copy_bytes_per_second)
      .def_readwrite("host_bytes_per_second", &Cluster::host_bytes_per_second)
      .def_readwrite("host_bytes", &Cluster::host_bytes)
      .def_property(
          "float32_flops",
          [](const Cluster& self) { return self.device.float32_flops; },
          [](Cluster& self, double value) { self.device.float32_flops = value; })
      .def_property(
          "half_flops",
          [](const Cluster& self) { return self.device.half_flops; },
          [](Cluster& self, double value) { self.device.half_flops = value; })
      .def_property(
          "bytes_per_second",
          [](const Cluster& self) { return self.device.bytes_per_second; },
          [](Cluster& self, double value) { self.device.bytes_per_second = value; })
      .def_property(
          "seconds_per_kernel",
          [](const Cluster& self) { return self.device.seconds_per_kernel; },
          [](Cluster& self, double value) { self.device.seconds_per_kernel = value; })
      .def_property(
          "overlaps",
          [](const Cluster& self) { return self.device.overlaps; },
          [](Cluster& self, bool value) { self.device.overlaps = value; })
      .def_property(
          "host_link",
          [](const Cluster& self) {
            return std::pair(self.within_host.seconds_per_message,
                             self.within_host.bytes_per_second);
          },
          [](Cluster& self, std::pair<double, double> value) {
            self.within_host = {.seconds_per_message = value.first,
                                .bytes_per_second = value.second};
          })
      .def_property(
          "network_link",
          [](const Cluster& self) {
            return std::pair(self.across_hosts.seconds_per_message,
                             self.across_hosts.bytes_per_second);
          },
          [](Cluster& self, std::pair<double, double> value) {
            self.across_hosts = {.seconds_per_message = value.first,
                                 .bytes_per_second = value.second};
          })
      .def_readwrite("seconds_per_wait", &Cluster::seconds_per_wait)
      .def_readwrite("layer_times", &Cluster::layer_times)
      .def("slowdown", &slowdown, py::arg("num_devices"))
      .def("all_gather_seconds",
           &collective_seconds<&all_gather_seconds>,
           py::arg("num_bytes"),
           py::arg("num_ranks"),
           py::arg("stride"))
      .def("all_reduce_seconds",
           &collective_seconds<&all_reduce_seconds>,
           py::arg("num_bytes"),
           py::arg("num_ranks"),
           py::arg("stride"))
      .def(py::pickle(&cluster_state, &cluster_of_state));
  module.def(
      "search_layouts",
      &search,
      py::arg("training"),
      py::arg("cluster"),
      py::kw_only(),
      py::arg("num_devices"),
      py::arg("global_sequences"),
      py::arg("memory_limit"),
      py::arg("pipeline_parallel") = py::none(),
      py::arg("data_replicate") = py::none(),
      py::arg("data_parallel") = py::none(),
      py::arg("tensor_parallel") = py::none(),
      py::arg("accumulate_grad_batches") = py::none(),
      py::arg("zero_stages") = std::vector<int64_t>{3, 2, 1},
      py::arg("activation_checkpointing") = std::vector<std::string>{"none", "selective", "full"},
      py::arg("optimizer_in_backward") = std::vector<bool>{false, true},
      py::arg("sequence_parallel") = std::vector<bool>{false, true},
      py::arg("offload") = std::vector<std::string>{"none"},
      py::arg("max_results") = 5,
      py::arg("finds_front") = false);
}

}  // namespace weft::strategy
