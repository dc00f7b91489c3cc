#pragma once

// Overlaps the communication of a sequence with computation. The sequence is sharded over the group
// along its first dim; chunk i consists of rows [i * rows_per_piece, (i + 1) * rows_per_piece) of
// every rank's shard. While chunk i is computed, the all-gather of the inputs of chunk i + 1 and
// the reduce-scatter of the outputs of chunk i - 1 are in flight. A rank never holds the full
// sequence: at most two chunks of each tensor that is gathered or scattered.
//
//   Pieces pieces(op, group, dim_size, rows_per_piece);
//   pieces.gather(x);
//   pieces.scatter({features}, options);
//   pieces.run([&](const PieceRows& rows) { at::mm_out(rows.to_sum, rows.gathered[0], w); });
//   return pieces.scattered();

#include "group_collectives.h"

#include <functional>
#include <string_view>
#include <vector>

namespace weft::ops {

// The rows that one rank contributes to one chunk.
struct PieceRows {
  std::int64_t first_row;            // in the full sequence
  std::int64_t num_rows;             // at least 1
  std::vector<at::Tensor> gathered;  // [num_rows, ...], contiguous, in the order of gather()
  at::Tensor to_sum;                 // [num_rows, ...], output; undefined without scatter()
};

// The sequence is the first dim of all tensors. dim_size and rows_per_piece determine the order of
// the collectives and must be equal on all ranks.
class Pieces {
 public:
  // REQUIRES: a group, dim_size > 0, rows_per_piece > 0.
  Pieces(std::string_view op,
         ProcessGroupPtr group,
         std::int64_t dim_size,
         std::int64_t rows_per_piece);

  // Adds an input: `part` is this rank's shard of it, [own rows, ...], contiguous.
  void gather(at::Tensor part);
  // Adds the output, which is summed over the ranks; its rows have `row_sizes`. At most once.
  void scatter(at::IntArrayRef row_sizes, const at::TensorOptions& options);

  // Calls `step` for each chunk and each rank that has rows in it.
  void run(const std::function<void(const PieceRows&)>& step);

  // Returns this rank's shard of the sum, [own rows, ...], contiguous. Call it once, after run().
  at::Tensor scattered();

 private:
  struct Gathered {
    std::vector<at::Tensor> whole;  // [ranks * rows, ...] of each input
    std::vector<PendingCollective> works;
  };

  std::int64_t num_pieces() const;
  std::int64_t first_of(std::int64_t piece) const { return piece * rows_per_piece_; }
  std::int64_t rows_of(std::int64_t piece) const;
  // The number of rows of `piece` on `rank`; fewer than rows_of(piece) where its shard ends.
  std::int64_t rows_on(int rank, std::int64_t piece) const;
  Gathered fetch(std::int64_t piece) const;
  at::Tensor room_for_sum(std::int64_t piece) const;

  const std::string_view op_;
  const ProcessGroupPtr group_;
  const std::int64_t dim_size_;
  const std::int64_t part_length_;
  const std::int64_t rows_per_piece_;
  std::vector<at::Tensor> parts_;
  at::Tensor sum_;  // [part_length_, ...]; undefined without scatter()
};

}  // namespace weft::ops
