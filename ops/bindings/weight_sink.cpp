// The Python module weft._weight_sink: <weft/ops/weight_sink.h> with sinks written in Python.
#include <weft/ops/weight_sink.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

namespace weft {
namespace {

// Throws `error` as a python_error: the autograd engine preserves its Python class.
[[noreturn]] void throw_in_python(py::error_already_set& error) {
  error.restore();
  python_error persistent;
  persistent.persist();
  throw std::move(persistent);
}

// A sink whose methods call the methods of the same names of a Python object.
class PythonSink final : public ops::WeightSink {
 public:
  explicit PythonSink(py::object sink) : sink_(std::move(sink)) {}
  PythonSink(const PythonSink&) = delete;
  PythonSink& operator=(const PythonSink&) = delete;
  ~PythonSink() override {
    if (Py_IsInitialized() == 0) {
      sink_.release();  // leaks: a graph may outlive the interpreter
      return;
    }
    const py::gil_scoped_acquire gil;
    sink_ = py::object();
  }

  void begin_backward() override {
    call([this] { sink_.attr("begin_backward")(); });
  }

  bool take(int index, const at::Tensor& grad, const at::Tensor& x) override {
    bool is_taken = false;
    call([&] { is_taken = sink_.attr("take")(index, grad, x).cast<bool>(); });
    return is_taken;
  }

 private:
  template <typename Function>
  static void call(Function function) {
    const py::gil_scoped_acquire gil;
    try {
      function();
    } catch (py::error_already_set& error) {
      throw_in_python(error);
    }
  }

  py::object sink_;
};

py::object call_with(py::object sink, const py::function& function) {
  const ops::WeightSinkGuard guard(std::make_shared<PythonSink>(std::move(sink)));
  return function();
}

PYBIND11_MODULE(_weight_sink, m) {
  m.def("call_with", &call_with, py::arg("sink"), py::arg("function"));
}

}  // namespace
}  // namespace weft
