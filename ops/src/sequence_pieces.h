#pragma once

// A sequence that is worked on while it travels: each rank's part is cut into pieces of some rows,
// and while a piece of all ranks is multiplied the next one is gathered and the sum of the last one
// is scattered. No rank ever has the whole sequence: two pieces of each tensor that is gathered or
// scattered.
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

// The rows that one rank has in one piece, of all that is gathered and scattered.
struct PieceRows {
  std::int64_t first_row;            // in the whole sequence
  std::int64_t num_rows;             // at least 1
  std::vector<at::Tensor> gathered;  // [num_rows, ...], contiguous, in the order of gather()
  at::Tensor to_sum;                 // [num_rows, ...] to be written; undefined without scatter()
};

// Everything has the sequence as its first dim. Collectives run in an order that dim_size and
// rows_per_piece determine, which must be the same on all ranks.
class Pieces {
 public:
  // REQUIRES: a group, dim_size > 0, rows_per_piece > 0.
  Pieces(std::string_view op,
         ProcessGroupPtr group,
         std::int64_t dim_size,
         std::int64_t rows_per_piece);

  // `part` is this rank's of what is to be gathered: [own rows, ...], contiguous.
  void gather(at::Tensor part);
  // What is summed over the ranks has rows of `row_sizes`. Once at most.
  void scatter(at::IntArrayRef row_sizes, const at::TensorOptions& options);

  // Calls `step` for each rank's rows of each piece.
  void run(const std::function<void(const PieceRows&)>& step);

  // This rank's rows of the sum, [own rows, ...], contiguous. After run(), once.
  at::Tensor scattered();

 private:
  struct Gathered {
    std::vector<at::Tensor> whole;  // [ranks * rows, ...] of each part
    std::vector<PendingCollective> works;
  };

  std::int64_t num_pieces() const;
  std::int64_t first_of(std::int64_t piece) const { return piece * rows_per_piece_; }
  std::int64_t rows_of(std::int64_t piece) const;
  // How many of the rows of `piece` the rank has.
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
