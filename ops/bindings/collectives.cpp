// The Python module weft._collectives: creates backends and pipeline links, and raises their errors
// as exceptions of the classes that set_error_classes() receives.
#include "raise.h"

#include <weft/ops/backend.h>
#include <weft/ops/pipeline.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <optional>
#include <thread>
#include <tuple>
#include <unistd.h>

namespace weft {
namespace {

using collectives::ErrorKind;

// Indexed by ErrorKind, which begins at 1. Never freed, because errors may be raised until process
// exit.
std::array<PyObject*, 5> error_classes{};

void raise_in_python(ErrorKind kind, const std::string& text) {
  if (Py_IsInitialized() == 0) return;
  const py::gil_scoped_acquire gil;
  PyErr_SetString(error_classes.at(static_cast<size_t>(kind)), text.c_str());
  // This exception keeps its Python class through dispatcher and autograd. A C++ exception with a
  // pybind11 translator does not.
  throw py::error_already_set();
}

// An exception that may be rethrown several times, unlike error_already_set, which Python consumes.
class StorableError final : public torch::PyTorchError {
 public:
  StorableError(ErrorKind kind, const std::string& text) : PyTorchError(text), kind_(kind) {}
  PyObject* python_type() override { return error_classes.at(static_cast<size_t>(kind_)); }

 private:
  const ErrorKind kind_;
};

std::exception_ptr make_storable_for_python(ErrorKind kind, const std::string& text) {
  return std::make_exception_ptr(StorableError(kind, text));
}

void set_error_classes(const py::object& mismatch,
                       const py::object& peer_lost,
                       const py::object& timeout,
                       const py::object& aborted) {
  const auto set = [](ErrorKind kind, const py::object& error_class) {
    error_classes.at(static_cast<size_t>(kind)) = py::object(error_class).release().ptr();
  };
  set(ErrorKind::kMismatch, mismatch);
  set(ErrorKind::kPeerLost, peer_lost);
  set(ErrorKind::kTimeout, timeout);
  set(ErrorKind::kAborted, aborted);
  collectives::set_error_hooks({raise_in_python, make_storable_for_python});
}

using SlowNetworkRates = std::tuple<int64_t, double, double>;

c10::intrusive_ptr<c10d::Backend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store,
    int rank,
    int size,
    std::chrono::milliseconds timeout,
    const std::string& group_name,
    const std::vector<uint64_t>& global_ranks,
    size_t staging_limit_bytes,
    const py::function& make_transport,
    const std::optional<SlowNetworkRates>& slow_network) {
  auto options = c10::make_intrusive<ops::BackendOptions>();
  options->timeout = timeout;
  options->group_name = group_name;
  options->global_ranks_in_group = global_ranks;
  options->staging_limit_bytes = staging_limit_bytes;
  if (slow_network) {
    const auto& [ranks_per_host, seconds_per_message, bytes_per_second] = *slow_network;
    options->slow_network = {.ranks_per_host = ranks_per_host,
                             .seconds_per_message = seconds_per_message,
                             .bytes_per_second = bytes_per_second};
  }
  // The options keep the callable after this call returns, so its deleter must acquire the GIL.
  const auto callable =
      std::shared_ptr<py::function>(new py::function(make_transport), [](py::function* held) {
        const py::gil_scoped_acquire gil;
        delete held;
      });
  options->make_transport = [callable](const c10::intrusive_ptr<c10d::Store>& own_store,
                                       int own_rank,
                                       int num_ranks,
                                       std::chrono::milliseconds transport_timeout) {
    const py::gil_scoped_acquire gil;
    const py::object made = (*callable)(own_store, own_rank, num_ranks, transport_timeout);
    if (!py::isinstance<c10d::Backend>(made)) {
      throw py::type_error("weft: got " + py::repr(made).cast<std::string>() +
                           " from BackendOptions.transport; return a backend of torch.distributed, "
                           "such as dist.ProcessGroupGloo(store, rank, size, timeout)");
    }
    return made.cast<c10::intrusive_ptr<c10d::Backend>>();
  };
  const py::gil_scoped_release no_gil;
  return ops::make_backend(store, rank, size, std::move(options));
}

// Ends the process after `delay` (seconds), even if its normal exit blocks, for example on a thread
// that waits for a lost rank. Does not use the interpreter, which may be finalized by then.
void exit_after(std::chrono::duration<double> delay, int status) {
  std::thread([delay, status] {
    std::this_thread::sleep_for(delay);
    ::_exit(status);
  }).detach();
}

py::list flight_log() {
  py::list result;
  for (const ops::LoggedCall& each : ops::flight_log()) {
    py::dict row;
    row["group"] = each.group_name;
    row["ranks"] = each.global_ranks;
    row["sequence"] = each.sequence;
    row["call"] = each.call;
    row["bytes"] = each.num_bytes;
    row["state"] = each.state;
    row["begin"] = each.begin;
    row["end"] = each.end;
    result.append(row);
  }
  return result;
}

PYBIND11_MODULE(_collectives, m) {
  m.def("set_error_classes", &set_error_classes);
  m.def("make_backend",
        &make_backend,
        py::arg("store"),
        py::arg("rank"),
        py::arg("size"),
        py::arg("timeout"),
        py::arg("group_name"),
        py::arg("global_ranks"),
        py::arg("staging_limit_bytes"),
        py::arg("make_transport"),
        py::arg("slow_network") = py::none());
  m.def("exit_after", &exit_after, py::arg("delay"), py::arg("status"));
  m.def("flight_log", &flight_log);
  m.def("failures_of_groups", &ops::failures_of_groups, py::call_guard<py::gil_scoped_release>());
  m.def("seconds_waited", &ops::seconds_waited);
  m.def("leave_all_groups", &ops::leave_all_groups, py::call_guard<py::gil_scoped_release>());
  m.def("link_pipeline", &ops::link_pipeline, py::call_guard<py::gil_scoped_release>());
  m.def("pipeline_link_device", &ops::pipeline_link_device);
  m.def("unlink_pipeline", &ops::unlink_pipeline, py::call_guard<py::gil_scoped_release>());
}

}  // namespace
}  // namespace weft
