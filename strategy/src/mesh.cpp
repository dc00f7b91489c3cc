#include "weft/strategy/mesh.h"

#include "hash.h"
#include "mesh_fit.h"
#include "text.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

namespace weft::strategy {

namespace {

using detail::quote;

constexpr std::array<std::string_view, 5> kAxisNames = {
    "pipeline_parallel", "data_replicate", "data_parallel", "context_parallel", "tensor_parallel"};

std::string list_names(std::span<const std::string_view> names) {
  return detail::join(std::vector<std::string>(names.begin(), names.end()), ", ");
}

void check_name(const std::string& name) {
  if (std::find(kAxisNames.begin(), kAxisNames.end(), name) == kAxisNames.end()) {
    throw std::invalid_argument("mesh: unknown axis " + quote(name) + ": use one of " +
                                list_names(kAxisNames) + "; the nearest is " +
                                quote(detail::nearest(name, kAxisNames)));
  }
}

}  // namespace

std::span<const std::string_view> axis_names() { return kAxisNames; }

Mesh::Mesh(std::vector<Axis> axes) : axes_(std::move(axes)) {
  for (auto axis = axes_.begin(); axis != axes_.end(); ++axis) {
    check_name(axis->name);
    const auto same_name = [&](const Axis& other) { return other.name == axis->name; };
    if (std::any_of(axes_.begin(), axis, same_name)) {
      throw std::invalid_argument("mesh: axis " + quote(axis->name) +
                                  " is given twice; give each axis once");
    }
    if (axis->size < 1) {
      throw std::invalid_argument("mesh: axis " + quote(axis->name) + " has size " +
                                  std::to_string(axis->size) +
                                  "; give a size of at least 1, or leave the axis out");
    }
    if (axis->size > kMaxSize / size_) {
      throw std::invalid_argument("mesh: " + quote(to_string()) + " has more than " +
                                  std::to_string(kMaxSize) + " ranks; give smaller sizes");
    }
    size_ *= axis->size;
  }
}

Mesh Mesh::parse(std::string_view text) {
  std::vector<Axis> axes;
  if (detail::trim(text).empty()) {
    return {};
  }
  for (const std::string_view part : detail::split(text, ',')) {
    const size_t equals = part.find('=');
    const auto size = equals == std::string_view::npos
                          ? std::nullopt
                          : detail::parse_integer(detail::trim(part.substr(equals + 1)));
    if (!size) {
      throw std::invalid_argument("mesh: cannot read " + quote(detail::trim(part)) + " in " +
                                  quote(text) +
                                  "; write axis=size pairs such as "
                                  "'data_parallel=2,tensor_parallel=4'");
    }
    axes.push_back({.name = std::string(detail::trim(part.substr(0, equals))), .size = *size});
  }
  return Mesh(std::move(axes));
}

std::string Mesh::to_string() const {
  std::vector<std::string> parts;
  parts.reserve(axes_.size());
  for (const Axis& axis : axes_) {
    parts.push_back(axis.name + "=" + std::to_string(axis.size));
  }
  return detail::join(parts, ",");
}

bool Mesh::has_axis(std::string_view axis) const {
  return std::any_of(
      axes_.begin(), axes_.end(), [&](const Axis& candidate) { return candidate.name == axis; });
}

size_t Mesh::axis_idx(std::string_view axis) const {
  const auto found = std::find_if(
      axes_.begin(), axes_.end(), [&](const Axis& candidate) { return candidate.name == axis; });
  if (found == axes_.end()) {
    std::vector<std::string> names;
    names.reserve(axes_.size());
    for (const Axis& candidate : axes_) {
      names.push_back(candidate.name);
    }
    throw std::invalid_argument(
        "mesh " + quote(to_string()) + ": no axis " + quote(axis) + "; " +
        (names.empty() ? "it has no axes" : "use one of " + detail::join(names, ", ")));
  }
  return static_cast<size_t>(found - axes_.begin());
}

int64_t Mesh::stride(size_t axis_idx) const {
  int64_t stride = 1;
  for (size_t i = axis_idx + 1; i < axes_.size(); ++i) {
    stride *= axes_[i].size;
  }
  return stride;
}

void Mesh::check_rank(int64_t global_rank) const {
  if (global_rank < 0 || global_rank >= size_) {
    throw std::invalid_argument("mesh " + quote(to_string()) + ": rank " +
                                std::to_string(global_rank) + " lies outside; use 0 to " +
                                std::to_string(size_ - 1));
  }
}

int64_t Mesh::size(std::string_view axis) const { return axes_[axis_idx(axis)].size; }

std::vector<int64_t> Mesh::coordinates(int64_t global_rank) const {
  check_rank(global_rank);
  std::vector<int64_t> result(axes_.size());
  for (size_t i = axes_.size(); i-- > 0;) {
    result[i] = global_rank % axes_[i].size;
    global_rank /= axes_[i].size;
  }
  return result;
}

int64_t Mesh::rank(std::span<const int64_t> coordinates) const {
  if (coordinates.size() != axes_.size()) {
    throw std::invalid_argument("mesh " + quote(to_string()) + ": got " +
                                std::to_string(coordinates.size()) + " coordinates; give " +
                                std::to_string(axes_.size()) + ", one per axis");
  }
  int64_t result = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (coordinates[i] < 0 || coordinates[i] >= axes_[i].size) {
      throw std::invalid_argument("mesh " + quote(to_string()) + ": coordinate " +
                                  std::to_string(coordinates[i]) + " along " +
                                  quote(axes_[i].name) + " lies outside; use 0 to " +
                                  std::to_string(axes_[i].size - 1));
    }
    result = result * axes_[i].size + coordinates[i];
  }
  return result;
}

