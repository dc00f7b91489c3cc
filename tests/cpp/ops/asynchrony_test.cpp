// Which collectives are started asynchronously: only those that overlap with a computation. Meta
// tensors stand in for GPU tensors, because collectives of CPU tensors are never asynchronous.
#include "chunked_sequence.h"
#include "group.h"
#include "recording_group.h"
#include "reduced_products.h"

#include <gtest/gtest.h>

#include <vector>

namespace weft::testing {
namespace {

at::Tensor on_meta(at::IntArrayRef sizes) { return at::empty(sizes, at::device(at::kMeta)); }

TEST(Asynchrony, AReducedProductIsWaitedForAtOnce) {
  const auto group = c10::make_intrusive<RecordingGroup>(0, 2);
  const auto y = ops::reduced_linear("test", on_meta({3, 4}), on_meta({5, 4}), group);
  EXPECT_EQ(y.sizes(), at::IntArrayRef({3, 5}));
  EXPECT_EQ(group->is_asynchronous, std::vector<bool>{false});
}

TEST(Asynchrony, AnInputGradientIsAsynchronousIfOtherGradientsFollow) {
  const auto group = c10::make_intrusive<RecordingGroup>(0, 2);
  for (const bool others_follow : {true, false}) {
    ops::start_reduced_input_product("test", group, others_follow, on_meta({3, 5}), on_meta({5, 4}))
        .second.wait();
  }
  EXPECT_EQ(group->is_asynchronous, (std::vector<bool>{true, false}));
}

// Runs 6 rows of each rank in chunks of `rows_per_chunk`. Returns for each collective whether it
// was asynchronous.
std::vector<bool> asynchrony_of_chunks(std::int64_t rows_per_chunk) {
  const auto group = c10::make_intrusive<RecordingGroup>(0, 2);
  ops::ChunkedSequence chunks("test", group, 12, rows_per_chunk);
  chunks.add_input(on_meta({6, 4}));
  chunks.set_output({5}, at::device(at::kMeta));
  chunks.run([](const ops::ChunkRows& rows) { EXPECT_EQ(rows.output.size(0), 2 * rows.num_rows); });
  EXPECT_EQ(chunks.take_output().sizes(), at::IntArrayRef({6, 5}));
  return group->is_asynchronous;
}

TEST(Asynchrony, TheFirstGatherAndTheLastScatterOfChunksOverlapWithNothing) {
  // Gathers 0 and 1, then, for each chunk: the scatter, and the gather of the next but one.
  EXPECT_EQ(asynchrony_of_chunks(2), (std::vector<bool>{false, true, true, true, true, false}));
  EXPECT_EQ(asynchrony_of_chunks(6), (std::vector<bool>{false, false}));
}

}  // namespace
}  // namespace weft::testing
