#include "signature.h"

#include <algorithm>
#include <map>
#include <sstream>

namespace weft::collectives {

namespace {

constexpr size_t kMaxListed = 16;  // ranks or counts in an error message

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

bool same_shape(const SignatureHead& a, const SignatureHead& b) {
  return a.num_elements == b.num_elements && a.num_dims == b.num_dims && a.shape == b.shape;
}

bool same_call(const SignatureHead& a, const SignatureHead& b) {
  return a.op == b.op && a.reduce_op == b.reduce_op && a.root == b.root &&
         a.position == b.position && a.num_coalesced == b.num_coalesced &&
         (a.dtype == b.dtype || a.op == Op::kBarrier);
}

// Whether rank `from` sends to rank `to` as many elements as `to` expects.
bool counts_match(const std::vector<Signature>& by_rank, size_t from, size_t to) {
  return by_rank[from].send_counts[to] == by_rank[to].receive_counts[from];
}

bool calls_match(const std::vector<Signature>& by_rank) {
  const SignatureHead& first = by_rank.front().head;
  const size_t num_ranks = by_rank.size();
  for (const Signature& other : by_rank) {
    if (!same_call(first, other.head)) return false;
  }
  const auto root = static_cast<size_t>(std::max(first.root, 0));
  for (size_t rank = 0; rank < num_ranks; ++rank) {
    const Signature& mine = by_rank[rank];
    switch (first.op) {
      case Op::kAllReduce:
      case Op::kReduce:
      case Op::kBroadcast:
        if (!same_shape(first, mine.head)) return false;
        break;
      case Op::kReduceScatter:
        if (!std::ranges::equal(mine.send_counts, by_rank.front().send_counts)) return false;
        if (mine.receive_counts[rank] != mine.send_counts[rank]) return false;
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
  const SignatureHead& head = signature.head;
  std::ostringstream text;
  text << name_of(head.op) << '(';
  const char* separator = "";
  const auto field = [&](const char* label) -> std::ostream& {
    text << separator << label;
    separator = ", ";
    return text;
  };
  if (head.reduce_op != ReduceOp::kNone) field("") << name_of(head.reduce_op);
  if (head.op != Op::kBarrier) {
    field("") << name_of(head.dtype) << ' ';
    if (head.num_dims > SignatureHead::kMaxDims) {
      print_list(text, std::span(head.shape).first(SignatureHead::kMaxDims - 1));
      text << " and " << head.num_dims - SignatureHead::kMaxDims + 1 << " dims more, "
           << head.num_elements << " elements";
    } else if (head.num_dims > 0) {
      print_list(text, std::span(head.shape).first(head.num_dims));
    } else {
      text << head.num_elements << (head.num_elements == 1 ? " element" : " elements");
    }
  }
  if (head.root >= 0) field("root ") << head.root;
  if (!signature.send_counts.empty()) {
    field("gives ");
    print_list(text, signature.send_counts);
  }
  if (!signature.receive_counts.empty()) {
    field("expects ");
    print_list(text, signature.receive_counts);
  }
  if (head.num_coalesced > 1) {
    field("tensor ") << head.position + 1 << " of " << head.num_coalesced;
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
    text << (ranks.size() > kMaxListed ? ", ..." : "") << " brought " << calls[i];
  }
  if (calls.size() > kMaxListed) text << "; ...";
  return text.str();
}

}  // namespace weft::collectives
