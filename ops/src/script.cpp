#include <weft/ops/script.h>

#include <c10/util/Exception.h>

namespace weft::ops {

std::int64_t rebind_group(const torch::jit::Module& module, const std::string& group_name) {
  std::int64_t num_found = 0;
  for (const torch::jit::Module& submodule : module.modules()) {
    if (submodule.hasattr("group_name") && submodule.attr("group_name").isString()) {
      submodule._ivalue()->setAttr("group_name", group_name);
      ++num_found;
    }
  }
  TORCH_CHECK_VALUE(num_found > 0,
                    "rebind_group: got a module of type ",
                    module.type()->name() ? module.type()->name()->qualifiedName() : "unknown",
                    " with no weft module inside; pass one that holds weft.nn modules, and that "
                    "torch.jit.freeze has not been applied to.");
  return num_found;
}

}  // namespace weft::ops
