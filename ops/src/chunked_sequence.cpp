#include "chunked_sequence.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

namespace weft::ops {

namespace {

// The names of the collectives in the backend's errors. They include a possible cause of an error
// about different sizes: another rank does not use chunks.
constexpr std::string_view kGatherChunk =
    "all-gather of a chunk (WEFT_OVERLAP and WEFT_OVERLAP_TABLE must be equal on all ranks)";
constexpr std::string_view kScatterChunk =
    "reduce-scatter of a chunk (WEFT_OVERLAP and WEFT_OVERLAP_TABLE must be equal on all ranks)";

// The sizes of x with `num_rows` in the first dim.
std::vector<std::int64_t> with_rows(const at::Tensor& x, std::int64_t num_rows) {
  auto sizes = x.sizes().vec();
  sizes[0] = num_rows;
  return sizes;
}

}  // namespace

at::Tensor ChunkRows::of(const at::Tensor& full) const {
  if (num_ranks == 1) {
    return full.narrow(0, first_row, num_rows);
  }
  auto sizes = with_rows(full, num_rows);
  sizes.insert(sizes.begin(), num_ranks);
  auto strides = full.strides().vec();
  strides.insert(strides.begin(), rank_stride * full.stride(0));
  return full.as_strided(sizes, strides, full.storage_offset() + first_row * full.stride(0));
}

ChunkedSequence::ChunkedSequence(std::string_view op,
                                 ProcessGroupPtr group,
                                 std::int64_t dim_size,
                                 std::int64_t rows_per_chunk)
    : op_(op),
      group_(std::move(group)),
      dim_size_(dim_size),
      max_shard_size_(max_shard_size(dim_size, group_->getSize()).expect_int()),
      rows_per_chunk_(std::min(rows_per_chunk, max_shard_size_)) {}

void ChunkedSequence::add_input(at::Tensor shard) {
  merges_ranks_ = !shard.is_cpu();
  shards_.push_back(std::move(shard));
}

void ChunkedSequence::set_output(at::IntArrayRef row_sizes, const at::TensorOptions& options) {
  auto sizes = row_sizes.vec();
  sizes.insert(sizes.begin(), max_shard_size_);
  sum_ = at::empty(sizes, options);
  merges_ranks_ = !sum_.is_cpu();
}

std::int64_t ChunkedSequence::num_chunks() const {
  return (max_shard_size_ + rows_per_chunk_ - 1) / rows_per_chunk_;
}

std::int64_t ChunkedSequence::max_rows_per_rank(std::int64_t chunk) const {
  return std::min(rows_per_chunk_, max_shard_size_ - first_row_in_shard(chunk));
}

std::int64_t ChunkedSequence::rows_on(int rank, std::int64_t chunk) const {
  const auto size = shard_size(dim_size_, {group_->getSize(), rank}).expect_int();
  return std::clamp<std::int64_t>(size - first_row_in_shard(chunk), 0, max_rows_per_rank(chunk));
}

int ChunkedSequence::num_merged_ranks(int rank, std::int64_t chunk) const {
  if (!merges_ranks_) {
    return 1;
  }
  const auto num_rows = rows_on(rank, chunk);
  auto end = rank + 1;
  while (end < group_->getSize() && rows_on(end, chunk) == num_rows) {
    ++end;
  }
  return end - rank;
}

ChunkedSequence::GatheredChunk ChunkedSequence::start_gather(std::int64_t chunk) const {
  GatheredChunk result;
  const auto rows = max_rows_per_rank(chunk);
  const auto own_rows = rows_on(group_->getRank(), chunk);
  for (const auto& shard : shards_) {
    auto rows_of_shard =
        own_rows > 0 ? shard.narrow(0, first_row_in_shard(chunk), own_rows) : shard.narrow(0, 0, 0);
    // Nothing is computed before the first chunk has arrived.
    auto [input, work] =
        start_gather_rows(op_, kGatherChunk, rows_of_shard, rows, group_, /*overlaps=*/chunk > 0);
    result.inputs.push_back(std::move(input));
    result.works.push_back(std::move(work));
  }
  return result;
}

at::Tensor ChunkedSequence::output_buffer(std::int64_t chunk) const {
  return at::empty(with_rows(sum_, max_rows_per_rank(chunk) * group_->getSize()), sum_.options());
}

void ChunkedSequence::run(const std::function<void(const ChunkRows&)>& step) {
  const auto num_ranks = group_->getSize();
  PendingCollective scattering;
  auto next = start_gather(0);
  for (std::int64_t chunk = 0; chunk < num_chunks(); ++chunk) {
    auto current = std::move(next);
    next = chunk + 1 < num_chunks() ? start_gather(chunk + 1) : GatheredChunk();
    for (auto& work : current.works) {
      work.wait();
    }
    const auto rows = max_rows_per_rank(chunk);
    const auto output = sum_.defined() ? output_buffer(chunk) : at::Tensor();
    for (int rank = 0, num_merged = 0; rank < num_ranks; rank += num_merged) {
      num_merged = num_merged_ranks(rank, chunk);
      const auto num_rows = rows_on(rank, chunk);
      const auto begin = rank * rows;
      if (output.defined() && num_rows < rows) {
        // These ranks do not fill the chunk: one rank whose shard ends in it, or several ranks
        // without rows.
        output.narrow(0, begin + num_rows, num_merged * rows - num_rows).zero_();
      }
      if (num_rows == 0) {
        continue;
      }
      const auto first_row = max_shard_size_ * rank + first_row_in_shard(chunk);
      ChunkRows merged{num_merged, num_rows, first_row, max_shard_size_, {}, {}};
      for (std::size_t i = 0; i < shards_.size(); ++i) {
        // Read this rank's own rows from its shard and not from the gathered copy, which then takes
        // up no cache.
        merged.gathered.push_back(num_merged == 1 && rank == group_->getRank()
                                      ? shards_[i].narrow(0, first_row_in_shard(chunk), num_rows)
                                      : current.inputs[i].narrow(0, begin, num_merged * num_rows));
      }
      if (output.defined()) {
        merged.output = output.narrow(0, begin, num_merged * num_rows);
      }
      step(merged);
    }
    if (output.defined()) {
      scattering.wait();
      const auto sum = sum_.narrow(0, first_row_in_shard(chunk), rows);
      const bool is_last = chunk + 1 == num_chunks();
      scattering =
          start_scatter_rows(op_, kScatterChunk, output, sum, group_, /*overlaps=*/!is_last);
    }
  }
  scattering.wait();
}

at::Tensor ChunkedSequence::take_output() {
  const auto own_rows = shard_size(dim_size_, rank_in(group_)).expect_int();
  return std::exchange(sum_, {}).narrow(0, 0, own_rows);
}

}  // namespace weft::ops
