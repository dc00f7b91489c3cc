#pragma once

// Which way a call on a cut sequence goes: see <weft/ops/overlap.h>.

#include "group.h"
#include "stopwatch.h"

#include <weft/ops/overlap.h>

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

namespace weft::ops {

// What travels in a call.
struct Travel {
  std::int64_t num_rows;    // of the whole sequence
  std::int64_t row_bytes;   // of one of them, in the widest tensor that travels
  std::int64_t row_tokens;  // products are of this many tokens for each row
  // What else the time depends on and may differ between ranks: features of this rank's weight.
  std::int64_t own_features;
};

// What travels where the dim `dim` of x, `size` long on all ranks together, does, with `features`
// for a token; x's own where they are not told.
Travel travel_of(const at::Tensor& x,
                 std::int64_t dim,
                 std::int64_t size,
                 std::int64_t own_features,
                 std::optional<std::int64_t> features = std::nullopt);

// Chooses when it is made, which may communicate; done() ends the measurement, if this call is one.
// All ranks of the group make the same ones in the same order.
class OverlapChoice {
 public:
  // REQUIRES: a group; a sequence with rows of some bytes.
  OverlapChoice(std::string_view op,
                const at::Tensor& like,
                const Travel& travel,
                const ProcessGroupPtr& group);

  bool in_pieces() const { return rows_per_piece_ > 0; }
  std::int64_t rows_per_piece() const { return rows_per_piece_; }
  void done();

 private:
  std::int64_t rows_per_piece_ = 0;
  std::unique_ptr<Stopwatch> watch_;  // null where nothing is measured
  std::function<void(std::unique_ptr<Stopwatch>)> record_;
};

}  // namespace weft::ops
