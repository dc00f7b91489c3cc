#include "signature.h"

#include <algorithm>
#include <map>
#include <sstream>

namespace weft::collectives {

namespace {

constexpr size_t kMaxListed = 16;  // calls, ranks or counts in an error message

template <typename List>
void print_list(std::ostream& out, const List& list) {
  out << '[';
  for (size_t i = 0; i < list.size(); ++i) {
    if (i == kMaxListed) {
      out << ", ...";
      break;
    }
    out << (i == 0 ? "" : ", ") << list[i];
  }
  out << ']';
}

bool same_dims(const SignatureHeader& a, const SignatureHeader& b) {
  return a.num_dims == b.num_dims && a.shape == b.shape;
}

bool same_shape(const SignatureHeader& a, const SignatureHeader& b) {
  return a.num_elements == b.num_elements && same_dims(a, b);
}

// Compares the operations and their arguments, except for sizes.
bool same_op(const SignatureHeader& a, const SignatureHeader& b) {
  return a.op == b.op && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.position == b.position && a.num_coalesced == b.num_coalesced &&
         (a.dtype == b.dtype || a.op == Op::kBarrier);
}

// Whether rank `to` receives from rank `from` as many elements as `from` sends to `to`.
bool counts_match(const std::vector<Signature>& by_rank, size_t from, size_t to) {
  return by_rank[from].send_counts[to] == by_rank[to].receive_counts[from];
}

bool calls_match(const std::vector<Signature>& by_rank) {
  const SignatureHeader& first = by_rank.front().header;
  const size_t num_ranks = by_rank.size();
  for (const Signature& other : by_rank) {
    if (!same_op(first, other.header)) return false;
  }
  const auto root = static_cast<size_t>(std::max(first.root, 0));
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const Signature& signature = by_rank[rank];
    switch (first.op) {
      case Op::kAllReduce:
      case Op::kReduce:
      case Op::kBroadcast:
        if (!same_shape(first, signature.header)) return false;
        break;
      case Op::kSparseAllReduce:
        if (!same_dims(first, signature.header)) return false;
        if (first.num_sparse_dims != signature.header.num_sparse_dims) return false;
        break;
      case Op::kReduceScatter:
        if (!std::ranges::equal(signature.send_counts, by_rank.front().send_counts)) return false;
        if (signature.receive_counts[rank] != signature.send_counts[rank]) return false;
        break;
      case Op::kGather:
        if (!counts_match(by_rank, rank, root)) return false;
        break;
      case Op::kScatter:
        if (!counts_match(by_rank, root, rank)) return false;
        break;
      case Op::kAllGather:
      case Op::kAllToAll:
        for (size_t peer = 0; peer < num_ranks; ++peer) {
          if (!counts_match(by_rank, rank, peer)) return false;
        }
        break;
      case Op::kBarrier:
        break;
    }
  }
  return true;
}

}  // namespace

bool has_counts(Op op) {
  return op == Op::kReduceScatter || op == Op::kAllGather || op == Op::kGather ||
         op == Op::kScatter || op == Op::kAllToAll;
}

std::string describe(const Signature& signature) {
  const SignatureHeader& header = signature.header;
  std::ostringstream text;
  text << name_of(header.op) << '(';
  const char* separator = "";
  const auto field = [&](const char* label) -> std::ostream& {
    text << separator << label;
    separator = ", ";
    return text;
  };
  if (header.reduce_op != ReduceOp::kNone) field("") << name_of(header.reduce_op);
  if (header.op != Op::kBarrier) {
    field("") << name_of(header.dtype) << ' ';
    if (header.num_dims > SignatureHeader::kMaxDims) {
      print_list(text, std::span(header.shape).first(SignatureHeader::kMaxDims - 1));
      text << " and " << header.num_dims - SignatureHeader::kMaxDims + 1 << " more dims, "
           << header.num_elements << " elements";
    } else if (header.num_dims > 0) {
      print_list(text, std::span(header.shape).first(header.num_dims));
    } else {
      text << header.num_elements << (header.num_elements == 1 ? " element" : " elements");
    }
  }
  if (header.op == Op::kSparseAllReduce) {
    field("") << header.num_sparse_dims << " sparse dim"
              << (header.num_sparse_dims == 1 ? "" : "s");
  }
  if (header.root >= 0) field("root ") << header.root;
  if (!signature.send_counts.empty()) {
    field("sends ");
    print_list(text, signature.send_counts);
  }
  if (!signature.receive_counts.empty()) {
    field("receives ");
    print_list(text, signature.receive_counts);
  }
  if (header.num_coalesced > 1) {
    field("tensor ") << header.position + 1 << " of " << header.num_coalesced;
  }
  text << ')';
  return text.str();
}

std::optional<std::string> mismatch(const std::vector<Signature>& by_rank) {
  if (calls_match(by_rank)) return std::nullopt;
  // Ranks with the same call are listed together.
  std::vector<std::string> calls;
  std::map<std::string, std::vector<size_t>> ranks_of;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    std::string call = describe(by_rank[rank]);
    if (!ranks_of.contains(call)) calls.push_back(call);
    ranks_of[call].push_back(rank);
  }
  std::ostringstream text;
  for (size_t i = 0; i < std::min(calls.size(), kMaxListed); ++i) {
    const auto& ranks = ranks_of[calls[i]];
    text << (i == 0 ? "" : "; ") << (ranks.size() == 1 ? "rank " : "ranks ");
    for (size_t k = 0; k < std::min(ranks.size(), kMaxListed); ++k) {
      text << (k == 0 ? "" : ", ") << ranks[k];
    }
    text << (ranks.size() > kMaxListed ? ", ..." : "") << " called " << calls[i];
  }
  if (calls.size() > kMaxListed) text << "; ...";
  return text.str();
}

std::vector<int64_t> num_elements_of(const std::vector<Signature>& by_rank) {
  std::vector<int64_t> num_elements;
  num_elements.reserve(by_rank.size());
  for (const Signature& each : by_rank) num_elements.push_back(each.header.num_elements);
  return num_elements;
}

}  // namespace weft::collectives
