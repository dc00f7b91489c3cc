#include "overlap.h"

#include "overlap_tuner.h"
#include "per_group.h"
#include "shard_shape.h"

#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace weft::ops {

namespace {

// A chunk has kChunkBytes over all ranks, to fit into the caches, but at least kMinTokens tokens
// per rank, for matrix products at full speed. Measured (docs/benchmarks/overlap.md).
constexpr std::int64_t kChunkBytes = 2 << 20;
constexpr std::int64_t kMinTokens = 64;
// The maximum number of chunks on devices other than the CPU, where calls take longer and chunks
// need not fit into caches. Not measured.
constexpr std::int64_t kMaxDeviceChunks = 4;

// Largest ratio of chunked to unchunked time that counts as a gain; the margin excludes noise.
constexpr double kMaxGainRatio = 0.95;

enum class Mode { kAuto, kAlways, kNever };

std::optional<Mode> mode_named(std::string_view name) {
  if (name == "auto") return Mode::kAuto;
  if (name == "always") return Mode::kAlways;
  if (name == "never") return Mode::kNever;
  return std::nullopt;
}

std::string name_of(Mode mode) {
  return mode == Mode::kAuto ? "auto" : mode == Mode::kAlways ? "always" : "never";
}

Mode mode_of_environment() {
  const char* value = std::getenv("WEFT_OVERLAP");
  if (value == nullptr || *value == '\0') return Mode::kAuto;
  const auto mode = mode_named(value);
  TORCH_CHECK_VALUE(
      mode.has_value(), "weft: got WEFT_OVERLAP=", value, "; set it to auto, always or never.");
  return *mode;
}

std::atomic<Mode>& current_mode() {
  static std::atomic<Mode> mode{mode_of_environment()};
  return mode;
}

// The key of a choice, which must be equal on all ranks of the group. num_rows and row_bytes are
// rounded up to powers of two.
struct Kind {
  std::string op;
  std::string dtype;
  std::string device;
  std::int64_t num_ranks;
  std::int64_t num_rows;
  std::int64_t row_bytes;

  auto operator<=>(const Kind&) const = default;
};

std::int64_t round_up(std::int64_t value) {
  return static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(value)));
}

struct Measurement {
  OverlapTuner tuner;
  std::optional<double> ratio;  // set when the ranks have agreed on it
};

bool gains(double ratio) { return ratio <= kMaxGainRatio; }

class Table {
 public:
  static Table& instance() { return process_wide<Table>(); }

  // Returns whether the table of set_overlap_table() chooses chunks; nullopt without an entry.
  std::optional<bool> preset(const Kind& kind) const {
    const std::lock_guard lock(mutex_);
    const auto found = presets_.find(kind);
    return found == presets_.end() ? std::nullopt : std::optional(found->second.in_pieces);
  }

  // Measurements are per group: only the ranks of one group agree with each other. The caller
  // shares ownership, since replace() may drop the entry.
  std::shared_ptr<Measurement> measurement(const Kind& kind, const ProcessGroupPtr& group) {
    std::vector<Measurements> gone;
    const std::lock_guard lock(mutex_);
    // Measurements of destroyed groups stay in entries() until another group is measured.
    auto* const found = groups_.find(group);
    auto& result = (found != nullptr ? *found : groups_.find_or_make(group, gone))[kind];
    if (!result) result = std::make_shared<Measurement>();
    return result;
  }

  void add_timed(const std::shared_ptr<Measurement>& measurement, OverlapTuner::TimedCall timed) {
    const std::lock_guard lock(mutex_);
    measurement->tuner.add(std::move(timed));
  }

  std::mutex& mutex() const { return mutex_; }

