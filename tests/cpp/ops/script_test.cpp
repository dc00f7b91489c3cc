#include <weft/ops/script.h>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>

#include <string>

namespace weft::testing {
namespace {

torch::jit::Module module_with_group(const std::string& name, const std::string& group_name) {
  torch::jit::Module module(name);
  module.register_attribute("group_name", c10::StringType::get(), group_name);
  return module;
}

TEST(RebindGroup, ReachesEveryModuleInside) {
  torch::jit::Module inner = module_with_group("inner", "of another job");
  torch::jit::Module plain("plain");
  plain.register_module("inner", inner);
  torch::jit::Module outer = module_with_group("outer", "");
  outer.register_module("plain", plain);
  EXPECT_EQ(ops::rebind_group(outer, "job"), 2);
  EXPECT_EQ(outer.attr("group_name").toStringRef(), "job");
  EXPECT_EQ(inner.attr("group_name").toStringRef(), "job");
  EXPECT_FALSE(plain.hasattr("group_name"));
}

TEST(RebindGroup, RejectsAModuleWithoutGroups) {
  const torch::jit::Module plain("of.mine");
  try {
    ops::rebind_group(plain, "job");
    ADD_FAILURE() << "nothing was thrown";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("of.mine with no weft module inside"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace weft::testing
