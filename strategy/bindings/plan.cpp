// The Python module weft.strategy._plan; its documentation is in strategy/python/_plan.pyi.
// std::invalid_argument becomes ValueError.

#include "weft/strategy/plan.h"

#include "memory_model.h"
#include "mersenne_twister.h"
#include "pipeline.h"
#include "tuning.h"
#include "weft/strategy/mesh.h"
#include "weft/strategy/shard.h"

#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace py = pybind11;

namespace weft::strategy {

namespace {

using AxisPair = std::pair<std::string, int64_t>;
// (pattern, style, heads)
using RuleTriple = std::tuple<std::string, std::string, std::optional<std::string>>;
// The fields of a Rule, in the order of its Python constructor.
using RuleFields = std::tuple<std::string,
                              std::string,
                              std::optional<std::string>,
                              bool,
                              bool,
                              std::optional<std::string>>;

Rule make_rule(std::string pattern,
               const std::string& style,
               std::optional<std::string> heads,
               bool recompute,
               bool offload,
               const std::optional<std::string>& precision) {
  try {
    Rule rule;
    rule.style = parse_style(style);
    rule.recompute = recompute;
    rule.offload = offload;
    if (precision) {
      rule.precision = parse_compute_dtype(*precision);
    }
    rule.pattern = std::move(pattern);
    rule.heads = std::move(heads);
    return rule;
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument("plan: pattern '" + pattern + "': " + error.what());
  }
}

Mesh make_mesh(const std::vector<AxisPair>& pairs) {
  std::vector<Axis> axes;
  axes.reserve(pairs.size());
  for (const auto& [name, size] : pairs) {
    axes.push_back({.name = name, .size = size});
  }
  return Mesh(std::move(axes));
}

Rule rule_from_triple(const RuleTriple& triple) {
  const auto& [pattern, style, heads] = triple;
  return make_rule(pattern, style, heads, false, false, {});
}

Rule rule_from_fields(const RuleFields& fields) {
  const auto& [pattern, style, heads, recompute, offload, precision] = fields;
  return make_rule(pattern, style, heads, recompute, offload, precision);
}

Plan make_plan(const std::vector<std::variant<Rule, RuleTriple>>& items) {
  std::vector<Rule> rules;
  for (const auto& item : items) {
    const Rule* rule = std::get_if<Rule>(&item);
    rules.push_back(rule != nullptr ? *rule : rule_from_triple(std::get<RuleTriple>(item)));
  }
  return Plan(std::move(rules));
}

std::optional<std::string> precision_of(const Rule& rule) {
  return rule.precision ? std::optional(std::string(to_string(*rule.precision))) : std::nullopt;
}

RuleFields to_fields(const Rule& rule) {
  return {rule.pattern,
          std::string(to_string(rule.style)),
          rule.heads,
          rule.recompute,
          rule.offload,
          precision_of(rule)};
}

template <typename Names>
py::tuple to_tuple(const Names& names) {
  py::tuple result(names.size());
  for (size_t i = 0; i < names.size(); ++i) {
    result[i] = py::str(names[i].data(), names[i].size());
  }
  return result;
}

void bind_mesh(py::module_& module) {
  py::class_<Mesh>(module, "Mesh", py::is_final())
      .def(py::init(&make_mesh), py::arg("axes") = std::vector<AxisPair>{})
      .def_static("parse", &Mesh::parse, py::arg("text"))
      .def_property_readonly("axes",
                             [](const Mesh& mesh) {
                               std::vector<AxisPair> pairs;
                               for (const Axis& axis : mesh.axes()) {
                                 pairs.emplace_back(axis.name, axis.size);
                               }
                               return pairs;
                             })
      .def("has_axis", &Mesh::has_axis, py::arg("axis"))
      .def(
          "size",
          [](const Mesh& mesh, const std::optional<std::string>& axis) {
            return axis ? mesh.size(*axis) : mesh.size();
          },
          py::arg("axis") = py::none())
      .def("coordinates", &Mesh::coordinates, py::arg("global_rank"))
      .def(
          "rank",
          [](const Mesh& mesh, const std::vector<int64_t>& coordinates) {
            return mesh.rank(coordinates);
          },
          py::arg("coordinates"))
      .def("group", &Mesh::group, py::arg("axis"), py::arg("global_rank"))
      .def("groups", &Mesh::groups, py::arg("axis"))
      .def("check_world_size", &Mesh::check_world_size, py::arg("world_size"))
      .def(py::self == py::self)
      .def("__hash__", std::hash<Mesh>{})
      .def("__str__", &Mesh::to_string)
      .def("__repr__", [](const Mesh& mesh) { return "Mesh.parse('" + mesh.to_string() + "')"; })
      .def(py::pickle(
          [](const Mesh& mesh) { return py::make_tuple(mesh.to_string()); },
          [](const py::tuple& state) { return Mesh::parse(state[0].cast<std::string>()); }));
}

void bind_rule(py::module_& module) {
  py::class_<Rule>(module, "Rule", py::is_final())
      .def(py::init(&make_rule),
           py::arg("pattern"),
           py::arg("style"),
           py::arg("heads") = py::none(),
           py::arg("recompute") = false,
           py::arg("offload") = false,
           py::arg("precision") = py::none())
      .def_readonly("pattern", &Rule::pattern)
      .def_property_readonly("style", [](const Rule& rule) { return to_string(rule.style); })
      .def_readonly("heads", &Rule::heads)
      .def_readonly("recompute", &Rule::recompute)
      .def_readonly("offload", &Rule::offload)
      .def_property_readonly("precision", &precision_of)
      .def(py::self == py::self)
      .def("__hash__", std::hash<Rule>{})
      .def("__repr__",
           [](const Rule& rule) {
             return "Rule" + py::repr(py::cast(to_fields(rule))).cast<std::string>();
           })
      .def(py::pickle(&to_fields, &rule_from_fields));
}

void bind_plan(py::module_& module) {
  py::class_<Plan>(module, "Plan", py::is_final())
      .def(py::init(&make_plan), py::arg("rules") = std::vector<std::variant<Rule, RuleTriple>>{})
      .def_static("parse", &Plan::parse, py::arg("text"))
      .def_property_readonly("rules", &Plan::rules)
      .def(
          "resolve",
          [](const Plan& plan, const std::vector<std::string>& module_names) {
            std::vector<std::pair<std::string, Rule>> pairs;
            for (Assignment& assignment : plan.resolve(module_names)) {
              pairs.emplace_back(std::move(assignment.module), std::move(assignment.rule));
            }
            return pairs;
          },
          py::arg("module_names"))
      .def("to_json", &Plan::to_json)
      .def("__len__", [](const Plan& plan) { return plan.rules().size(); })
      .def(py::self == py::self)
      .def("__hash__", std::hash<Plan>{})
      .def("__str__", &Plan::to_string)
      .def("__repr__",
           [](const Plan& plan) {
             return "Plan(" + py::repr(py::cast(plan.rules())).cast<std::string>() + ")";
           })
      .def(py::pickle(
          [](const Plan& plan) { return py::make_tuple(plan.rules()); },
          [](const py::tuple& state) { return Plan(state[0].cast<std::vector<Rule>>()); }));
}

}  // namespace

PYBIND11_MODULE(_plan, module) {
  module.doc() =
      "C++ values, without torch: meshes, plans, shard ranges, memory predictions, pipeline "
      "schedules.";

  std::vector<std::string_view> styles;
  for (const Style style : all_styles()) {
    styles.push_back(to_string(style));
  }
  module.attr("AXIS_NAMES") = to_tuple(axis_names());
  module.attr("STYLES") = to_tuple(styles);

  bind_mesh(module);
  bind_rule(module);
  bind_plan(module);
  bind_memory_model(module);
  bind_tuning(module);
  bind_pipeline(module);
  bind_mersenne_twister(module);

  module.def("matches", &matches, py::arg("pattern"), py::arg("name"));
  module.def(
      "check_style", [](const std::string& style) { parse_style(style); }, py::arg("style"));
  module.def("check_heads",
             &check_heads,
             py::arg("module"),
             py::arg("attribute"),
             py::arg("num_heads"),
             py::arg("tp_size"));
  module.def(
      "shard_range",
      [](int64_t dim_size, int64_t num_ranks, int64_t rank) {
        const auto [start, length] = shard_range(dim_size, num_ranks, rank);
        return std::pair(start, length);
      },
      py::arg("dim_size"),
      py::arg("num_ranks"),
      py::arg("rank"));
}

}  // namespace weft::strategy