  std::vector<OverlapEntry> entries() const {
    const std::lock_guard lock(mutex_);
    auto all = presets_;
    groups_.for_each([&](const Measurements& measurements) {
      for (const auto& [kind, measurement] : measurements) {
        if (!measurement->ratio.has_value() || presets_.contains(kind)) continue;
        const auto ratio = *measurement->ratio;
        const auto [found, is_new] = all.try_emplace(kind, entry(kind, ratio));
        // If two groups disagree, report the larger ratio; replace an entry without a measurement
        // (0).
        if (!is_new && (found->second.ratio == 0 || !(ratio <= found->second.ratio))) {
          found->second = entry(kind, std::max(ratio, found->second.ratio));
        }
      }
    });
    std::vector<OverlapEntry> result;
    for (auto& [kind, each] : all) result.push_back(std::move(each));
    return result;
  }

  void replace(std::vector<OverlapEntry> entries) {
    const std::lock_guard lock(mutex_);
    groups_.clear();
    presets_.clear();
    for (auto& each : entries) {
      const Kind kind{
          each.op, each.dtype, each.device, each.num_ranks, each.num_rows, each.row_bytes};
      presets_.insert_or_assign(kind, std::move(each));
    }
  }

 private:
  using Measurements = std::map<Kind, std::shared_ptr<Measurement>>;

  static OverlapEntry entry(const Kind& kind, double ratio) {
    return {kind.op,
            kind.dtype,
            kind.device,
            kind.num_ranks,
            kind.num_rows,
            kind.row_bytes,
            gains(ratio),
            std::isfinite(ratio) ? ratio : 0};
  }

  mutable std::mutex mutex_;
  std::map<Kind, OverlapEntry> presets_;
  PerGroup<Measurements> groups_;
};

struct Votes {
  double worst_ratio;
  bool any_rank_lacks_samples;
};

// Returns the maximum of the ranks' votes. Groups without a CPU backend reduce them on `device`.
Votes exchange_votes(std::string_view op,
                     const Votes& own,
                     const ProcessGroupPtr& group,
                     const c10::Device& device) {
  const auto on_host = at::empty({2}, at::kDouble);
  on_host.mutable_data_ptr<double>()[0] = own.worst_ratio;
  on_host.mutable_data_ptr<double>()[1] = own.any_rank_lacks_samples ? 1 : 0;
  const auto tensor = has_cpu_backend(group) ? on_host : on_host.to(device);
  PendingCollective(op,
                    "all-reduce of times for WEFT_OVERLAP=auto",
                    group,
                    {tensor},
                    false,
                    [&](bool async_op) {
                      std::vector<at::Tensor> tensors{tensor};
                      c10d::AllreduceOptions opts;
                      opts.reduceOp = c10d::ReduceOp::MAX;
                      opts.asyncOp = async_op;
                      return group->allreduce(tensors, opts);
                    })
      .wait();
  const auto votes = tensor.cpu();
  const auto* values = votes.const_data_ptr<double>();
  return {values[0], values[1] != 0};
}

// Exchanges votes with the other ranks and sets the ratio, unless more calls must be timed.
// Releases `lock`, which holds the table's mutex, while it waits for the device or the ranks: other
// threads may have to make progress first.
void agree(Measurement& measurement,
           std::unique_lock<std::mutex>& lock,
           std::string_view op,
           const ProcessGroupPtr& group,
           const c10::Device& device) {
  const auto timed = measurement.tuner.take_timed();
  lock.unlock();
  std::vector<double> seconds_per_row;
  for (const auto& each : timed) {
    seconds_per_row.push_back(each.watch->seconds() / static_cast<double>(each.num_rows));
  }
  lock.lock();
  for (std::size_t i = 0; i < timed.size(); ++i) {
    measurement.tuner.record(timed[i].own_features, timed[i].is_chunked, seconds_per_row[i]);
  }
  const Votes own{measurement.tuner.worst_ratio(), measurement.tuner.lacks_samples()};
  lock.unlock();
  const auto votes = exchange_votes(op, own, group, device);
  lock.lock();
  if (!measurement.tuner.extend_timing(votes.any_rank_lacks_samples)) {
    measurement.ratio = votes.worst_ratio;
  }
}

