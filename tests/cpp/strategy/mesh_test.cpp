#include "weft/strategy/mesh.h"

#include "error_of.h"

#include <gtest/gtest.h>

#include <set>
#include <unordered_set>

namespace weft::strategy {
namespace {

// Adds every mesh with `num_axes` axes and `world_size` ranks.
void add_meshes(size_t num_axes,
                int64_t world_size,
                std::vector<Axis> axes,
                std::vector<Mesh>& meshes) {
  const std::string name(axis_names()[axes.size()]);
  if (axes.size() + 1 == num_axes) {
    axes.push_back({name, world_size});
    meshes.emplace_back(axes);
    return;
  }
  for (int64_t size = 1; size <= world_size; ++size) {
    if (world_size % size == 0) {
      auto longer = axes;
      longer.push_back({name, size});
      add_meshes(num_axes, world_size / size, longer, meshes);
    }
  }
}

// Returns every mesh of 1 to 4 axes with up to 64 ranks.
const std::vector<Mesh>& small_meshes() {
  static const std::vector<Mesh> meshes = [] {
    std::vector<Mesh> result;
    for (int64_t world_size = 1; world_size <= 64; ++world_size) {
      for (size_t num_axes = 1; num_axes <= 4; ++num_axes) {
        add_meshes(num_axes, world_size, {}, result);
      }
    }
    return result;
  }();
  return meshes;
}

TEST(Mesh, CountsItsRanksAndAxes) {
  const Mesh mesh({{"data_parallel", 2}, {"tensor_parallel", 4}});
  EXPECT_EQ(mesh.size(), 8);
  EXPECT_EQ(mesh.size("data_parallel"), 2);
  EXPECT_EQ(mesh.size("tensor_parallel"), 4);
  EXPECT_TRUE(mesh.has_axis("tensor_parallel"));
  EXPECT_FALSE(mesh.has_axis("pipeline_parallel"));
  EXPECT_EQ(mesh.axes(), (std::vector<Axis>{{"data_parallel", 2}, {"tensor_parallel", 4}}));
}

TEST(Mesh, LastAxisVariesFastest) {
  const Mesh mesh = Mesh::parse("data_parallel=2,tensor_parallel=4");
  EXPECT_EQ(mesh.coordinates(0), (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(mesh.coordinates(1), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(mesh.coordinates(6), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(mesh.group("tensor_parallel", 6), (std::vector<int64_t>{4, 5, 6, 7}));
  EXPECT_EQ(mesh.group("data_parallel", 6), (std::vector<int64_t>{2, 6}));
  EXPECT_EQ(mesh.groups("data_parallel"),
            (std::vector<std::vector<int64_t>>{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
}

TEST(Mesh, GroupsOfAMiddleAxisSkipTheLastAxis) {
  const Mesh mesh = Mesh::parse("pipeline_parallel=2,data_parallel=2,tensor_parallel=2");
  EXPECT_EQ(mesh.groups("data_parallel"),
            (std::vector<std::vector<int64_t>>{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
}

TEST(Mesh, DefaultIsOneRankWithoutAxes) {
  const Mesh mesh;
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.to_string(), "");
  EXPECT_EQ(Mesh::parse(""), mesh);
  EXPECT_TRUE(mesh.coordinates(0).empty());
  EXPECT_EQ(mesh.rank({}), 0);
}

TEST(MeshProperties, RankAndCoordinatesAreInverse) {
  for (const Mesh& mesh : small_meshes()) {
    std::set<std::vector<int64_t>> seen;
    for (int64_t global_rank = 0; global_rank < mesh.size(); ++global_rank) {
      const auto coordinates = mesh.coordinates(global_rank);
      ASSERT_EQ(mesh.rank(coordinates), global_rank) << mesh.to_string();
      ASSERT_TRUE(seen.insert(coordinates).second) << mesh.to_string();
    }
  }
}

TEST(MeshProperties, GroupsPartitionTheRanks) {
  for (const Mesh& mesh : small_meshes()) {
    for (const Axis& axis : mesh.axes()) {
      std::set<int64_t> seen;
      int64_t last_first = -1;
      for (const auto& group : mesh.groups(axis.name)) {
        ASSERT_EQ(static_cast<int64_t>(group.size()), axis.size) << mesh.to_string();
        ASSERT_GT(group.front(), last_first) << mesh.to_string();
        last_first = group.front();
        for (const int64_t member : group) {
          ASSERT_TRUE(seen.insert(member).second) << mesh.to_string();
          ASSERT_EQ(mesh.group(axis.name, member), group) << mesh.to_string();
        }
      }
      ASSERT_EQ(static_cast<int64_t>(seen.size()), mesh.size()) << mesh.to_string();
    }
  }
}

TEST(MeshProperties, GroupMembersDifferAlongTheirAxisOnly) {
  for (const Mesh& mesh : small_meshes()) {
    const int64_t global_rank = mesh.size() / 2;
    for (size_t axis_idx = 0; axis_idx < mesh.axes().size(); ++axis_idx) {
      auto expected = mesh.coordinates(global_rank);
      int64_t position = 0;
      for (const int64_t member : mesh.group(mesh.axes()[axis_idx].name, global_rank)) {
        expected[axis_idx] = position++;
        ASSERT_EQ(mesh.coordinates(member), expected) << mesh.to_string();
      }
    }
  }
}

TEST(MeshProperties, ParseReadsWhatToStringPrints) {
  std::unordered_set<Mesh> distinct;
  for (const Mesh& mesh : small_meshes()) {
    const Mesh copy = Mesh::parse(mesh.to_string());
    ASSERT_EQ(copy, mesh);
    ASSERT_EQ(std::hash<Mesh>{}(copy), std::hash<Mesh>{}(mesh));
    distinct.insert(mesh);
    distinct.insert(copy);
  }
  EXPECT_EQ(distinct.size(), small_meshes().size());
}

TEST(Mesh, MeshesWithAnotherOrderOfAxesDiffer) {
  EXPECT_NE(Mesh::parse("data_parallel=2,tensor_parallel=2"),
            Mesh::parse("tensor_parallel=2,data_parallel=2"));
}

TEST(Mesh, ParseAllowsBlanks) {
  EXPECT_EQ(Mesh::parse(" data_parallel = 2 , tensor_parallel=4\n").to_string(),
            "data_parallel=2,tensor_parallel=4");
}

TEST(MeshErrors, UnknownAndRepeatedAxes) {
  EXPECT_EQ(error_of([] {
              return Mesh({{"tensor_paralel", 2}});
            }),
            "mesh: unknown axis 'tensor_paralel': use one of pipeline_parallel, data_replicate, "
            "data_parallel, context_parallel, tensor_parallel; the nearest is 'tensor_parallel'");
  EXPECT_EQ(error_of([] {
              return Mesh({{"data_parallel", 2}, {"data_parallel", 2}});
            }),
            "mesh: axis 'data_parallel' is given twice; give each axis once");
}

TEST(MeshErrors, SizesOutOfRange) {
  EXPECT_EQ(error_of([] {
              return Mesh({{"tensor_parallel", 0}});
            }),
            "mesh: axis 'tensor_parallel' has size 0; give a size of at least 1, or leave the axis "
            "out");
  EXPECT_EQ(
      error_of([] { return Mesh::parse("data_parallel=65536,tensor_parallel=65536"); }),
      "mesh: 'data_parallel=65536,tensor_parallel=65536' has more than 2147483647 ranks; give "
      "smaller sizes");
  EXPECT_EQ(Mesh({{"tensor_parallel", Mesh::kMaxSize}}).size(), Mesh::kMaxSize);
}

TEST(MeshErrors, TextThatIsNotAxisSizePairs) {
  const std::string remedy = "; write axis=size pairs such as 'data_parallel=2,tensor_parallel=4'";
  EXPECT_EQ(error_of([] { return Mesh::parse("tensor_parallel"); }),
            "mesh: cannot read 'tensor_parallel' in 'tensor_parallel'" + remedy);
  for (const char* part : {"tensor_parallel=",
                           "tensor_parallel=2x",
                           "tensor_parallel=2=3",
                           "tensor_parallel=99999999999999999999",
                           "tensor_parallel=+2",
                           ""}) {
    const std::string text = std::string("data_parallel=2,") + part;
    std::string expected = "mesh: cannot read '";
    expected.append(part).append("' in '").append(text).append("'").append(remedy);
    EXPECT_EQ(error_of([&] { return Mesh::parse(text); }), expected);
  }
}

TEST(MeshErrors, RanksCoordinatesAndAxesOutsideTheMesh) {
  const Mesh mesh = Mesh::parse("data_parallel=2,tensor_parallel=4");
  const std::string name = "mesh 'data_parallel=2,tensor_parallel=4': ";
  for (const int64_t outside : {-1, 8}) {
    const std::string expected =
        name + "rank " + std::to_string(outside) + " lies outside; use 0 to 7";
    EXPECT_EQ(error_of([&] { return mesh.coordinates(outside); }), expected);
    EXPECT_EQ(error_of([&] { return mesh.group("data_parallel", outside); }), expected);
  }
  EXPECT_EQ(error_of([&] { return mesh.rank(std::vector<int64_t>{1}); }),
            name + "got 1 coordinates; give 2, one per axis");
  EXPECT_EQ(error_of([&] {
              return mesh.rank(std::vector<int64_t>{1, 4});
            }),
            name + "coordinate 4 along 'tensor_parallel' lies outside; use 0 to 3");
  const std::string no_axis =
      name + "no axis 'pipeline_parallel'; use one of data_parallel, tensor_parallel";
  EXPECT_EQ(error_of([&] { return mesh.size("pipeline_parallel"); }), no_axis);
  EXPECT_EQ(error_of([&] { return mesh.group("pipeline_parallel", 0); }), no_axis);
  EXPECT_EQ(error_of([&] { return mesh.groups("pipeline_parallel"); }), no_axis);
  EXPECT_EQ(error_of([] { return Mesh().size("data_parallel"); }),
            "mesh '': no axis 'data_parallel'; it has no axes");
}

std::string world_size_error(const std::string& mesh, int64_t world_size) {
  return error_of([&] {
    Mesh::parse(mesh).check_world_size(world_size);
    return 0;
  });
}

TEST(MeshWorldSize, TheProductOfTheSizesIsAccepted) {
  for (const Mesh& mesh : small_meshes()) {
    ASSERT_NO_THROW(mesh.check_world_size(mesh.size()));
  }
}

TEST(MeshWorldSize, ErrorNamesTheNearestSizesThatFit) {
  EXPECT_EQ(world_size_error("data_parallel=2,tensor_parallel=4", 6),
            "mesh 'data_parallel=2,tensor_parallel=4' has 8 ranks, but the job has 6; use sizes "
            "whose product is 6, such as 'data_parallel=2,tensor_parallel=3', "
            "'data_parallel=1,tensor_parallel=6', 'data_parallel=3,tensor_parallel=2', "
            "'data_parallel=6,tensor_parallel=1'");
  EXPECT_EQ(world_size_error("data_parallel=2,tensor_parallel=4", 7),
            "mesh 'data_parallel=2,tensor_parallel=4' has 8 ranks, but the job has 7; use sizes "
            "whose product is 7, such as 'data_parallel=1,tensor_parallel=7', "
            "'data_parallel=7,tensor_parallel=1'");
  EXPECT_EQ(
      world_size_error("tensor_parallel=4", 2),
      "mesh 'tensor_parallel=4' has 4 ranks, but the job has 2; use sizes whose product is 2, "
      "such as 'tensor_parallel=2'");
}

// data_parallel=4,tensor_parallel=21 has the smaller total change, but changes both sizes.
TEST(MeshWorldSize, ErrorPrefersToKeepASize) {
  EXPECT_EQ(world_size_error("data_parallel=3,tensor_parallel=20", 84),
            "mesh 'data_parallel=3,tensor_parallel=20' has 60 ranks, but the job has 84; use sizes "
            "whose product is 84, such as 'data_parallel=3,tensor_parallel=28', "
            "'data_parallel=4,tensor_parallel=21', 'data_parallel=6,tensor_parallel=14', "
            "'data_parallel=7,tensor_parallel=12'");
}

TEST(MeshWorldSize, ErrorForAJobThatNoMeshFits) {
  EXPECT_EQ(world_size_error("tensor_parallel=4", 0),
            "mesh 'tensor_parallel=4' has 4 ranks, but the job has 0; a job has 1 to 2147483647");
  EXPECT_EQ(world_size_error("", 3),
            "mesh '' has 1 rank, but the job has 3; give an axis, such as 'tensor_parallel=3'");
}

TEST(MeshWorldSize, ListStaysShortForANumberWithManyDivisors) {
  const std::string text = world_size_error(
      "pipeline_parallel=2,data_replicate=2,data_parallel=2,context_parallel=2,tensor_parallel=2",
      2095133040);
  size_t num_choices = 0;
  for (size_t at = text.find("'pipeline"); at != std::string::npos;
       at = text.find("'pipeline", at + 1)) {
    ++num_choices;
  }
  EXPECT_EQ(num_choices, 1 + 4);  // the mesh itself and the choices
}

}  // namespace
}  // namespace weft::strategy
