#pragma once

#include "weft/strategy/pattern.h"
#include "weft/strategy/style.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft::strategy {

// Modules whose names match `pattern` get `style`. `heads`, for kColumn and kRow only, names the
// attribute of the parent module that counts the heads in the layer's output (kRow: input).
// `recompute`, for kColumnRowMlp only: the forward keeps the input alone, and the backward computes
// the hidden values again.
struct Rule {
  std::string pattern;
  Style style = Style::kReplicate;
  std::optional<std::string> heads = {};
  bool recompute = false;

  bool operator==(const Rule&) const = default;
};

// One module of a model and the rule it got.
struct Assignment {
  std::string module;
  Rule rule;

  bool operator==(const Assignment&) const = default;
};

// Rules from name patterns to styles, in the order they were given. An immutable value: comparable
// (the order counts), hashable, safe to read from any thread.
class Plan {
 public:
  Plan() = default;

  // A rule that repeats an earlier one exactly is kept once. Throws std::invalid_argument for a
  // malformed pattern (see check_pattern), for `heads` that is no attribute name, for `heads` and
  // `recompute` with a style that they are not for, and for one pattern with two different values.
  explicit Plan(std::vector<Rule> rules);

  // Reads what to_string() prints: one rule a line, `pattern: style` or
  // `pattern: {style: column, heads: n_heads}` or `pattern: {style: column_row_mlp, recompute:
  // true}`; empty lines and # comments are allowed. What it reads is YAML, but YAML's other ways of
  // writing the same thing are refused, naming the line.
  static Plan parse(std::string_view text);

  // Also a YAML mapping; patterns that YAML would not read as a string are in double quotes. A plan
  // without rules prints as "{}".
  [[nodiscard]] std::string to_string() const;

  // A JSON object without blanks: {"layers.*.wq":"column","wo":{"style":"row","heads":"n_heads"}}.
  [[nodiscard]] std::string to_json() const;

  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }

  // Which rule each module gets: those that got one, in the order of `module_names`, where "" is
  // the model itself.
  //
  // Rules that give one module the same style count as one: the first that names `heads` or
  // `recompute`, else the first. No pattern wins over another by being more specific. A
  // module whose style owns everything below it (see owns_modules_below) has modules below with the
  // same style left out of the result.
  //
  // Throws std::invalid_argument, naming those involved, for a pattern that matches no module and
  // for rules that disagree: on the style or `heads` of one module, or with the owner above it.
  [[nodiscard]] std::vector<Assignment> resolve(std::span<const std::string> module_names) const;

  bool operator==(const Plan&) const = default;

 private:
  std::vector<Rule> rules_;
};

}  // namespace weft::strategy

template <>
struct std::hash<weft::strategy::Rule> {
  size_t operator()(const weft::strategy::Rule& rule) const noexcept;
};

template <>
struct std::hash<weft::strategy::Plan> {
  size_t operator()(const weft::strategy::Plan& plan) const noexcept;
};
