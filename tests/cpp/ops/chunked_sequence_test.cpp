// Which rows each step of a chunked sequence gets. Meta tensors stand in for GPU tensors, for which
// the ranks of a chunk are merged into one step.
#include "chunked_sequence.h"

#include "recording_group.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <ostream>
#include <vector>

namespace weft::testing {
namespace {

struct Step {
  std::int64_t num_ranks;
  std::int64_t num_rows;
  std::int64_t first_row;

  bool operator==(const Step&) const = default;
};

std::ostream& operator<<(std::ostream& out, const Step& step) {
  return out << step.num_ranks << " ranks, " << step.num_rows << " rows from " << step.first_row;
}

// Returns the steps of rank 0 of `num_ranks`, with or without a tensor to gather and one to
// scatter.
std::vector<Step> steps_of(at::DeviceType device,
                           int num_ranks,
                           std::int64_t num_rows,
                           std::int64_t rows_per_chunk,
                           bool gathers,
                           bool scatters) {
  const auto group = c10::make_intrusive<RecordingGroup>(0, num_ranks);
  const auto own_rows = (num_rows + num_ranks - 1) / num_ranks;
  ops::ChunkedSequence chunks("test", group, num_rows, rows_per_chunk);
  if (gathers) chunks.add_input(at::empty({own_rows, 4}, at::device(device)));
  if (scatters) chunks.set_output({5}, at::device(device));
  std::vector<Step> result;
  chunks.run([&](const ops::ChunkRows& rows) {
    result.push_back({rows.num_ranks, rows.num_rows, rows.first_row});
    EXPECT_EQ(rows.rank_stride, own_rows);
    const auto step_rows = rows.num_ranks * rows.num_rows;
    if (gathers) {
      EXPECT_EQ(rows.gathered[0].sizes(), at::IntArrayRef({step_rows, 4}));
    }
    if (scatters) {
      EXPECT_EQ(rows.output.sizes(), at::IntArrayRef({step_rows, 5}));
    }
  });
  return result;
}

std::vector<Step> steps(at::DeviceType device,
                        int num_ranks,
                        std::int64_t num_rows,
                        std::int64_t rows_per_chunk) {
  const auto result = steps_of(device, num_ranks, num_rows, rows_per_chunk, true, true);
  EXPECT_EQ(steps_of(device, num_ranks, num_rows, rows_per_chunk, true, false), result);
  EXPECT_EQ(steps_of(device, num_ranks, num_rows, rows_per_chunk, false, true), result);
  return result;
}

TEST(ChunkedSequence, RanksWithEquallyManyRowsAreMerged) {
  EXPECT_EQ(steps(at::kMeta, 4, 12, 2), (std::vector<Step>{{4, 2, 0}, {4, 1, 2}}));
  // Shards of 3, 3, 3 and 1 rows: the last one ends in the first chunk.
  EXPECT_EQ(steps(at::kMeta, 4, 10, 2), (std::vector<Step>{{3, 2, 0}, {1, 1, 9}, {3, 1, 2}}));
  // Shards of 2, 2, 1 and 0 rows.
  EXPECT_EQ(steps(at::kMeta, 4, 5, 1), (std::vector<Step>{{3, 1, 0}, {2, 1, 1}}));
  EXPECT_EQ(steps(at::kMeta, 4, 5, 2), (std::vector<Step>{{2, 2, 0}, {1, 1, 4}}));
  EXPECT_EQ(steps(at::kMeta, 4, 1, 1), (std::vector<Step>{{1, 1, 0}}));
}

TEST(ChunkedSequence, EachRankIsAStepOnTheCpu) {
  EXPECT_EQ(steps(at::kCPU, 3, 8, 2),
            (std::vector<Step>{{1, 2, 0}, {1, 2, 3}, {1, 2, 6}, {1, 1, 2}, {1, 1, 5}}));
}

TEST(ChunkRows, OfReturnsAViewOfTheFullSequence) {
  // The second and third row of the second and third shard of three rows, of 10 in all.
  const ops::ChunkRows merged{2, 2, 4, 3, {}, {}};
  const ops::ChunkRows one{1, 2, 4, 3, {}, {}};
  const auto batch_first = at::arange(2 * 10 * 3).view({2, 10, 3});
  const auto sequence_first = at::arange(10 * 2 * 3).view({10, 2, 3});
  const auto offset = at::arange(100).narrow(0, 7, 60).view({10, 2, 3});
  for (const auto& full : {batch_first.movedim(1, 0), sequence_first, offset}) {
    const auto expected = at::cat({full.narrow(0, 4, 2), full.narrow(0, 7, 2)});
    EXPECT_TRUE(merged.of(full).equal(expected.view({2, 2, 2, 3})));
    EXPECT_TRUE(merged.of(full).is_alias_of(full));
    EXPECT_TRUE(one.of(full).equal(full.narrow(0, 4, 2)));
  }
}

}  // namespace
}  // namespace weft::testing
