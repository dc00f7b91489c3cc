#include <weft/kernels/float_codes.h>
#include <weft/kernels/optimizer_step.h>

#include <c10/util/Exception.h>

#include <cmath>
#include <string_view>

// The checks of optimizer_step.h, and their errors. Tensors may be on meta, with symbolic sizes.
namespace weft::kernels {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

class StepCheck {
 public:
  StepCheck(std::string_view op, const at::Tensor& parameter) : op_(op), parameter_(parameter) {
    TORCH_CHECK_TYPE(
        parameter.scalar_type() == at::kFloat || parameter.scalar_type() == at::kBFloat16,
        op_,
        ": got parameter of dtype ",
        parameter.scalar_type(),
        "; pass float32 or bfloat16.");
    contiguous(parameter, "parameter");
  }

  // Checks a tensor's device, layout and shape.
  void same_shape(const at::Tensor& tensor, std::string_view name) const {
    shape(tensor, name, parameter_.sym_sizes(), "the shape of the parameter");
  }

  void grad(const at::Tensor& tensor) const {
    TORCH_CHECK_TYPE(
        tensor.scalar_type() == at::kFloat || tensor.scalar_type() == parameter_.scalar_type(),
        op_,
        ": got grad of dtype ",
        tensor.scalar_type(),
        "; pass float32 or the parameter's ",
        parameter_.scalar_type(),
        ".");
    same_shape(tensor, "grad");
  }

  void low_bits(const OptionalTensor& tensor) const {
    if (!tensor.has_value()) return;
    const bool is_split =
        parameter_.scalar_type() == at::kBFloat16 &&
        (tensor->scalar_type() == at::kShort || tensor->scalar_type() == at::kChar);
    TORCH_CHECK_TYPE(is_split,
                     op_,
                     ": got low_bits of dtype ",
                     tensor->scalar_type(),
                     " with a parameter of dtype ",
                     parameter_.scalar_type(),
                     "; pass int16 or int8 with a bfloat16 parameter, else None.");
    same_shape(*tensor, "low_bits");
  }

  // `codes`: the dtype of the state's codes, int8 or uint8.
  void state(const at::Tensor& values,
             std::string_view name,
             const OptionalTensor& scale,
             std::string_view scale_name,
             at::ScalarType codes) const {
    const auto type = values.scalar_type();
    const std::string_view codes_name = codes == at::kChar ? "int8" : "uint8";
    TORCH_CHECK_TYPE(type == at::kFloat || type == at::kBFloat16 || type == codes,
                     op_,
                     ": got ",
                     name,
                     " of dtype ",
                     type,
                     "; pass float32, bfloat16, or ",
                     codes_name,
                     " with ",
                     scale_name,
                     ".");
    same_shape(values, name);
    TORCH_CHECK_VALUE(scale.has_value() == (type == codes),
                      op_,
                      ": got ",
                      name,
                      " of dtype ",
                      type,
                      scale.has_value() ? " with " : " without ",
                      scale_name,
                      "; pass ",
                      scale_name,
                      " with ",
                      codes_name,
                      " only.");
    if (!scale.has_value()) return;
    TORCH_CHECK_TYPE(scale->scalar_type() == at::kFloat,
                     op_,
                     ": got ",
                     scale_name,
                     " of dtype ",
                     scale->scalar_type(),
                     "; pass float32.");
    shape(*scale,
          scale_name,
          scale_shape(parameter_.sym_sizes()),
          "one scale per 256 elements of a row");
  }

  void place(const StepPlace& place) const {
    TORCH_CHECK_VALUE(place.step >= 1,
                      op_,
                      ": got step ",
                      place.step,
                      "; pass the number of the step being made, from 1.");
    const auto columns = parameter_.dim() == 0 ? c10::SymInt(1)
                         : parameter_.dim() == 1
                             ? parameter_.sym_size(0)
                             : c10::multiply_integers(parameter_.sym_sizes().slice(1));
    TORCH_CHECK_VALUE(
        place.row >= 0 && place.column >= 0 && columns + place.column <= place.full_columns,
        op_,
        ": got row ",
        place.row,
        ", column ",
        place.column,
        " and full_columns ",
        place.full_columns,
        " with ",
        columns,
        " columns; pass the place of the tensor in the unsharded matrix.");
  }

