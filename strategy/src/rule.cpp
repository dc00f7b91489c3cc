#include "weft/strategy/rule.h"

#include "hash.h"
#include "text.h"
#include "weft/strategy/pattern.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <vector>

namespace weft::strategy {

namespace {

using detail::quote;

// Indexed by the enumerator.
constexpr std::array<std::string_view, 3> kDtypeNames = {"float32", "bfloat16", "float16"};

// Returns whether `text` is a Python attribute name; any non-ASCII character counts as a letter.
bool is_attribute_name(std::string_view text) {
  const auto is_letter = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' ||
           static_cast<unsigned char>(c) >= 0x80;
  };
  return !text.empty() && is_letter(text.front()) &&
         std::all_of(text.begin(), text.end(), [&](char c) {
           return is_letter(c) || (c >= '0' && c <= '9');
         });
}

[[noreturn]] void throw_unsupported_option(const Rule& rule,
                                           const std::string& option,
                                           const char* remedy) {
  const std::string name = option.substr(0, option.find(' '));
  throw std::invalid_argument("plan: pattern " + quote(rule.pattern) + ": " + option +
                              " is not supported by style " + quote(to_string(rule.style)) +
                              "; remove " + name + " or use " + remedy);
}

void check_heads(const Rule& rule) {
  if (!rule.heads) {
    return;
  }
  if (rule.style != Style::kColumn && rule.style != Style::kRow) {
    throw_unsupported_option(rule, "heads = " + quote(*rule.heads), "style 'column' or 'row'");
  }
  if (!is_attribute_name(*rule.heads)) {
    throw std::invalid_argument("plan: pattern " + quote(rule.pattern) +
                                ": heads = " + quote(*rule.heads) +
                                " is no attribute name; name the parent module's attribute that "
                                "counts the heads, such as 'n_heads'");
  }
}

// Styles of single layers do not support recompute: a layer saves only its input anyway.
bool may_recompute(Style style) {
  switch (style) {
    case Style::kColumnRowMlp:
    case Style::kAttention:
    case Style::kExperts:
    case Style::kSequenceParallel:
    case Style::kReplicate:
    case Style::kReplicateSumGradients:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string_view to_string(ComputeDtype dtype) {
  return kDtypeNames.at(static_cast<size_t>(dtype));
}

ComputeDtype parse_compute_dtype(std::string_view text) {
  const auto found = std::find(kDtypeNames.begin(), kDtypeNames.end(), text);
  if (found == kDtypeNames.end()) {
    const std::vector<std::string> names(kDtypeNames.begin(), kDtypeNames.end());
    throw std::invalid_argument("unknown precision " + quote(text) + ": use one of " +
                                detail::join(names, ", "));
  }
  return static_cast<ComputeDtype>(found - kDtypeNames.begin());
}

bool has_options(const Rule& rule) {
  return rule.heads || rule.recompute || rule.offload || rule.precision;
}

std::string describe(const Rule& rule) {
  std::vector<std::string> options;
  if (rule.heads) {
    options.push_back("heads " + quote(*rule.heads));
  }
  if (rule.recompute) {
    options.emplace_back("recompute");
  }
  if (rule.offload) {
    options.emplace_back("offload");
  }
  if (rule.precision) {
    options.push_back("precision " + quote(to_string(*rule.precision)));
  }
  const std::string style = "style " + quote(to_string(rule.style));
  return options.empty() ? style : style + " with " + detail::join(options, ", ");
}

void check_rule(const Rule& rule) {
  check_pattern(rule.pattern);
  check_heads(rule);
  if (rule.recompute && !may_recompute(rule.style)) {
    throw_unsupported_option(rule, "recompute", "style 'column_row_mlp'");
  }
  const bool takes_no_options = rule.style == Style::kVocabHead || rule.style == Style::kIgnore;
  if (rule.offload && takes_no_options) {
    throw_unsupported_option(rule, "offload", "another style");
  }
  if (rule.precision && takes_no_options) {
    throw_unsupported_option(
        rule, "precision = " + quote(to_string(*rule.precision)), "another style");
  }
}

}  // namespace weft::strategy

size_t std::hash<weft::strategy::Rule>::operator()(
    const weft::strategy::Rule& rule) const noexcept {
  size_t seed = 0;
  weft::strategy::detail::hash_combine(seed, rule.pattern);
  weft::strategy::detail::hash_combine(seed, static_cast<int>(rule.style));
  weft::strategy::detail::hash_combine(seed, rule.heads);
  weft::strategy::detail::hash_combine(seed, rule.recompute);
  weft::strategy::detail::hash_combine(seed, rule.offload);
  weft::strategy::detail::hash_combine(seed,
                                       rule.precision ? static_cast<int>(*rule.precision) : -1);
  return seed;
}
