#include <weft/ops/operators.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include <iostream>

int main() {
  const at::Tensor x = at::arange(6, at::kDouble).view({2, 3});
  const at::Tensor y = weft::ops::row_linear(x, at::ones({1, 3}, at::kDouble), {}, "");
  std::cout << weft::ops::built_for_torch() << " " << y.const_data_ptr<double>()[0] << " "
            << y.const_data_ptr<double>()[1] << "\n";
  return 0;
}
