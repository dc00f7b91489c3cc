#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy {

// Returns the valid names of axes, from outer to inner as usually laid out: pipeline_parallel,
// data_replicate, data_parallel, context_parallel, tensor_parallel.
std::span<const std::string_view> axis_names();

struct Axis {
  std::string name;
  int64_t size = 1;

  bool operator==(const Axis&) const = default;
};

// The ranks of a job laid out along named axes; the last axis varies fastest, as in torch's
// DeviceMesh: in "data_parallel=2,tensor_parallel=4" the ranks 0..3 are one tensor-parallel group.
//
// An immutable value: cheap to copy, comparable, hashable, safe to read from any thread. A
// default-constructed mesh has no axes and one rank, and prints as "".
//
// A `global_rank` counts over the full mesh, from 0. All functions but has_axis() throw
// std::invalid_argument for an axis that this mesh does not have and for a rank outside of it.
class Mesh {
 public:
  // The most ranks a mesh may have.
  static constexpr int64_t kMaxSize = (int64_t{1} << 31) - 1;

  Mesh() = default;

  // Throws std::invalid_argument for a name outside axis_names(), a repeated name, a size below 1
  // and a product above kMaxSize.
  explicit Mesh(std::vector<Axis> axes);

  // The inverse of to_string(); blanks around names and sizes are allowed. Throws
  // std::invalid_argument for any other text.
  static Mesh parse(std::string_view text);
  [[nodiscard]] std::string to_string() const;

  [[nodiscard]] const std::vector<Axis>& axes() const { return axes_; }
  [[nodiscard]] bool has_axis(std::string_view axis) const;

  // The number of ranks, in total or along one axis.
  [[nodiscard]] int64_t size() const { return size_; }
  [[nodiscard]] int64_t size(std::string_view axis) const;

  // Coordinates are in axis order; rank() is the inverse of coordinates().
  [[nodiscard]] std::vector<int64_t> coordinates(int64_t global_rank) const;
  [[nodiscard]] int64_t rank(std::span<const int64_t> coordinates) const;

  // Returns `global_rank` and the global ranks whose coordinates differ from its coordinates only
  // along `axis`, ascending.
  [[nodiscard]] std::vector<int64_t> group(std::string_view axis, int64_t global_rank) const;

  // Returns all groups along `axis`, ordered by first rank. Every rank is in exactly one of them.
  [[nodiscard]] std::vector<std::vector<int64_t>> groups(std::string_view axis) const;

  // Throws std::invalid_argument unless size() == world_size. The message names up to four meshes
  // of these axes with world_size ranks.
  void check_world_size(int64_t world_size) const;

  bool operator==(const Mesh&) const = default;

 private:
  [[nodiscard]] size_t axis_idx(std::string_view axis) const;
  [[nodiscard]] int64_t stride(size_t axis_idx) const;  // distance between neighbours along an axis
  void check_rank(int64_t global_rank) const;

  std::vector<Axis> axes_;
  int64_t size_ = 1;
};

}  // namespace weft::strategy

template <>
struct std::hash<weft::strategy::Mesh> {
  size_t operator()(const weft::strategy::Mesh& mesh) const noexcept;
};
