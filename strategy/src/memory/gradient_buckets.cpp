#include "gradient_buckets.h"

#include <algorithm>

namespace weft::strategy::detail {

namespace {

// Those of weft.strategy.data_parallel.reducer.
constexpr int64_t kBucketBytes = int64_t{25} << 20;
constexpr std::size_t kMaxInFlight = 2;

}  // namespace

GradientBuckets::GradientBuckets(Timeline& timeline, const std::vector<int64_t>& num_bytes)
    : timeline_(timeline), bucket_of_(num_bytes.size()) {
  for (std::size_t i = num_bytes.size(); i-- > 0;) {
    if (buckets_.empty() || buckets_.back().num_bytes + num_bytes[i] > kBucketBytes) {
      buckets_.emplace_back();
    }
    Bucket& bucket = buckets_.back();
    bucket.num_bytes += num_bytes[i];
    ++bucket.num_parameters;
    bucket_of_[i] = buckets_.size() - 1;
  }
  for (Bucket& bucket : buckets_) {
    bucket.num_pending = bucket.num_parameters;
  }
}

void GradientBuckets::complete(std::size_t parameter) {
  --buckets_[bucket_of_[parameter]].num_pending;
  while (next_ < buckets_.size() && buckets_[next_].num_pending == 0) {
    copy_next();
    while (in_flight_.size() > kMaxInFlight) {
      in_flight_.pop_front();
    }
  }
}

void GradientBuckets::finish() {
  while (next_ < buckets_.size()) {
    copy_next();
  }
  in_flight_.clear();
}

int64_t GradientBuckets::largest_bytes() const {
  int64_t most = 0;
  for (const Bucket& bucket : buckets_) {
    most = std::max(most, bucket.num_bytes);
  }
  return most;
}

void GradientBuckets::copy_next() {
  const Bucket& bucket = buckets_[next_++];
  const bool is_copied = bucket.num_parameters > 1;
  in_flight_.push_back(timeline_.hold(MemoryCategory::kScratch, is_copied ? bucket.num_bytes : 0));
}

}  // namespace weft::strategy::detail
