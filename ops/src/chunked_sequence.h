#pragma once

// Overlaps the communication of a sequence with computation. The sequence is sharded over the group
// along its first dim; chunk i consists of rows [i * rows_per_chunk, (i + 1) * rows_per_chunk) of
// every rank's shard. While chunk i is computed, the all-gather of the inputs of chunk i + 1 and
// the reduce-scatter of the outputs of chunk i - 1 are in flight. Besides its own shards, a rank
// stores at most two chunks at a time of each tensor that is gathered or scattered.
//
//   ChunkedSequence chunks(op, group, dim_size, rows_per_chunk);
//   chunks.add_input(x);
//   chunks.set_output({features}, options);
//   chunks.run([&](const ChunkRows& rows) { at::mm_out(rows.output, rows.gathered[0], w); });
//   return chunks.take_output();

#include "group_collectives.h"

#include <functional>
#include <string_view>
#include <vector>

namespace weft::ops {

// The rows that `num_ranks` consecutive ranks contribute to one chunk, the same number each. On the
// CPU num_ranks is 1, so that this rank's own rows are read from its shard; on other devices ranks
// are merged, because one product per rank is slower and takes the host longer to launch.
struct ChunkRows {
  std::int64_t num_ranks;    // at least 1
  std::int64_t num_rows;     // of each of these ranks, at least 1
  std::int64_t first_row;    // of the first of these ranks, in the full sequence
  std::int64_t rank_stride;  // rows between two ranks' first rows in the full sequence
  // [num_ranks * num_rows, ...], contiguous, in the order of add_input().
  std::vector<at::Tensor> gathered;
  // [num_ranks * num_rows, ...], contiguous, to fill; undefined without set_output().
  at::Tensor output;

  // Returns a view of these rows in `full`, [rows of the full sequence, ...], of any strides:
  // [num_rows, ...] for one rank, else [num_ranks, num_rows, ...].
  at::Tensor of(const at::Tensor& full) const;
};

// The sequence is the first dim of all tensors. dim_size, the rows of the full sequence, and
// rows_per_chunk, the rows of each rank's shard in a chunk, determine the sizes and the order of
// the collectives and must be equal on all ranks.
class ChunkedSequence {
 public:
  // REQUIRES: group is not null, dim_size > 0, rows_per_chunk > 0.
  ChunkedSequence(std::string_view op,
                  ProcessGroupPtr group,
                  std::int64_t dim_size,
                  std::int64_t rows_per_chunk);

  // Adds a sequence to gather: `shard` is this rank's shard of it, [own rows, ...], contiguous.
  void add_input(at::Tensor shard);
  // Adds the sequence to reduce-scatter; each of its rows has the shape `row_sizes`. Call it at
  // most once.
  void set_output(at::IntArrayRef row_sizes, const at::TensorOptions& options);

  // Calls `step` for the rows of all ranks in each chunk. On the CPU, makes one call per rank; on
  // other devices, one call for the ranks that fill the chunk and one for the rank whose shard ends
  // in it.
  void run(const std::function<void(const ChunkRows&)>& step);

  // Returns this rank's shard of the reduced output, [own rows, ...], contiguous. Call it once,
  // after run().
  at::Tensor take_output();

 private:
  struct GatheredChunk {
    std::vector<at::Tensor> inputs;  // [ranks * max_rows_per_rank(chunk), ...] each
    std::vector<PendingCollective> works;
  };

  std::int64_t num_chunks() const;
  // The index of the chunk's first row in each rank's shard.
  std::int64_t first_row_in_shard(std::int64_t chunk) const { return chunk * rows_per_chunk_; }
  std::int64_t max_rows_per_rank(std::int64_t chunk) const;
  // The number of rows of `chunk` on `rank`: less than max_rows_per_rank() if the shard ends in the
  // chunk, 0 if it ends before.
  std::int64_t rows_on(int rank, std::int64_t chunk) const;
  // The number of ranks, from `rank` on, that one call of `step` covers: those with as many rows as
  // `rank`.
  int num_merged_ranks(int rank, std::int64_t chunk) const;
  GatheredChunk start_gather(std::int64_t chunk) const;
  at::Tensor output_buffer(std::int64_t chunk) const;

  const std::string_view op_;
  const ProcessGroupPtr group_;
  const std::int64_t dim_size_;
  const std::int64_t max_shard_size_;
  const std::int64_t rows_per_chunk_;
  std::vector<at::Tensor> shards_;
  bool merges_ranks_ = false;  // not on the CPU: see ChunkRows
  at::Tensor sum_;  // this rank's output, [max_shard_size_, ...]; undefined without set_output()
};

}  // namespace weft::ops
