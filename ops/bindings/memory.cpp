// The Python module weft._memory: <weft/ops/memory.h>, with dicts keyed by category name.
#include <weft/ops/memory.h>

#include <torch/csrc/utils/pybind.h>

namespace weft {
namespace {

using memory::Category;
using memory::kCategoryNames;

Category category_of(const std::string& name) {
  for (size_t i = 0; i < kCategoryNames.size(); ++i) {
    if (kCategoryNames[i] == name) return static_cast<Category>(i);
  }
  throw py::value_error("weft.memory: got the category '" + name +
                        "'; pass one of weft.memory.CATEGORIES");
}

py::dict as_dict(const memory::Usage& usage) {
  py::dict dict;
  for (size_t i = 0; i < kCategoryNames.size(); ++i) {
    dict[py::str(kCategoryNames[i].data())] = usage[static_cast<Category>(i)];
  }
  return dict;
}

// Returns a tuple (name, seconds, peak bytes by category) for each phase.
py::list phases() {
  py::list list;
  for (const memory::Phase& phase : ops::memory_phases()) {
    list.append(py::make_tuple(phase.name, phase.seconds, as_dict(phase.peak)));
  }
  return list;
}

PYBIND11_MODULE(_memory, m) {
  py::list names;
  for (const std::string_view name : kCategoryNames) names.append(py::str(name.data()));
  m.attr("CATEGORIES") = py::tuple(names);
  m.def("track", &ops::track_memory);
  m.def("is_tracking", &ops::is_tracking_memory);
  m.def("current", [] { return as_dict(ops::memory_totals().current); });
  m.def("peak", [] { return as_dict(ops::memory_totals().peak); });
  m.def("num_allocations", [] { return ops::memory_totals().num_allocations; });
  m.def("num_blocks", [] { return ops::memory_totals().num_blocks; });
  m.def("phases", &phases);
  m.def("reset_peak", &ops::reset_memory_peak);
  m.def("begin_phase", [](const std::string& name, const std::string& category) {
    ops::begin_memory_phase(name, category_of(category));
  });
  m.def("set_category", [](const at::Tensor& tensor, const std::string& category) {
    return ops::set_memory_category(tensor, category_of(category));
  });
  m.def("set_category_since", [](uint64_t mark, const std::string& from, const std::string& to) {
    ops::set_memory_category_since(mark, category_of(from), category_of(to));
  });
  m.def("mark", &ops::memory_mark);
}

}  // namespace
}  // namespace weft
