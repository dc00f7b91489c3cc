// Measured layer times in weft.strategy._plan; their documentation is in strategy/python/_plan.pyi.

#include "layer_times.h"

#include "memory_model.h"
#include "weft/strategy/tuning/layer_times.h"

#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace weft::strategy {

namespace {

// (part, tensor-parallel size, rows, tokens, forward, backward)
using SampleFields = std::tuple<std::string, int64_t, int64_t, int64_t, double, double>;

std::vector<LayerSample> samples_of(const std::vector<SampleFields>& fields) {
  std::vector<LayerSample> samples;
  samples.reserve(fields.size());
  for (const auto& [part, tensor_size, rows, tokens, forward, backward] : fields) {
    samples.push_back({.part = parse_layer_part(part),
                       .tensor_size = tensor_size,
                       .rows = rows,
                       .tokens = tokens,
                       .forward = forward,
                       .backward = backward});
  }
  return samples;
}

std::vector<SampleFields> fields_of(const std::vector<LayerSample>& samples) {
  std::vector<SampleFields> fields;
  fields.reserve(samples.size());
  for (const LayerSample& each : samples) {
    fields.emplace_back(std::string(to_string(each.part)),
                        each.tensor_size,
                        each.rows,
                        each.tokens,
                        each.forward,
                        each.backward);
  }
  return fields;
}

py::tuple state_of(const LayerTimes& times) {
  const DecoderModel& model = times.model;
  return py::make_tuple(std::tuple(model.dim,
                                   model.hidden_dim,
                                   model.num_layers,
                                   model.num_heads,
                                   model.num_kv_heads,
                                   model.head_dim,
                                   model.vocab_size,
                                   model.max_tokens),
                        std::pair(model.has_attention_bias, model.is_tied),
                        static_cast<int>(times.precision),
                        fields_of(times.samples));
}

LayerTimes times_of_state(const py::tuple& state) {
  const auto sizes = state[0].cast<std::vector<int64_t>>();
  const auto [has_attention_bias, is_tied] = state[1].cast<std::pair<bool, bool>>();
  return {.model = {.dim = sizes.at(0),
                    .hidden_dim = sizes.at(1),
                    .num_layers = sizes.at(2),
                    .num_heads = sizes.at(3),
                    .num_kv_heads = sizes.at(4),
                    .head_dim = sizes.at(5),
                    .vocab_size = sizes.at(6),
                    .max_tokens = sizes.at(7),
                    .has_attention_bias = has_attention_bias,
                    .is_tied = is_tied},
          .precision = static_cast<Precision>(state[2].cast<int>()),
          .samples = samples_of(state[3].cast<std::vector<SampleFields>>())};
}

}  // namespace

void bind_layer_times(py::module_& module) {
  py::class_<LayerTimes>(module, "LayerTimes", py::is_final())
      .def(py::init([](const DecoderModel& model,
                       const std::string& precision,
                       const std::vector<SampleFields>& samples) {
             return LayerTimes{.model = model,
                               .precision = precision_of(precision),
                               .samples = samples_of(samples)};
           }),
           py::arg("model"),
           py::kw_only(),
           py::arg("precision"),
           py::arg("samples"))
      .def_property_readonly("samples",
                             [](const LayerTimes& self) { return fields_of(self.samples); })
      .def(py::pickle(&state_of, &times_of_state));
}

}  // namespace weft::strategy