// Returns the rows of each rank's shard per chunk; 0 if there would be only one chunk.
std::int64_t chunk_rows(const Communication& communication,
                        int num_ranks,
                        Mode mode,
                        const c10::Device& device) {
  const auto max_shard_rows = max_shard_size(communication.num_rows, num_ranks).expect_int();
  const auto rows_for_bytes = kChunkBytes / (num_ranks * communication.row_bytes);
  const auto rows_for_products =
      (kMinTokens + communication.row_tokens - 1) / communication.row_tokens;
  const auto rows_for_calls =
      device.is_cpu() ? 1 : (max_shard_rows + kMaxDeviceChunks - 1) / kMaxDeviceChunks;
  auto rows = std::max<std::int64_t>({rows_for_bytes, rows_for_products, rows_for_calls, 1});
  if (mode == Mode::kAlways) {
    rows = std::min(rows, (max_shard_rows + 1) / 2);
  }
  return rows < max_shard_rows ? rows : 0;
}

}  // namespace

Communication communication_of(const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t size,
                               std::int64_t own_features,
                               std::optional<std::int64_t> features) {
  std::int64_t row_tokens = 1;
  for (std::int64_t each = 0; each < x.dim() - 1; ++each) {
    row_tokens *= each == dim ? 1 : x.size(each);
  }
  const auto row_numel = row_tokens * features.value_or(x.size(-1));
  return {size, row_numel * static_cast<std::int64_t>(x.element_size()), row_tokens, own_features};
}

OverlapChoice::OverlapChoice(std::string_view op,
                             const at::Tensor& like,
                             const Communication& communication,
                             const ProcessGroupPtr& group) {
  const auto mode = current_mode().load();
  if (mode == Mode::kNever || communication.num_rows == 0 || communication.row_bytes == 0) {
    return;
  }
  const auto rows = chunk_rows(communication, group->getSize(), mode, like.device());
  if (rows == 0 || mode == Mode::kAlways) {
    rows_per_chunk_ = rows;
    return;
  }
  const Kind kind{std::string(op),
                  std::string(c10::getDtypeNames(like.scalar_type()).first),
                  like.device().is_cpu() ? "cpu" : c10::DeviceTypeName(like.device().type(), true),
                  group->getSize(),
                  round_up(communication.num_rows),
                  round_up(communication.row_bytes)};
  auto& table = Table::instance();
  if (const auto preset = table.preset(kind)) {
    rows_per_chunk_ = *preset ? rows : 0;
    return;
  }
  // A choice by time, and so the rounding of the result, may differ between runs.
  if (at::globalContext().deterministicAlgorithms()) {
    return;
  }
  const auto measurement = table.measurement(kind, group);
  std::unique_lock lock(table.mutex());
  if (!measurement->ratio.has_value() && !can_time(like.device())) {
    return;
  }
  if (!measurement->ratio.has_value() && measurement->tuner.must_exchange()) {
    agree(*measurement, lock, op, group, like.device());
  }
  if (measurement->ratio.has_value()) {
    rows_per_chunk_ = gains(*measurement->ratio) ? rows : 0;
    return;
  }
  const bool is_chunked = measurement->tuner.next_is_chunked();
  rows_per_chunk_ = is_chunked ? rows : 0;
  const bool is_warm = measurement->tuner.is_warm();
  lock.unlock();
  if (is_warm) {
    record_ = [measurement, is_chunked, communication](std::unique_ptr<Stopwatch> stopped) {
      Table::instance().add_timed(
          measurement,
          {communication.own_features, is_chunked, communication.num_rows, std::move(stopped)});
    };
    watch_ = start_stopwatch(like.device());
  }
}

void OverlapChoice::end_timing() {
  if (watch_) {
    watch_->stop();
    record_(std::move(watch_));
  }
}

void set_overlap(const std::string& mode) {
  const auto found = mode_named(mode);
  TORCH_CHECK_VALUE(
      found.has_value(), "weft: got the overlap mode '", mode, "'; pass auto, always or never.");
  current_mode() = *found;
}

std::string overlap() { return name_of(current_mode()); }

std::vector<OverlapEntry> overlap_table() { return Table::instance().entries(); }

void set_overlap_table(std::vector<OverlapEntry> entries) {
  Table::instance().replace(std::move(entries));
}

}  // namespace weft::ops
