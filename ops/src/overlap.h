#pragma once

// The choice between chunked and unchunked communication of one call: see <weft/ops/overlap.h>.

#include "group.h"
#include "stopwatch.h"

#include <weft/ops/overlap.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace weft::ops {

// The communication of one call.
struct Communication {
  std::int64_t num_rows;    // of the full sequence
  std::int64_t row_bytes;   // of one row, in the widest tensor that is communicated
  std::int64_t row_tokens;  // tokens per row in the matrix products
  // Features of this rank's weight. The time depends on them, and they may differ between ranks.
  std::int64_t own_features;
};

// Describes the communication of x's dim `dim`, of full size `size`, with `features` per token
// (default: those of x).
Communication communication_of(const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t size,
                               std::int64_t own_features,
                               std::optional<std::int64_t> features = std::nullopt);

// The constructor chooses, and may communicate to do so; done() ends the measurement if this call
// is timed. All ranks of the group construct the same choices in the same order.
class OverlapChoice {
 public:
  // REQUIRES: a group.
  OverlapChoice(std::string_view op,
                const at::Tensor& like,
                const Communication& communication,
                const ProcessGroupPtr& group);

  bool is_chunked() const { return rows_per_chunk_ > 0; }
  std::int64_t rows_per_chunk() const { return rows_per_chunk_; }
  void done();

 private:
  std::int64_t rows_per_chunk_ = 0;
  std::unique_ptr<Stopwatch> watch_;  // null where nothing is measured
  std::function<void(std::unique_ptr<Stopwatch>)> record_;
};

}  // namespace weft::ops
