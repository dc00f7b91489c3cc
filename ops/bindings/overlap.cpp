// The Python module weft._overlap: <weft/ops/overlap.h>, with dicts for the entries of the table.
#include <weft/ops/overlap.h>

#include <torch/csrc/utils/pybind.h>

namespace weft {
namespace {

using ops::OverlapEntry;

py::list table() {
  py::list list;
  for (const OverlapEntry& entry : ops::overlap_table()) {
    py::dict dict;
    dict["op"] = entry.op;
    dict["dtype"] = entry.dtype;
    dict["device"] = entry.device;
    dict["num_ranks"] = entry.num_ranks;
    dict["num_rows"] = entry.num_rows;
    dict["row_bytes"] = entry.row_bytes;
    dict["in_pieces"] = entry.in_pieces;
    dict["ratio"] = entry.ratio;
    list.append(std::move(dict));
  }
  return list;
}

void set_table(const std::vector<py::dict>& dicts) {
  std::vector<OverlapEntry> entries;
  for (const py::dict& dict : dicts) {
    entries.push_back({dict["op"].cast<std::string>(),
                       dict["dtype"].cast<std::string>(),
                       dict["device"].cast<std::string>(),
                       dict["num_ranks"].cast<std::int64_t>(),
                       dict["num_rows"].cast<std::int64_t>(),
                       dict["row_bytes"].cast<std::int64_t>(),
                       dict["in_pieces"].cast<bool>(),
                       dict["ratio"].cast<double>()});
  }
  ops::set_overlap_table(std::move(entries));
}

PYBIND11_MODULE(_overlap, m) {
  m.def("mode", &ops::overlap);
  m.def("set_mode", &ops::set_overlap);
  m.def("table", &table);
  m.def("set_table", &set_table);
}

}  // namespace
}  // namespace weft
