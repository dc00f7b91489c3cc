#pragma once

#include "timeline.h"

#include <cstdint>
#include <deque>
#include <vector>

namespace weft::strategy::detail {

// Simulates the memory in which replicas average gradients: copies in buckets of at most 25 MiB and
// of one dtype, in the reverse order of the parameters (see GradientReducer in
// weft.strategy.data_parallel). A gradient that is alone in its bucket is not copied.
class GradientBuckets {
 public:
  struct Gradient {
    int64_t num_bytes = 0;
    int64_t element_bytes = 4;
  };
  // `gradients`: of the parameters in the order of the model.
  GradientBuckets(Timeline& timeline, const std::vector<Gradient>& gradients);

  // A gradient is complete. Buckets are copied in order, and a bucket is freed when the second
  // after it has been copied.
  void complete(std::size_t parameter);
  // Copies and frees all other buckets.
  void finish();
  [[nodiscard]] int64_t largest_bytes() const;

 private:
  struct Bucket {
    int64_t num_bytes = 0;
    std::size_t num_parameters = 0;
    std::size_t num_pending = 0;
  };

  void copy_next();

  Timeline& timeline_;
  std::vector<Bucket> buckets_;
  std::vector<std::size_t> bucket_of_;  // by parameter
  std::size_t next_ = 0;
  std::deque<Buffer> in_flight_;
};

}  // namespace weft::strategy::detail
