// Weights that are quantised: what config.json says of them, and the tensors that stand for one.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/base/box.h"
#include "distckpt/base/dtype.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// The tensors of a weight of four bits, in the place of "weight" in its name.
struct PackedWeight {
  std::string_view elements{};
  std::string_view scales{};
  std::string_view global_scale{};
  std::span<const std::string_view> others{};  // hold nothing of the weight
  distckpt::Encoding encoding = distckpt::Encoding::kE2M1;
  distckpt::GlobalScale how = distckpt::GlobalScale::kNone;
};

inline constexpr std::string_view kScaleSuffix = "_scale_inv";
inline constexpr std::string_view kPlainScaleSuffix = "_scale";

// The quantisation of a checkpoint's weights.
struct Quantization {
  enum class Method : std::uint8_t {
    kFp8,     // E4M3 under the weight's name, beside its scales: that name and scale_suffix
    kMxfp4,   // of experts: ...._blocks and ...._scales in place of the weight
    kPacked,  // four bits, as compressed-tensors or ModelOpt names them
    // Written only: weights that are read in four bits (E2M1) as kFp8, by powers of two, without
    // rounding.
    kFp8Lossless,
  };
  Method method = Method::kFp8;
  // [128, 128], of the tensor as it is stored; 0: as long as the tensor is; empty: all of it.
  distckpt::Dims block{};
  const PackedWeight* packed = nullptr;          // of kPacked
  std::string_view scale_suffix = kScaleSuffix;  // of kFp8
  bool fp8_beside = false;  // of kPacked: other weights are FP8, with one scale of the whole

  bool operator==(const Quantization&) const = default;
};
inline constexpr std::string_view kBlocksSuffix = "_blocks";
inline constexpr std::string_view kBlockScalesSuffix = "_scales";
// True of the scale of an FP8 module's input, or of cached keys or values, in the place of
// "weight".
bool is_activation_scale(std::string_view name);

// A method of those that are written: "fp8-block", "fp8-block-lossless", "mxfp4".
std::optional<Quantization::Method> quantization_method(std::string_view name);

// Nothing if the checkpoint is not quantised, or of a family that passes through. Throws
// Error(kLayout) for every other way of quantising.
std::optional<Quantization> parse_quantization(std::string_view text, std::string_view source);

// The number of a model's parameters that a tensor holds, as files have it: none in scales, and
// several in an element that packs four bits each.
std::int64_t num_parameters(const distckpt::ModelTensor& tensor);

// The name of the weight whose elements or scales a tensor of that name holds, or the same name.
std::string quantized_weight(std::string_view name);

// The same text without its quantisation, and of the dtype to which the weights were dequantised.
std::string without_quantization(std::string_view text,
                                 distckpt::DType dtype,
                                 std::string_view source);

// The same text of weights that are quantised so, FP8 in blocks of 128 x 128, but for those
// modules: as DeepSeek-V3 and GPT-OSS are published.
std::string with_quantization(std::string_view text,
                              Quantization::Method method,
                              const std::vector<std::string>& not_converted,
                              std::string_view source);

}  // namespace ferry::converter