std::vector<int64_t> Mesh::group(std::string_view axis, int64_t global_rank) const {
  const size_t idx = axis_idx(axis);
  check_rank(global_rank);
  const int64_t step = stride(idx);
  const int64_t first = global_rank - (global_rank / step) % axes_[idx].size * step;
  std::vector<int64_t> result;
  result.reserve(static_cast<size_t>(axes_[idx].size));
  for (int64_t i = 0; i < axes_[idx].size; ++i) {
    result.push_back(first + i * step);
  }
  return result;
}

std::vector<std::vector<int64_t>> Mesh::groups(std::string_view axis) const {
  const size_t idx = axis_idx(axis);
  const int64_t step = stride(idx);
  std::vector<std::vector<int64_t>> result;
  for (int64_t block = 0; block < size_; block += step * axes_[idx].size) {
    for (int64_t first = block; first < block + step; ++first) {
      result.push_back(group(axis, first));
    }
  }
  return result;
}

void Mesh::check_world_size(int64_t world_size) const {
  if (world_size == size_) {
    return;
  }
  std::string text = "mesh " + quote(to_string()) + " has " + std::to_string(size_) +
                     (size_ == 1 ? " rank" : " ranks") + ", but the job has " +
                     std::to_string(world_size);
  if (world_size < 1 || world_size > kMaxSize) {
    throw std::invalid_argument(text + "; a job has 1 to " + std::to_string(kMaxSize));
  }
  if (axes_.empty()) {
    throw std::invalid_argument(
        text + "; give an axis, such as 'tensor_parallel=" + std::to_string(world_size) + "'");
  }
  std::vector<std::string> choices;
  for (auto& axes : detail::nearest_axes(axes_, world_size, /*max_choices=*/4)) {
    choices.push_back(quote(Mesh(std::move(axes)).to_string()));
  }
  throw std::invalid_argument(text + "; use sizes whose product is " + std::to_string(world_size) +
                              ", such as " + detail::join(choices, ", "));
}

}  // namespace weft::strategy

size_t std::hash<weft::strategy::Mesh>::operator()(
    const weft::strategy::Mesh& mesh) const noexcept {
  size_t seed = mesh.axes().size();
  for (const auto& axis : mesh.axes()) {
    weft::strategy::detail::hash_combine(seed, axis.name);
    weft::strategy::detail::hash_combine(seed, axis.size);
  }
  return seed;
}
