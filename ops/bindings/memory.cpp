// The Python module weft._memory: <weft/ops/memory.h>, with dicts keyed by category name.
#include "ledger.h"

#include <weft/ops/dry_run.h>
#include <weft/ops/memory.h>

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

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
py::list as_list(const std::vector<memory::Phase>& phases) {
  py::list list;
  for (const memory::Phase& phase : phases) {
    list.append(py::make_tuple(phase.name, phase.seconds, as_dict(phase.peak)));
  }
  return list;
}

// A ledger of blocks that have a size but no memory, each with a number. It counts as the ledger of
// the process does.
class SizeLedger {
 public:
  uint64_t add(size_t num_bytes) {
    auto header = std::make_unique<memory::BlockHeader>();
    header->num_bytes = num_bytes;
    ledger_.add(*header);
    const uint64_t number = header->sequence;
    blocks_.emplace(number, std::move(header));
    return number;
  }
  void remove(uint64_t number) {
    ledger_.remove(block(number));
    blocks_.erase(number);
  }
  void set_category(uint64_t number, const std::string& category) {
    ledger_.set_category(block(number), category_of(category));
  }
  memory::Ledger& ledger() { return ledger_; }

 private:
  memory::BlockHeader& block(uint64_t number) {
    const auto found = blocks_.find(number);
    if (found == blocks_.end()) {
      throw py::value_error("weft.memory: got the block " + std::to_string(number) +
                            ", which is not in the ledger; pass a number from add().");
    }
    return *found->second;
  }

  memory::Ledger ledger_;
  std::unordered_map<uint64_t, std::unique_ptr<memory::BlockHeader>> blocks_;
};

void bind_size_ledger(py::module_& m) {
  py::class_<SizeLedger>(m, "SizeLedger")
      .def(py::init<>())
      .def("add", &SizeLedger::add)
      .def("remove", &SizeLedger::remove)
      .def("set_category", &SizeLedger::set_category)
      .def("set_category_since",
           [](SizeLedger& self, uint64_t mark, const std::string& from, const std::string& to) {
             self.ledger().set_category_since(mark, category_of(from), category_of(to));
           })
      .def("mark", [](SizeLedger& self) { return self.ledger().mark(); })
      .def("set_shared_memory",
           [](SizeLedger& self, int64_t num_bytes) { self.ledger().set_shared_memory(num_bytes); })
      .def("begin_phase",
           [](SizeLedger& self, const std::string& name, const std::string& category) {
             self.ledger().begin_phase(name, category_of(category));
           })
      .def("current", [](SizeLedger& self) { return as_dict(self.ledger().totals().current); })
      .def("peak", [](SizeLedger& self) { return as_dict(self.ledger().totals().peak); })
      .def("phases", [](SizeLedger& self) { return as_list(self.ledger().phases()); })
      .def("reset_peak", [](SizeLedger& self) { self.ledger().reset_peak(); });
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
  m.def("phases", [] { return as_list(ops::memory_phases()); });
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
  m.def("set_dry_run", &ops::set_dry_run);
  bind_size_ledger(m);
}

}  // namespace
}  // namespace weft
