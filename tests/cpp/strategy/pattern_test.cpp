#include "weft/strategy/pattern.h"

#include "error_of.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

namespace weft::strategy {
namespace {

TEST(Matches, NamesMatchOnlyThemselves) {
  EXPECT_TRUE(matches("layers.0.wq", "layers.0.wq"));
  EXPECT_FALSE(matches("layers.0.wq", "layers.0.wk"));
  EXPECT_FALSE(matches("layers.0", "layers.0.wq"));
  EXPECT_FALSE(matches("layers.0.wq", "layers.0"));
  EXPECT_FALSE(matches("wq", "layers.0.wq"));
}

TEST(Matches, StarIsExactlyOneLevel) {
  EXPECT_TRUE(matches("layers.*.wq", "layers.12.wq"));
  EXPECT_TRUE(matches("*.*", "layers.0"));
  EXPECT_FALSE(matches("layers.*", "layers.0.wq"));
  EXPECT_FALSE(matches("layers.*.wq", "layers.wq"));
  EXPECT_FALSE(matches("*", "a.b"));
}

TEST(Matches, StarMatchesWithinALevel) {
  EXPECT_TRUE(matches("h*", "h"));
  EXPECT_TRUE(matches("h*", "h12"));
  EXPECT_FALSE(matches("h*", "h.12"));
  EXPECT_TRUE(matches("*_proj", "q_proj"));
  EXPECT_TRUE(matches("l*.w*", "layers.wq"));
  EXPECT_TRUE(matches("a*b*c", "aXbYbZc"));
  EXPECT_FALSE(matches("a*b*c", "aXbYbZ"));
  EXPECT_TRUE(matches("*a*", "bab"));
  EXPECT_FALSE(matches("*a*", "bbb"));
}

TEST(Matches, EverythingButTheStarIsLiteral) {
  EXPECT_FALSE(matches("w[qk]", "wq"));
  EXPECT_TRUE(matches("w[qk]", "w[qk]"));
  EXPECT_FALSE(matches("w?", "wq"));
  EXPECT_FALSE(matches("WQ", "wq"));
}

TEST(Matches, EmptyPatternIsTheModelItself) {
  EXPECT_TRUE(matches("", ""));
  EXPECT_FALSE(matches("", "layers"));
  EXPECT_FALSE(matches("*", ""));
}

// Matches one level by the definition of a glob, in exponential time.
bool slow_matches(std::string_view pattern, std::string_view level) {
  if (pattern.empty()) {
    return level.empty();
  }
  if (pattern.front() == '*') {
    return slow_matches(pattern.substr(1), level) ||
           (!level.empty() && slow_matches(pattern, level.substr(1)));
  }
  return !level.empty() && pattern.front() == level.front() &&
         slow_matches(pattern.substr(1), level.substr(1));
}

// Enumerates the texts over an alphabet by length; number 0 is the empty one.
std::string text_of(uint64_t number, std::string_view alphabet) {
  std::string text;
  for (; number > 0; number = (number - 1) / alphabet.size()) {
    text += alphabet[(number - 1) % alphabet.size()];
  }
  return text;
}

TEST(Matches, AgreesWithTheDefinitionOnAllShortTexts) {
  int64_t num_matches = 0;
  for (uint64_t p = 1; p <= 3 + 9 + 27 + 81 + 243; ++p) {
    const std::string pattern = text_of(p, "ab*");
    if (pattern.find("**") != std::string::npos) {
      continue;
    }
    for (uint64_t n = 1; n <= 2 + 4 + 8 + 16 + 32 + 64; ++n) {
      const std::string name = text_of(n, "ab");
      const bool expected = slow_matches(pattern, name);
      ASSERT_EQ(matches(pattern, name), expected) << pattern << " " << name;
      num_matches += expected ? 1 : 0;
    }
  }
  EXPECT_GT(num_matches, 1000);
}

TEST(Matches, ManyStarsDoNotNeedExponentialTime) {
  std::string pattern;
  for (int i = 0; i < 1000; ++i) {
    pattern += "a*";
  }
  EXPECT_FALSE(matches(pattern + "b", std::string(5000, 'a')));
}

std::string pattern_error(std::string_view pattern) {
  return error_of([&] {
    check_pattern(pattern);
    return 0;
  });
}

TEST(CheckPattern, RejectsEmptyLevelsDoubleStarsAndControlCharacters) {
  for (const std::string pattern : {"a..b", ".a", "a.", "."}) {
    const std::string expected =
        "pattern '" + pattern + "': a level between dots is empty; write a name or '*' there";
    EXPECT_EQ(pattern_error(pattern), expected);
    EXPECT_EQ(error_of([&] { return matches(pattern, "a"); }), expected);
  }
  EXPECT_EQ(pattern_error("layers.**"),
            "pattern 'layers.**': '**' would cross levels, and no pattern does; write one '*' for "
            "each level");
  EXPECT_EQ(pattern_error("a\nb"),
            "pattern 'a?b': it contains a control character (shown as ?); remove it");
  EXPECT_EQ(pattern_error("a b.\xc3\xa9.*"), "accepted");
}

}  // namespace
}  // namespace weft::strategy
