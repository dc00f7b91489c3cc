#include "sequence_pieces.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace weft::ops {

namespace {

// If another rank does not chunk, the backend reports different sizes; this text names the cause.
constexpr std::string_view kGathering =
    "all-gather of a piece (WEFT_OVERLAP and its table, the same on all ranks?)";
constexpr std::string_view kScattering =
    "reduce-scatter of a piece (WEFT_OVERLAP and its table, the same on all ranks?)";

// The sizes of x with `num_rows` in the first dim.
std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t num_rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = num_rows;
  return sizes;
}

}  // namespace

Pieces::Pieces(std::string_view op,
               ProcessGroupPtr group,
               std::int64_t dim_size,
               std::int64_t rows_per_piece)
    : op_(op),
      group_(std::move(group)),
      dim_size_(dim_size),
      part_length_(part_length(dim_size, group_->getSize()).expect_int()),
      rows_per_piece_(std::min(rows_per_piece, part_length_)) {}

void Pieces::gather(at::Tensor part) { parts_.push_back(std::move(part)); }

void Pieces::scatter(at::IntArrayRef row_sizes, const at::TensorOptions& options) {
  auto sizes = row_sizes.vec();
  sizes.insert(sizes.begin(), part_length_);
  sum_ = at::empty(sizes, options);
}

std::int64_t Pieces::num_pieces() const {
  return (part_length_ + rows_per_piece_ - 1) / rows_per_piece_;
}

std::int64_t Pieces::rows_of(std::int64_t piece) const {
  return std::min(rows_per_piece_, part_length_ - first_of(piece));
}

std::int64_t Pieces::rows_on(int rank, std::int64_t piece) const {
  const auto own = part_size(dim_size_, {group_->getSize(), rank}).expect_int();
  return std::clamp<std::int64_t>(own - first_of(piece), 0, rows_of(piece));
}

Pieces::Gathered Pieces::fetch(std::int64_t piece) const {
  Gathered result;
  const auto rows = rows_of(piece);
  const auto own_rows = rows_on(group_->getRank(), piece);
  for (const auto& part : parts_) {
    auto own = own_rows > 0 ? part.narrow(0, first_of(piece), own_rows) : part.narrow(0, 0, 0);
    auto [whole, work] = start_gather_rows(op_, kGathering, own, rows, group_);
    result.whole.push_back(std::move(whole));
    result.works.push_back(std::move(work));
  }
  return result;
}

at::Tensor Pieces::room_for_sum(std::int64_t piece) const {
  return at::empty(with_rows(sum_, rows_of(piece) * group_->getSize()), sum_.options());
}

void Pieces::run(const std::function<void(const PieceRows&)>& step) {
  const auto num_ranks = group_->getSize();
  PendingCollective scattering;
  auto next = fetch(0);
  for (std::int64_t piece = 0; piece < num_pieces(); ++piece) {
    auto now = std::move(next);
    next = piece + 1 < num_pieces() ? fetch(piece + 1) : Gathered();
    for (auto& work : now.works) {
      work.wait();
    }
    const auto rows = rows_of(piece);
    const auto room = sum_.defined() ? room_for_sum(piece) : at::Tensor();
    for (int rank = 0; rank < num_ranks; ++rank) {
      const auto num_rows = rows_on(rank, piece);
      const auto begin = rank * rows;
      if (room.defined() && num_rows < rows) {
        room.narrow(0, begin + num_rows, rows - num_rows).zero_();
      }
      if (num_rows == 0) {
        continue;
      }
      PieceRows block{part_length_ * rank + first_of(piece), num_rows, {}, {}};
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        // Read this rank's own rows from its shard, which is as likely to be cached as the gathered
        // copy and leaves more of the cache to other data.
        block.gathered.push_back(rank == group_->getRank()
                                     ? parts_[i].narrow(0, first_of(piece), num_rows)
                                     : now.whole[i].narrow(0, begin, num_rows));
      }
      if (room.defined()) {
        block.to_sum = room.narrow(0, begin, num_rows);
      }
      step(block);
    }
    if (room.defined()) {
      scattering.wait();
      scattering =
          start_scatter_rows(op_, kScattering, room, sum_.narrow(0, first_of(piece), rows), group_);
    }
  }
  scattering.wait();
}

at::Tensor Pieces::scattered() {
  const auto own = part_size(dim_size_, place_in(group_)).expect_int();
  return std::exchange(sum_, {}).narrow(0, 0, own);
}

}  // namespace weft::ops
