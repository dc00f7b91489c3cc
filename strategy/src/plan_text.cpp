// The text forms of a plan. The YAML written and read here is a small subset: one rule per line,
// plain scalars that YAML reads as strings, and double-quoted ones.

#include "text.h"
#include "weft/strategy/plan.h"

#include <algorithm>
#include <array>
#include <set>
#include <stdexcept>
#include <utility>

namespace weft::strategy {

namespace {

using detail::quote;

constexpr std::string_view kEmptyPlan = "{}";

bool is_alpha(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

bool is_plain_char(char c) {
  return is_alpha(c) || (c >= '0' && c <= '9') || c == '.' || c == '*' || c == '-';
}

// Returns whether YAML reads the unquoted word as a string, not as an alias, a number, a boolean or
// the like. edit_distance ignores case, as YAML does for these words.
bool is_plain(std::string_view text) {
  constexpr std::array<std::string_view, 9> kOtherTypes = {
      "null", "true", "false", "yes", "no", "on", "off", "y", "n"};
  return !text.empty() && is_alpha(text.front()) &&
         std::all_of(text.begin(), text.end(), is_plain_char) &&
         std::none_of(kOtherTypes.begin(), kOtherTypes.end(), [&](std::string_view word) {
           return detail::edit_distance(text, word) == 0;
         });
}

// Returns a double-quoted string, as in YAML and JSON. `text` has no control characters: see
// check_pattern.
std::string double_quote(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += c;
  }
  return result + '"';
}

std::string to_scalar(std::string_view text) {
  return is_plain(text) ? std::string(text) : double_quote(text);
}

// Reads one line from left to right.
class LineParser {
 public:
  LineParser(std::string_view line, size_t number) : line_(line), number_(number) {}

  Rule parse() {
    Rule rule;
    rule.pattern = scalar("a pattern");
    expect_colon();
    if (next() == '{') {
      parse_mapping(rule);
    } else {
      rule.style = style();
    }
    const size_t end = position_;
    if (const char c = next(); c != '\0' && (c != '#' || position_ == end)) {
      throw_invalid("text after the rule");
    }
    return rule;
  }

 private:
  // Parses {style: S, heads: H, recompute: B, offload: B, precision: P}, in any order; all keys but
  // the style are optional.
  void parse_mapping(Rule& rule) {
    expect('{');
    std::set<std::string> keys;
    for (bool is_last = false; !is_last;) {
      const std::string key = scalar("a key");
      expect_colon();
      if (!keys.insert(key).second || !parse_value(rule, key)) {
        throw_invalid("key " + quote(key) + " is unknown or repeated");
      }
      is_last = next() != ',';
      expect(is_last ? '}' : ',');
    }
    if (!keys.contains("style")) {
      throw_invalid("no style");
    }
  }

  // Returns false for an unknown key.
  bool parse_value(Rule& rule, std::string_view key) {
    if (key == "style") {
      rule.style = style();
    } else if (key == "heads") {
      rule.heads = scalar("an attribute name");
    } else if (key == "recompute") {
      rule.recompute = boolean();
    } else if (key == "offload") {
      rule.offload = boolean();
    } else if (key == "precision") {
      rule.precision = parse_named("a precision", parse_compute_dtype);
    } else {
      return false;
    }
    return true;
  }

  // Returns the next character that is not blank, '\0' at the end of the line.
  char next() {
    while (position_ < line_.size() && (line_[position_] == ' ' || line_[position_] == '\t')) {
      ++position_;
    }
    return position_ < line_.size() ? line_[position_] : '\0';
  }

  void expect(char c) {
    if (next() != c) {
      throw_invalid(std::string("no '") + c + "' at column " + std::to_string(position_ + 1));
    }
    ++position_;
  }

  // Requires a blank after the colon, because YAML reads "a:row" as a single word.
  void expect_colon() {
    expect(':');
    if (const size_t end = position_; next() != '\0' && position_ == end) {
      throw_invalid("no blank after ':' at column " + std::to_string(position_));
    }
  }

