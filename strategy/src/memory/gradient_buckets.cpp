#include "gradient_buckets.h"

#include <algorithm>
#include <map>

namespace weft::strategy::detail {

namespace {

// Those of weft.strategy.data_parallel.reducer.
constexpr int64_t kBucketBytes = int64_t{25} << 20;
constexpr std::size_t kMaxInFlight = 2;

}  // namespace

GradientBuckets::GradientBuckets(Timeline& timeline, const std::vector<Gradient>& gradients)
    : timeline_(timeline), bucket_of_(gradients.size()) {
  std::map<int64_t, std::size_t> open;  // by the bytes of an element
  for (std::size_t i = gradients.size(); i-- > 0;) {
    const auto [num_bytes, element_bytes] = gradients[i];
    const auto found = open.find(element_bytes);
    if (found == open.end() || buckets_[found->second].num_bytes + num_bytes > kBucketBytes) {
      open[element_bytes] = buckets_.size();
      buckets_.emplace_back();
    }
    bucket_of_[i] = open.at(element_bytes);
    Bucket& bucket = buckets_[bucket_of_[i]];
    bucket.num_bytes += num_bytes;
    ++bucket.num_parameters;
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
