#pragma once

// How the operators on a cut sequence communicate: whole (one collective, then one product) or in
// pieces, of which the next travels while one is multiplied. Both give the same up to rounding.
//
// "auto" measures: the first calls of an operator on a kind of shape take turns, and the ranks of
// the group then agree on what was faster; whole where pieces gain less than 5 % on the rank and
// for the weight where they gain least. A table of earlier choices spares the measuring. Times on
// CUDA are the device's, read when the ranks agree, which waits for it; nothing is measured while a
// stream is captured. Under deterministic algorithms "auto" takes pieces where a table says so, and
// whole elsewhere.

#include <weft/ops/export.h>

#include <cstdint>
#include <string>
#include <vector>

namespace weft::ops {

// A choice for all shapes that round up to the same powers of two.
struct OverlapEntry {
  std::string op;      // "weft::all_gather_linear"
  std::string dtype;   // "float32"
  std::string device;  // "cpu"
  std::int64_t num_ranks = 0;
  std::int64_t num_rows = 0;   // of the whole sequence
  std::int64_t row_bytes = 0;  // of the widest tensor that travels
  bool in_pieces = false;
  double ratio = 0;  // time in pieces over whole where it was largest; 0 where nothing was compared
};

// "auto", "always" (pieces wherever a part has two rows) or "never", which must be the same on all
// ranks; at first what the environment has as WEFT_OVERLAP, or "auto".
// Errors: ValueError for anything else.
WEFT_OPS_API void set_overlap(const std::string& mode);
WEFT_OPS_API std::string overlap();

// What was measured on this rank's groups so far, and what was given.
WEFT_OPS_API std::vector<OverlapEntry> overlap_table();
// Forgets what was measured, and takes these choices; the same on all ranks.
WEFT_OPS_API void set_overlap_table(std::vector<OverlapEntry> entries);

}  // namespace weft::ops