  std::string scalar(std::string_view what) {
    if (next() == '"') {
      return quoted_scalar();
    }
    const size_t end = std::min(line_.find_first_of(" \t:,{}", position_), line_.size());
    const std::string_view word = line_.substr(position_, end - position_);
    if (!is_plain(word)) {
      throw_invalid(word.empty() ? "no " + std::string(what.substr(what.find(' ') + 1)) +
                                       " at column " + std::to_string(position_ + 1)
                                 : quote(word) + " needs double quotes");
    }
    position_ = end;
    return std::string(word);
  }

  std::string quoted_scalar() {
    std::string result;
    for (++position_; position_ < line_.size(); ++position_) {
      char c = line_[position_];
      if (c == '"') {
        ++position_;
        return result;
      }
      if (c == '\\') {
        c = position_ + 1 < line_.size() ? line_[++position_] : '\0';
        if (c != '"' && c != '\\') {
          throw_invalid(R"(an escape other than \" and \\)");
        }
      }
      result += c;
    }
    throw_invalid("a quote that does not end");
  }

  bool boolean() {
    next();
    const size_t end = std::min(line_.find_first_of(" \t,}", position_), line_.size());
    const std::string_view word = line_.substr(position_, end - position_);
    if (word != "true" && word != "false") {
      throw_invalid(quote(word) + " is neither true nor false");
    }
    position_ = end;
    return word == "true";
  }

  Style style() { return parse_named("a style", parse_style); }

  template <typename Parse>
  auto parse_named(std::string_view what, Parse read) -> decltype(read(std::string_view())) {
    const std::string word = scalar(what);
    try {
      return read(word);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument("plan, line " + std::to_string(number_) + ": " + error.what());
    }
  }

  [[noreturn]] void throw_invalid(const std::string& problem) const {
    throw std::invalid_argument("plan, line " + std::to_string(number_) + ": " + problem + " in " +
                                quote(line_) +
                                "; write 'pattern: style' or "
                                "'pattern: {style: column, heads: n_heads}'");
  }

  std::string_view line_;
  size_t number_;  // counted from 1
  size_t position_ = 0;
};

}  // namespace

Plan Plan::parse(std::string_view text) {
  if (detail::trim(text) == kEmptyPlan) {
    return {};
  }
  std::vector<Rule> rules;
  size_t number = 0;
  for (const std::string_view line : detail::split(text, '\n')) {
    ++number;
    const std::string_view content = detail::trim(line);
    if (content.empty() || content.front() == '#') {
      continue;
    }
    if (line.front() != content.front()) {
      throw std::invalid_argument("plan, line " + std::to_string(number) + ": " + quote(content) +
                                  " is indented; write every rule on one line, without blanks "
                                  "before it");
    }
    rules.push_back(LineParser(content, number).parse());
  }
  return Plan(std::move(rules));
}

std::string Plan::to_string() const {
  if (rules_.empty()) {
    return std::string(kEmptyPlan);
  }
  std::string text;
  for (const Rule& rule : rules_) {
    const std::string style(strategy::to_string(rule.style));
    text += to_scalar(rule.pattern) + ": ";
    std::string options;
    if (rule.heads) options.append(", heads: ").append(to_scalar(*rule.heads));
    if (rule.recompute) options += ", recompute: true";
    if (rule.offload) options += ", offload: true";
    if (rule.precision) {
      options.append(", precision: ").append(strategy::to_string(*rule.precision));
    }
    if (options.empty()) {
      text.append(style).append("\n");
    } else {
      text.append("{style: ").append(style).append(options).append("}\n");
    }
  }
  return text;
}

std::string Plan::to_json() const {
  std::vector<std::string> members;
  for (const Rule& rule : rules_) {
    const std::string style = double_quote(strategy::to_string(rule.style));
    std::string options;
    if (rule.heads) options.append(",\"heads\":").append(double_quote(*rule.heads));
    if (rule.recompute) options += ",\"recompute\":true";
    if (rule.offload) options += ",\"offload\":true";
    if (rule.precision) {
      options.append(",\"precision\":").append(double_quote(strategy::to_string(*rule.precision)));
    }
    std::string member = double_quote(rule.pattern) + ":";
    if (options.empty()) {
      member += style;
    } else {
      member.append("{\"style\":").append(style).append(options).append("}");
    }
    members.push_back(std::move(member));
  }
  return "{" + detail::join(members, ",") + "}";
}

}  // namespace weft::strategy