  void finite_not_negative(double value, std::string_view name) const {
    TORCH_CHECK_VALUE(value >= 0 && std::isfinite(value),
                      op_,
                      ": got ",
                      name,
                      " ",
                      value,
                      "; pass a finite number that is not negative.");
  }

  void beta(double value, std::string_view name) const {
    TORCH_CHECK_VALUE(value >= 0 && value < 1,
                      op_,
                      ": got ",
                      name,
                      " ",
                      value,
                      "; pass a number from 0 to 1, without 1.");
  }

 private:
  void contiguous(const at::Tensor& tensor, std::string_view name) const {
    TORCH_CHECK_VALUE(tensor.device() == parameter_.device(),
                      op_,
                      ": got ",
                      name,
                      " on ",
                      tensor.device(),
                      " with parameter on ",
                      parameter_.device(),
                      "; move them to one device.");
    TORCH_CHECK_VALUE(tensor.is_contiguous(),
                      op_,
                      ": got ",
                      name,
                      " of strides ",
                      tensor.sym_strides(),
                      "; pass a contiguous tensor.");
  }

  void shape(const at::Tensor& tensor,
             std::string_view name,
             c10::SymIntArrayRef expected,
             std::string_view meaning) const {
    TORCH_CHECK_VALUE(tensor.sym_sizes() == expected,
                      op_,
                      ": got ",
                      name,
                      " of shape ",
                      tensor.sym_sizes(),
                      "; pass ",
                      expected,
                      ", ",
                      meaning,
                      ".");
    contiguous(tensor, name);
  }

  std::string_view op_;
  const at::Tensor& parameter_;
};

}  // namespace

void check_adam_step(const AdamStep& step) {
  constexpr std::string_view kOp = "weft::adam_step_";
  const StepCheck check(kOp, step.parameter);
  check.grad(step.grad);
  check.state(step.exp_avg, "exp_avg", step.exp_avg_scale, "exp_avg_scale", at::kChar);
  check.state(step.exp_avg_sq, "exp_avg_sq", step.exp_avg_sq_scale, "exp_avg_sq_scale", at::kByte);
  const auto first = step.exp_avg.scalar_type();
  const auto second = step.exp_avg_sq.scalar_type();
  TORCH_CHECK_TYPE(first == second || (first == at::kChar && second == at::kByte),
                   kOp,
                   ": got exp_avg of dtype ",
                   first,
                   " with exp_avg_sq of dtype ",
                   second,
                   "; pass both in float32, both in bfloat16, or int8 with uint8.");
  check.low_bits(step.low_bits);
  check.place(step.place);
  check.finite_not_negative(step.lr, "lr");
  check.beta(step.beta1, "beta1");
  check.beta(step.beta2, "beta2");
  check.finite_not_negative(step.eps, "eps");
  check.finite_not_negative(step.weight_decay, "weight_decay");
}

void check_momentum_step(const MomentumStep& step) {
  constexpr std::string_view kOp = "weft::momentum_step_";
  const StepCheck check(kOp, step.parameter);
  check.grad(step.grad);
  check.state(
      step.momentum_buffer, "momentum_buffer", step.momentum_scale, "momentum_scale", at::kChar);
  check.low_bits(step.low_bits);
  check.place(step.place);
  check.finite_not_negative(step.lr, "lr");
  TORCH_CHECK_VALUE(step.momentum > 0 && std::isfinite(step.momentum),
                    kOp,
                    ": got momentum ",
                    step.momentum,
                    "; pass a finite number above 0, because SGD without momentum has no buffer.");
  TORCH_CHECK_VALUE(std::isfinite(step.dampening),
                    kOp,
                    ": got dampening ",
                    step.dampening,
                    "; pass a finite number.");
  TORCH_CHECK_VALUE(!step.nesterov || step.dampening == 0,
                    kOp,
                    ": got nesterov with dampening ",
                    step.dampening,
                    "; pass dampening 0 with nesterov.");
  check.finite_not_negative(step.weight_decay, "weight_decay");
}

}  // namespace weft::kernels
