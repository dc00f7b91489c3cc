#pragma once

// How the operators of sequence parallelism communicate: unchunked (one collective per tensor) or
// chunked (the next chunk is communicated while the current one is multiplied). Both give the same
// result up to rounding.
//
// "auto" measures: for each kind of shape (see OverlapEntry), the first calls of an operator come
// in pairs of one chunked and one unchunked call, in random order, and the ranks of the group then
// agree on the faster variant. Chunking is chosen only if it gains at least 5 % on every rank and
// for every size of this rank's weight that was measured. A table set by set_overlap_table()
// replaces the measurement. On CUDA, events measure the time; reading them when the ranks agree
// synchronizes with the device. Nothing is measured during stream capture. Under deterministic
// algorithms, "auto" uses chunks only where a table set by set_overlap_table() says so.

#include <weft/ops/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

// One choice. A row is one position of the sequence, with all batch entries. num_rows and row_bytes
// are powers of two: the entry applies to all shapes that round up to them.
struct OverlapEntry {
  std::string op;      // "weft::all_gather_linear"
  std::string dtype;   // "float32"
  std::string device;  // "cpu"
  std::int64_t num_ranks = 0;
  std::int64_t num_rows = 0;   // of the full sequence
  std::int64_t row_bytes = 0;  // of a row of the widest tensor that is communicated
  bool in_pieces = false;      // whether to communicate in chunks
  double ratio = 0;  // largest ratio of chunked to unchunked time; 0 without a measurement
};

// Sets the mode, which must be equal on all ranks: "auto", "always" (chunks wherever the largest
// shard has at least two rows) or "never". The initial mode is the environment variable
// WEFT_OVERLAP, or "auto". Errors: ValueError for anything else.
WEFT_OPS_API void set_overlap(const std::string& mode);
WEFT_OPS_API std::string overlap();

// Returns the choices that were measured on this rank's groups and those that were set.
WEFT_OPS_API std::vector<OverlapEntry> overlap_table();
// Replaces all choices by `entries`, which must be equal on all ranks.
WEFT_OPS_API void set_overlap_table(std::vector<OverlapEntry> entries);

}  // namespace weft::ops
