// The memory model in weft.strategy._plan; its documentation is in strategy/python/_plan.pyi.

#include "memory_model.h"

#include "weft/strategy/memory_model.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace py = pybind11;

namespace weft::strategy {

namespace {

template <typename Value, std::size_t kSize>
using Names = std::array<std::pair<std::string_view, Value>, kSize>;

constexpr Names<Precision, 5> kPrecisions = {{{"32-true", Precision::k32True},
                                              {"bf16-true", Precision::kHalfTrue},
                                              {"16-true", Precision::kHalfTrue},
                                              {"bf16-mixed", Precision::kHalfMixed},
                                              {"16-mixed", Precision::kAutocast}}};
constexpr Names<OptimizerKind, 5> kOptimizers = {
    {{"SGD", OptimizerKind::kSgd},
     {"SGD with momentum", OptimizerKind::kSgdMomentum},
     {"Adam", OptimizerKind::kAdam},
     {"AdamW", OptimizerKind::kAdamW},
     {"Adagrad", OptimizerKind::kAdagrad}}};
// The names of the strategies' options. States that are float32 by default have the parameters'
// dtype, as torch's optimizers make them.
constexpr Names<StateFormat, 3> kStates = {{{"float32", StateFormat::kLikeParameters},
                                            {"bfloat16", StateFormat::kBFloat16},
                                            {"int8", StateFormat::kInt8}}};
constexpr Names<WeightFormat, 3> kWeights = {{{"float32", WeightFormat::kLikePrecision},
                                              {"split", WeightFormat::kSplit},
                                              {"split8", WeightFormat::kSplit8}}};
constexpr Names<Checkpointing, 3> kCheckpointing = {{{"none", Checkpointing::kNone},
                                                     {"selective", Checkpointing::kSelective},
                                                     {"full", Checkpointing::kFull}}};

constexpr Names<DeviceKind, 2> kDevices = {
    {{"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}}};
constexpr Names<bool, 2> kOffload = {{{"none", false}, {"cpu", true}}};

template <typename Value, std::size_t kSize>
Value value_of(std::string_view what, const std::string& name, const Names<Value, kSize>& names) {
  std::string valid;
  for (const auto& [text, value] : names) {
    if (text == name) {
      return value;
    }
    valid += (valid.empty() ? "" : ", ") + ("'" + std::string(text) + "'");
  }
  throw std::invalid_argument("memory: got " + std::string(what) + " '" + name + "'; use one of " +
                              valid);
}

struct BackwardSteps {
  bool any = false;
  bool by_rows = false;
};

BackwardSteps backward_steps(const std::variant<bool, std::string>& option) {
  if (const auto* enabled = std::get_if<bool>(&option)) {
    return {.any = *enabled};
  }
  const auto& name = std::get<std::string>(option);
  if (name != "rows") {
    throw std::invalid_argument("memory: got optimizer_in_backward '" + name +
                                "'; use true, false or 'rows'");
  }
  return {.any = true, .by_rows = true};
}

TrainingSpec make_spec(const ModelSpec& model,
                       Mesh mesh,
                       std::optional<Plan> plan,
                       int64_t sequences,
                       int64_t tokens,
                       const std::string& precision,
                       const std::string& optimizer,
                       const std::string& optimizer_state,
                       const std::string& master_weights,
                       bool fused_optimizers,
                       const std::variant<bool, std::string>& optimizer_in_backward,
                       bool empty_init,
                       const std::string& activation_checkpointing,
                       int64_t accumulate_grad_batches,
                       const std::string& device,
                       int64_t zero_stage,
                       std::optional<std::vector<int64_t>> first_blocks,
                       const std::string& pipeline_schedule,
                       int64_t num_micro_batches,
                       bool sequence_parallel,
                       const std::string& offload) {
  const auto steps = backward_steps(optimizer_in_backward);
  const auto weights = value_of("master_weights", master_weights, kWeights);
  auto states = value_of("optimizer_state", optimizer_state, kStates);
  if (states == StateFormat::kLikeParameters && weights != WeightFormat::kLikePrecision) {
    states = StateFormat::kFloat32;  // weft's optimizers, not torch's
  }
  std::optional<PipelineSpec> pipeline;
  if (first_blocks) {
    pipeline = PipelineSpec{.first_blocks = std::move(*first_blocks),
                            .schedule = parse_schedule_kind(pipeline_schedule),
                            .micro_batches = num_micro_batches};
  }
  const auto [checkpointing, checkpointed_blocks] = checkpointing_of(activation_checkpointing);
  return {.model = model,
          .mesh = std::move(mesh),
          .plan = std::move(plan),
          .sequences = sequences,
          .tokens = tokens,
          .micro_batches = accumulate_grad_batches,
          .zero_stage = zero_stage,
          .pipeline = std::move(pipeline),
          .sequence_parallel = sequence_parallel,
          .precision = precision_of(precision),
          .optimizer = value_of("optimizer", optimizer, kOptimizers),
          .states = states,
          .weights = weights,
          .has_fused_optimizer = fused_optimizers,
          .steps_in_backward = steps.any,
          .steps_by_rows = steps.by_rows,
          .has_deferred_init = empty_init,
          .offloads_states = offloads_of(offload),
          .checkpointing = checkpointing,
          .checkpointed_blocks = checkpointed_blocks,
          .device = value_of("device", device, kDevices)};
}

}  // namespace

py::dict usage_to_dict(const MemoryUsage& usage) {
  py::dict result;
  const auto names = memory_category_names();
  for (std::size_t i = 0; i < names.size(); ++i) {
    result[py::str(names[i].data(), names[i].size())] = usage.by_category.at(i);
  }
  return result;
}

std::string checkpointing_name(const TrainingSpec& spec) {
  for (const auto& [name, value] : kCheckpointing) {
    if (value == spec.checkpointing) {
      return std::string(name) +
             (spec.checkpointed_blocks ? ":" + std::to_string(*spec.checkpointed_blocks) : "");
    }
  }
  return "";
}

std::pair<Checkpointing, std::optional<int64_t>> checkpointing_of(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string number = colon == std::string::npos ? "" : text.substr(colon + 1);
  const bool is_number =
      !number.empty() && number.size() < 10 &&
      std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
  const std::string kind = is_number ? text.substr(0, colon) : text;
  return {value_of("activation_checkpointing", kind, kCheckpointing),
          is_number ? std::optional<int64_t>(std::stoll(number)) : std::nullopt};
}

std::string_view offload_name(const TrainingSpec& spec) {
  return spec.offloads_states ? "cpu" : "none";
}

bool offloads_of(const std::string& name) { return value_of("offload", name, kOffload); }

Precision precision_of(const std::string& name) { return value_of("precision", name, kPrecisions); }

void bind_memory_model(py::module_& module) {
  module.def(
      "rows_per_block",
      [](const std::string& device, int64_t num_rows, int64_t row_bytes) {
        return rows_per_block(value_of("device", device, kDevices), num_rows, row_bytes);
      },
      py::arg("device"),
      py::arg("num_rows"),
      py::arg("row_bytes"));

  py::class_<FeedForwardModel>(module, "FeedForwardModel", py::is_final())
      .def(py::init([](int64_t dim, int64_t hidden_dim, bool gated, bool bias) {
             return FeedForwardModel{
                 .dim = dim, .hidden_dim = hidden_dim, .is_gated = gated, .has_bias = bias};
           }),
           py::kw_only(),
           py::arg("dim"),
           py::arg("hidden_dim"),
           py::arg("gated") = true,
           py::arg("bias") = false);

  py::class_<DecoderModel>(module, "DecoderModel", py::is_final())
      .def(py::init([](int64_t dim,
                       int64_t hidden_dim,
                       int64_t num_layers,
                       int64_t num_heads,
                       int64_t num_kv_heads,
                       int64_t head_dim,
                       int64_t vocab_size,
                       int64_t max_tokens,
                       bool attention_bias,
                       bool tied) {
             return DecoderModel{.dim = dim,
                                 .hidden_dim = hidden_dim,
                                 .num_layers = num_layers,
                                 .num_heads = num_heads,
                                 .num_kv_heads = num_kv_heads,
                                 .head_dim = head_dim,
                                 .vocab_size = vocab_size,
                                 .max_tokens = max_tokens,
                                 .has_attention_bias = attention_bias,
                                 .is_tied = tied};
           }),
           py::kw_only(),
           py::arg("dim"),
           py::arg("hidden_dim"),
           py::arg("num_layers"),
           py::arg("num_heads"),
           py::arg("num_kv_heads"),
           py::arg("head_dim"),
           py::arg("vocab_size"),
           py::arg("max_tokens") = 0,
           py::arg("attention_bias") = false,
           py::arg("tied") = false)
      .def_readonly("dim", &DecoderModel::dim)
      .def_readonly("hidden_dim", &DecoderModel::hidden_dim)
      .def_readonly("num_heads", &DecoderModel::num_heads)
      .def_readonly("num_kv_heads", &DecoderModel::num_kv_heads)
      .def_readonly("head_dim", &DecoderModel::head_dim)
      .def_readonly("vocab_size", &DecoderModel::vocab_size)
      .def_readonly("attention_bias", &DecoderModel::has_attention_bias)
      .def_readonly("tied", &DecoderModel::is_tied);

  py::class_<TrainingSpec>(module, "TrainingSpec", py::is_final())
      .def(py::init(&make_spec),
           py::arg("model"),
           py::arg("mesh"),
           py::kw_only(),
           py::arg("plan") = py::none(),
           py::arg("sequences") = 1,
           py::arg("tokens") = 1,
           py::arg("precision") = "32-true",
           py::arg("optimizer") = "AdamW",
           py::arg("optimizer_state") = "float32",
           py::arg("master_weights") = "float32",
           py::arg("fused_optimizers") = true,
           py::arg("optimizer_in_backward") = false,
           py::arg("empty_init") = true,
           py::arg("activation_checkpointing") = "none",
           py::arg("accumulate_grad_batches") = 1,
           py::arg("device") = "cpu",
           py::arg("zero_stage") = 3,
           py::arg("first_blocks") = py::none(),
           py::arg("pipeline_schedule") = "1f1b",
           py::arg("num_micro_batches") = 1,
           py::arg("sequence_parallel") = false,
           py::arg("offload") = "none")
      .def("module_names", [](const TrainingSpec& spec) { return module_names(spec.model); })
      .def(
          "predict",
          [](const TrainingSpec& spec, int64_t global_rank) {
            py::dict phases;
            for (const PhaseMemory& phase : predict_memory(spec, global_rank)) {
              phases[py::str(phase.phase)] = usage_to_dict(phase.at_peak);
            }
            return phases;
          },
          py::arg("global_rank"))
      .def("offloaded_bytes", &offloaded_bytes, py::arg("global_rank"))
      .def("distinct_ranks",
           [](const TrainingSpec& spec) {
             std::vector<std::pair<int64_t, int64_t>> result;
             for (const RankClass& each : distinct_ranks(spec)) {
               result.emplace_back(each.global_rank, each.num_ranks);
             }
             return result;
           })
      .def("parameter_cost", [](const TrainingSpec& spec) {
        const ParameterCost cost = parameter_cost(spec);
        return std::pair(cost.num_elements, cost.bytes_per_element);
      });
}

}  // namespace weft::strategy
