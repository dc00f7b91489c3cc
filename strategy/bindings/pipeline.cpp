// The pipeline schedules in weft.strategy._plan; their documentation is in
// strategy/python/_plan.pyi.

#include "pipeline.h"

#include "weft/strategy/pipeline/check.h"
#include "weft/strategy/pipeline/micro_batches.h"
#include "weft/strategy/pipeline/partition.h"
#include "weft/strategy/pipeline/passes.h"
#include "weft/strategy/pipeline/tune.h"

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace py = pybind11;

namespace weft::strategy {

namespace {

constexpr int64_t kMaxNumber = std::numeric_limits<int32_t>::max();

// Returns an action's kind from its text: "F", "SEND_F", "UNSHARD", ...
ActionKind parse_kind(const std::string& kind) {
  const bool is_sharding = kind == "UNSHARD" || kind == "RESHARD";
  return parse_action("0" + kind + (is_sharding ? "" : "0")).kind;
}

Action make_action(int64_t stage, const std::string& kind, std::optional<int64_t> micro_batch) {
  const int64_t number = micro_batch.value_or(Action::kNoMicroBatch);
  const ActionKind parsed = parse_kind(kind);
  const bool is_sharding = parsed == ActionKind::kUnshard || parsed == ActionKind::kReshard;
  if (is_sharding == micro_batch.has_value()) {
    throw std::invalid_argument("action " + kind +
                                (is_sharding ? " takes no micro-batch; leave it out"
                                             : " needs a micro-batch; pass its number"));
  }
  for (const int64_t value : {stage, micro_batch.value_or(0)}) {
    if (value < 0 || value > kMaxNumber) {
      throw std::invalid_argument("action " + kind + ": " + std::to_string(value) +
                                  " is no stage or micro-batch; pass 0 to " +
                                  std::to_string(kMaxNumber));
    }
  }
  return {static_cast<int32_t>(stage), static_cast<int32_t>(number), parsed};
}

std::optional<int32_t> micro_batch_of(const Action& action) {
  return action.micro_batch == Action::kNoMicroBatch ? std::nullopt
                                                     : std::optional(action.micro_batch);
}

void bind_action(py::module_& module) {
  py::class_<Action>(module, "Action", py::is_final())
      .def(py::init(&make_action),
           py::arg("stage"),
           py::arg("kind"),
           py::arg("micro_batch") = py::none())
      .def_static("parse", &parse_action, py::arg("text"))
      .def_readonly("stage", &Action::stage)
      .def_property_readonly("kind", [](const Action& action) { return to_string(action.kind); })
      .def_property_readonly("micro_batch", &micro_batch_of)
      .def_property_readonly("computes",
                             [](const Action& action) { return is_compute(action.kind); })
      .def(py::self == py::self)
      .def("__hash__",
           [](const Action& action) { return std::hash<std::string>{}(to_string(action)); })
      .def("__str__", [](const Action& action) { return to_string(action); })
      .def("__repr__",
           [](const Action& action) { return "Action.parse('" + to_string(action) + "')"; })
      .def(py::pickle(
          [](const Action& action) { return py::make_tuple(to_string(action)); },
          [](const py::tuple& state) { return parse_action(state[0].cast<std::string>()); }));
}

void bind_schedule(py::module_& module) {
  py::class_<Schedule>(module, "Schedule", py::is_final())
      .def(py::init<std::vector<std::vector<Action>>>(), py::arg("ranks"))
      .def_static("parse", &Schedule::parse, py::arg("csv"))
      .def_static(
          "generate",
          [](const std::string& kind,
             int64_t num_ranks,
             int64_t num_micro_batches,
             int64_t stages_per_rank) {
            return generate(parse_schedule_kind(kind),
                            {.num_ranks = num_ranks,
                             .num_micro_batches = num_micro_batches,
                             .stages_per_rank = stages_per_rank});
          },
          py::arg("kind"),
          py::arg("num_ranks"),
          py::arg("num_micro_batches"),
          py::arg("stages_per_rank") = 1)
      .def_property_readonly("ranks", &Schedule::ranks)
      .def_property_readonly("num_ranks", &Schedule::num_ranks)
      .def_property_readonly("num_stages", &Schedule::num_stages)
      .def_property_readonly("num_micro_batches", &Schedule::num_micro_batches)
      .def_property_readonly("rank_of",
                             [](const Schedule& schedule) {
                               const auto ranks = schedule.rank_of();
                               return std::vector<int32_t>(ranks.begin(), ranks.end());
                             })
      .def_property_readonly("has_communication", &Schedule::has_communication)
      .def_property_readonly("has_backward", &Schedule::has_backward)
      .def("check", &check, py::arg("channel_capacity") = 0)
      .def(
          "add_communication",
          [](const Schedule& schedule, int64_t channel_capacity, int64_t prefetch) {
            return add_communication(schedule,
                                     {.channel_capacity = channel_capacity, .prefetch = prefetch});
          },
          py::arg("channel_capacity") = 0,
          py::arg("prefetch") = 1)
      .def("add_unshards", &add_unshards, py::arg("max_unsharded") = 2)
      .def("merge_backwards", &merge_backwards)
      .def("forward_only", &forward_only)
      .def("first_micro_batches", &first_micro_batches, py::arg("num_micro_batches"))
      .def(
          "simulate",
          [](const Schedule& schedule, const std::vector<StageCost>& costs) {
            const py::gil_scoped_release unlocked;
            return simulate(schedule, costs);
          },
          py::arg_v("costs", std::vector<StageCost>{{}}, "[StageCost()]"))
      .def(py::self == py::self)
      .def("__hash__",
           [](const Schedule& schedule) { return std::hash<std::string>{}(schedule.to_string()); })
      .def("__str__", &Schedule::to_string)
      .def("__repr__",
           [](const Schedule& schedule) {
             return "Schedule.parse(" +
                    py::repr(py::str(schedule.to_string())).cast<std::string>() + ")";
           })
      .def(py::pickle(
          [](const Schedule& schedule) { return py::make_tuple(schedule.to_string()); },
          [](const py::tuple& state) { return Schedule::parse(state[0].cast<std::string>()); }));
}

StageCost make_cost(double forward,
                    double backward_input,
                    double backward_weight,
                    double transfer,
                    int64_t activation_bytes,
                    int64_t parameter_bytes) {
  return {.forward = forward,
          .backward_input = backward_input,
          .backward_weight = backward_weight,
          .transfer = transfer,
          .activation_bytes = activation_bytes,
          .parameter_bytes = parameter_bytes};
}

void bind_simulation(py::module_& module) {
  py::class_<StageCost>(module, "StageCost", py::is_final())
      .def(py::init(&make_cost),
           py::kw_only(),
           py::arg("forward") = 1.0,
           py::arg("backward_input") = 1.0,
           py::arg("backward_weight") = 1.0,
           py::arg("transfer") = 0.0,
           py::arg("activation_bytes") = 0,
           py::arg("parameter_bytes") = 0)
      .def_readonly("forward", &StageCost::forward)
      .def_readonly("backward_input", &StageCost::backward_input)
      .def_readonly("backward_weight", &StageCost::backward_weight)
      .def_readonly("transfer", &StageCost::transfer)
      .def_readonly("activation_bytes", &StageCost::activation_bytes)
      .def_readonly("parameter_bytes", &StageCost::parameter_bytes);

  py::class_<Span>(module, "Span", py::is_final())
      .def(py::init<Action, double, double>(), py::arg("action"), py::arg("start"), py::arg("end"))
      .def_readonly("action", &Span::action)
      .def_readonly("start", &Span::start)
      .def_readonly("end", &Span::end)
      .def(py::self == py::self)
      .def("__repr__", [](const Span& span) {
        return "Span(" + to_string(span.action) + ", " + std::to_string(span.start) + " to " +
               std::to_string(span.end) + ")";
      });

  py::class_<Simulation>(module, "Simulation", py::is_final())
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("bubble_fraction", &Simulation::bubble_fraction)
      .def_readonly("ranks", &Simulation::ranks)
      .def_readonly("in_flight", &Simulation::in_flight)
      .def_readonly("peak_bytes", &Simulation::peak_bytes);
}

template <typename Value>
Value at_or_zero(const std::vector<Value>& values, size_t i, const char* name, size_t num_layers) {
  if (!values.empty() && values.size() != num_layers) {
    throw std::invalid_argument("partition: " + std::to_string(values.size()) + " " + name +
                                " for " + std::to_string(num_layers) +
                                " layers; pass one for each, or none");
  }
  return values.empty() ? Value{} : values[i];
}

Partition make_partition(const std::vector<double>& times,
                         int64_t num_stages,
                         const std::vector<int64_t>& activation_bytes,
                         const std::vector<int64_t>& parameter_bytes,
                         std::vector<int64_t> in_flight,
                         std::optional<int64_t> memory_limit,
                         double memory_weight) {
  std::vector<LayerCost> layers;
  const size_t count = times.size();
  layers.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    layers.push_back(
        {.time = times[i],
         .activation_bytes = at_or_zero(activation_bytes, i, "activation_bytes", count),
         .parameter_bytes = at_or_zero(parameter_bytes, i, "parameter_bytes", count)});
  }
  return partition(layers,
                   {.num_stages = num_stages,
                    .in_flight = std::move(in_flight),
                    .memory_limit = memory_limit,
                    .memory_weight = memory_weight});
}

void bind_partition(py::module_& module) {
  py::class_<Partition>(module, "Partition", py::is_final())
      .def_readonly("begins", &Partition::begins)
      .def_readonly("times", &Partition::times)
      .def_readonly("bytes", &Partition::bytes);
  module.def("partition",
             &make_partition,
             py::arg("times"),
             py::arg("num_stages"),
             py::kw_only(),
             py::arg("activation_bytes") = std::vector<int64_t>{},
             py::arg("parameter_bytes") = std::vector<int64_t>{},
             py::arg("in_flight") = std::vector<int64_t>{},
             py::arg("memory_limit") = py::none(),
             py::arg("memory_weight") = 0.0);
}

void bind_tune(py::module_& module) {
  py::class_<LinearTime>(module, "LinearTime", py::is_final())
      .def(py::init([](double fixed, double per_sample) {
             return LinearTime{.fixed = fixed, .per_sample = per_sample};
           }),
           py::arg("fixed") = 0.0,
           py::arg("per_sample") = 0.0)
      .def_static(
          "fit",
          [](const std::vector<int64_t>& num_samples, const std::vector<double>& times) {
            return fit_time(num_samples, times);
          },
          py::arg("num_samples"),
          py::arg("times"))
      .def_readonly("fixed", &LinearTime::fixed)
      .def_readonly("per_sample", &LinearTime::per_sample)
      .def("at", &LinearTime::at, py::arg("num_samples"));

  py::class_<MeasuredTime>(module, "MeasuredTime", py::is_final())
      .def(py::init([](const std::vector<int64_t>& num_samples, const std::vector<double>& times) {
             return MeasuredTime(num_samples, times);
           }),
           py::arg("num_samples"),
           py::arg("times"))
      .def("at", &MeasuredTime::at, py::arg("num_samples"));

  py::class_<StageProfile>(module, "StageProfile", py::is_final())
      .def(py::init([](SampleTime forward,
                       SampleTime backward_input,
                       SampleTime backward_weight,
                       SampleTime transfer,
                       int64_t activation_bytes_per_sample,
                       int64_t parameter_bytes) {
             return StageProfile{.forward = std::move(forward),
                                 .backward_input = std::move(backward_input),
                                 .backward_weight = std::move(backward_weight),
                                 .transfer = std::move(transfer),
                                 .activation_bytes_per_sample = activation_bytes_per_sample,
                                 .parameter_bytes = parameter_bytes};
           }),
           py::kw_only(),
           py::arg("forward"),
           py::arg("backward_input"),
           py::arg("backward_weight"),
           py::arg_v("transfer", SampleTime{}, "LinearTime()"),
           py::arg("activation_bytes_per_sample") = 0,
           py::arg("parameter_bytes") = 0)
      .def_readonly("forward", &StageProfile::forward)
      .def_readonly("backward_input", &StageProfile::backward_input)
      .def_readonly("backward_weight", &StageProfile::backward_weight)
      .def_readonly("transfer", &StageProfile::transfer)
      .def_readonly("activation_bytes_per_sample", &StageProfile::activation_bytes_per_sample)
      .def_readonly("parameter_bytes", &StageProfile::parameter_bytes);

  py::class_<TunePoint>(module, "TunePoint", py::is_final())
      .def_property_readonly("kind", [](const TunePoint& point) { return to_string(point.kind); })
      .def_property_readonly("num_micro_batches",
                             [](const TunePoint& point) { return point.micro_batch_sizes.size(); })
      .def_readonly("micro_batch_sizes", &TunePoint::micro_batch_sizes)
      .def_readonly("makespan", &TunePoint::makespan)
      .def_readonly("bubble_fraction", &TunePoint::bubble_fraction)
      .def_readonly("peak_bytes", &TunePoint::peak_bytes)
      .def_readonly("fits", &TunePoint::fits)
      .def("__repr__", [](const py::object& point) {
        return py::str(
                   "TunePoint(kind={!r}, micro_batch_sizes={}, makespan={:.4g}, "
                   "bubble_fraction={:.3g}, "
                   "peak_bytes={}, fits={})")
            .format(point.attr("kind"),
                    point.attr("micro_batch_sizes"),
                    point.attr("makespan"),
                    point.attr("bubble_fraction"),
                    point.attr("peak_bytes"),
                    point.attr("fits"));
      });

  module.def(
      "tune",
      [](const std::vector<StageProfile>& stages,
         int64_t batch_size,
         int64_t num_ranks,
         const std::vector<std::string>& kinds,
         std::vector<int64_t> micro_batch_counts,
         std::optional<int64_t> memory_limit,
         bool tapers) {
        std::vector<ScheduleKind> parsed;
        parsed.reserve(kinds.size());
        for (const std::string& kind : kinds) {
          parsed.push_back(parse_schedule_kind(kind));
        }
        return tune(stages,
                    {.batch_size = batch_size,
                     .num_ranks = num_ranks,
                     .kinds = std::move(parsed),
                     .micro_batch_counts = std::move(micro_batch_counts),
                     .memory_limit = memory_limit,
                     .tapers = tapers});
      },
      py::arg("stages"),
      py::kw_only(),
      py::arg("batch_size"),
      py::arg("num_ranks"),
      py::arg("kinds") = std::vector<std::string>{},
      py::arg("micro_batch_counts") = std::vector<int64_t>{},
      py::arg("memory_limit") = py::none(),
      py::arg("tapers") = true);

  module.def(
      "deal_samples",
      [](int64_t batch_size, const std::vector<double>& shares) {
        return deal_samples(batch_size, shares);
      },
      py::arg("batch_size"),
      py::arg("shares"));
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::tuple kinds(all_schedule_kinds().size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    kinds[i] = py::str(std::string(to_string(all_schedule_kinds()[i])));
  }
  module.attr("SCHEDULES") = kinds;
  module.def(
      "default_stages_per_rank",
      [](const std::string& kind) { return default_stages_per_rank(parse_schedule_kind(kind)); },
      py::arg("kind"));
  module.def(
      "splits_backwards",
      [](const std::string& kind) { return splits_backwards(parse_schedule_kind(kind)); },
      py::arg("kind"));
  bind_action(module);
  bind_simulation(module);
  bind_schedule(module);
  bind_partition(module);
  bind_tune(module);
}

}  // namespace weft::strategy
