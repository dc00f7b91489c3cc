#include "dispatch.h"
#include "dispatch_handle.h"

#include <utility>

namespace weft::ops::dispatch {

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits,
                                        const at::Tensor& target,
                                        std::int64_t vocab_start,
                                        std::string_view group_name,
                                        std::optional<std::int64_t> vocab_size,
                                        std::int64_t ignore_index,
                                        double label_smoothing,
                                        std::string_view reduction) {
  static const auto op =
      handle("weft::vocab_parallel_cross_entropy", &vocab_parallel_cross_entropy);
  return op.call(logits,
                 target,
                 vocab_start,
                 group_name,
                 vocab_size,
                 ignore_index,
                 label_smoothing,
                 reduction);
}

at::Tensor vocab_parallel_linear_cross_entropy(const at::Tensor& x,
                                               const at::Tensor& weight,
                                               const at::Tensor& target,
                                               std::int64_t vocab_start,
                                               std::string_view group_name,
                                               std::optional<std::int64_t> vocab_size,
                                               std::int64_t ignore_index,
                                               double label_smoothing,
                                               std::string_view reduction) {
  static const auto op =
      handle("weft::vocab_parallel_linear_cross_entropy", &vocab_parallel_linear_cross_entropy);
  return op.call(x,
                 weight,
                 target,
                 vocab_start,
                 group_name,
                 vocab_size,
                 ignore_index,
                 label_smoothing,
                 reduction);
}

std::tuple<at::Tensor, at::Tensor> vocab_cross_entropy(const at::Tensor& logits,
                                                       const at::Tensor& target,
                                                       std::int64_t vocab_start,
                                                       std::string_view group_name,
                                                       std::optional<std::int64_t> vocab_size,
                                                       std::int64_t ignore_index,
                                                       double label_smoothing) {
  static const auto op = handle("weft::_vocab_cross_entropy", &vocab_cross_entropy);
  return op.call(
      logits, target, vocab_start, group_name, vocab_size, ignore_index, label_smoothing);
}

at::Tensor vocab_cross_entropy_backward(const at::Tensor& grad,
                                        const at::Tensor& logits,
                                        const at::Tensor& target,
                                        const at::Tensor& normalizers,
                                        std::int64_t vocab_start,
                                        std::int64_t num_classes,
                                        std::int64_t ignore_index,
                                        double label_smoothing) {
  static const auto op =
      handle("weft::_vocab_cross_entropy_backward", &vocab_cross_entropy_backward);
  return op.call(
      grad, logits, target, normalizers, vocab_start, num_classes, ignore_index, label_smoothing);
}

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy(const at::Tensor& x,
                                                        const at::Tensor& weight,
                                                        const at::Tensor& target,
                                                        std::int64_t vocab_start,
                                                        std::string_view group_name,
                                                        std::optional<std::int64_t> vocab_size,
                                                        std::int64_t ignore_index,
                                                        double label_smoothing) {
  static const auto op = handle("weft::_linear_cross_entropy", &linear_cross_entropy);
  return op.call(
      x, weight, target, vocab_start, group_name, vocab_size, ignore_index, label_smoothing);
}

std::tuple<at::Tensor, at::Tensor> linear_cross_entropy_backward(const at::Tensor& grad,
                                                                 const at::Tensor& x,
                                                                 const at::Tensor& weight,
                                                                 const at::Tensor& target,
                                                                 const at::Tensor& normalizers,
                                                                 std::int64_t vocab_start,
                                                                 std::int64_t num_classes,
                                                                 std::int64_t ignore_index,
                                                                 double label_smoothing,
                                                                 bool wants_x,
                                                                 bool wants_weight) {
  static const auto op =
      handle("weft::_linear_cross_entropy_backward", &linear_cross_entropy_backward);
  return op.call(grad,
                 x,
                 weight,
                 target,
                 normalizers,
                 vocab_start,
                 num_classes,
                 ignore_index,
                 label_smoothing,
                 wants_x,
                 wants_weight);
}

at::Tensor cross_entropy_statistics(const at::Tensor& logits,
                                    const at::Tensor& target,
                                    std::int64_t vocab_start,
                                    std::int64_t ignore_index,
                                    bool wants_sum) {
  static const auto op = handle("weft::_cross_entropy_statistics", &cross_entropy_statistics);
  return op.call(logits, target, vocab_start, ignore_index, wants_sum);
}

void cross_entropy_gradient(const at::Tensor& gradient,
                            const at::Tensor& grad,
                            const at::Tensor& logits,
                            const at::Tensor& target,
                            const at::Tensor& normalizers,
                            std::int64_t vocab_start,
                            std::int64_t num_classes,
                            std::int64_t ignore_index,
                            double label_smoothing) {
  static const auto op = handle("weft::_cross_entropy_gradient", &cross_entropy_gradient);
  op.call(gradient,
          grad,
          logits,
          target,
          normalizers,
          vocab_start,
          num_classes,
          ignore_index,
          label_smoothing);
}

}  // namespace weft::ops::dispatch
