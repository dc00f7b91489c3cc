#pragma once

#include <weft/kernels/activation_kind.h>

#include <cmath>
#include <limits>
#include <numbers>

namespace weft::kernels::testing {

inline const char* name_of(Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return "silu";
    case Activation::kGelu:
      return "gelu";
    case Activation::kGeluTanh:
      return "gelu_tanh";
    case Activation::kRelu:
      return "relu";
  }
  return "";
}

}  // namespace weft::kernels::testing

// The activations and their derivatives in double precision, by the textbook formulae.
namespace weft::kernels::reference {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

inline double value(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
    case Activation::kGeluTanh: {
      const double u = std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x);
      return 0.5 * x * (1 + std::tanh(u));
    }
    case Activation::kRelu:
      return x > 0 ? x : 0;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

inline double slope(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu: {
      const double s = sigmoid(x);
      return s + x * s * (1 - s);
    }
    case Activation::kGelu:
      return 0.5 * std::erfc(-x / std::numbers::sqrt2) +
             x * std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    case Activation::kGeluTanh: {
      const double scale = std::sqrt(2 / std::numbers::pi);
      const double tanh_u = std::tanh(scale * (x + 0.044715 * x * x * x));
      const double u_slope = scale * (1 + 3 * 0.044715 * x * x);
      return 0.5 * (1 + tanh_u) + 0.5 * x * (1 - tanh_u * tanh_u) * u_slope;
    }
    case Activation::kRelu:
      return x > 0 ? 1 : 0;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

}  // namespace weft::kernels::reference
