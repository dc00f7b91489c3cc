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

// The communication of one call. A row is one entry of the sharded dim, usually a position in the
// sequence, with the tokens of all batch entries.
struct Communication {
  std::int64_t num_rows;    // of the full sequence
  std::int64_t row_bytes;   // of one row, in the widest tensor that is communicated
  std::int64_t row_tokens;  // tokens in one row
  // The size of the sharded dim of this rank's weight. The time depends on this size, which may
  // differ between ranks.
  std::int64_t own_features;
};

// Describes the communication of a call whose sharded dim is `dim` of x, of full size `size`. The
// widest tensor that is communicated has `features` per token (default: those of x).
Communication communication_of(const at::Tensor& x,
                               std::int64_t dim,
                               std::int64_t size,
                               std::int64_t own_features,
                               std::optional<std::int64_t> features = std::nullopt);

// The constructor chooses, and may communicate to do so; end_timing() ends the measurement if this
// call is timed. All ranks of the group must construct an OverlapChoice for the same calls in the
// same order.
class OverlapChoice {
 public:
  // `like` has the dtype and device of the call. REQUIRES: group is not null.
  OverlapChoice(std::string_view op,
                const at::Tensor& like,
                const Communication& communication,
                const ProcessGroupPtr& group);

  bool is_chunked() const { return rows_per_chunk_ > 0; }
  // The rows of each rank's shard per chunk; 0 for unchunked communication.
  std::int64_t rows_per_chunk() const { return rows_per_chunk_; }
  void end_timing();

 private:
  std::int64_t rows_per_chunk_ = 0;
  std::unique_ptr<Stopwatch> watch_;  // null where nothing is measured
  std::function<void(std::unique_ptr<Stopwatch>)> record_;
};

}  // namespace weft::ops
