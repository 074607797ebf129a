#include "converter/families/quantization.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "converter/families/config_fields.h"
#include "converter/families/config_limits.h"
#include "converter/families/families.h"
#include "converter/families/hf_config.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"

namespace ferry::converter {
namespace {

using distckpt::Encoding;
using distckpt::GlobalScale;
using Method = Quantization::Method;

// compressed-tensors, format "pack-quantized".
constexpr std::array<std::string_view, 4> kInt4Others{"weight_shape", "q_scale", "k_scale",
                                                      "v_scale"};
constexpr PackedWeight kInt4Weight{.elements = "weight_packed",
                                   .scales = "weight_scale",
                                   .others = kInt4Others,
                                   .encoding = Encoding::kInt4};

// compressed-tensors, format "mxfp4-pack-quantized".
constexpr PackedWeight kMxfp4Weight{.elements = "weight_packed", .scales = "weight_scale"};

// compressed-tensors, format "nvfp4-pack-quantized".
constexpr std::array<std::string_view, 4> kNvfp4Others{"input_global_scale", "q_scale", "k_scale",
                                                       "v_scale"};
constexpr PackedWeight kNvfp4Weight{.elements = "weight_packed",
                                    .scales = "weight_scale",
                                    .global_scale = "weight_global_scale",
                                    .others = kNvfp4Others,
                                    .how = GlobalScale::kDivisor};

// ModelOpt, and compressed-tensors in FP8; also the scales of cached keys and values.
constexpr std::array<std::string_view, 4> kModelOptOthers{"input_scale", "q_scale", "k_scale",
                                                          "v_scale"};
constexpr std::string_view kActivationScale = "activation_scale";
constexpr PackedWeight kModelOptWeight{.elements = "weight",
                                       .scales = "weight_scale",
                                       .global_scale = "weight_scale_2",
                                       .others = kModelOptOthers,
                                       .how = GlobalScale::kFactor};

// The second in files of llm-compressor's first releases.
constexpr std::array<std::string_view, 2> kQuantizationKeys{"quantization_config",
                                                            "compression_config"};

// The object of a model that is quantised; the language model's may have it in place of the whole.
const nlohmann::json* quantization_config(const nlohmann::json& config) {
  for (const auto* object :
       {&config, config.contains("text_config") ? &config["text_config"] : nullptr}) {
    if (object == nullptr || !object->is_object()) continue;
    for (const auto key : kQuantizationKeys) {
      const auto found = object->find(key);
      if (found != object->end() && !found->is_null()) return &*found;
    }
  }
  return nullptr;
}

// A list of two sizes, or, from older releases of compressed-tensors, "128x128".
distckpt::Dims parse_block(const ConfigFields& how, std::string_view key) {
  auto value = how.required(key);
  if (value.is_string()) {
    auto text = value.get<std::string>();
    std::ranges::replace(text, 'x', ',');
    const auto sizes = nlohmann::json::parse(fmt::format("[{}]", text), nullptr, false);
    if (!sizes.is_discarded()) value = sizes;
  }
  require(value.is_array() && value.size() == 2, ErrorKind::kCorrupt,
          "{}: {} is {}, expected two sizes", how.source(), key, value.dump());
  distckpt::Dims block;
  for (const auto& size : value) {
    block.push_back(distckpt::json_int(size, key, how.source()));
    const auto last = block[block.rank() - 1];
    require(last >= 1 && last <= kMaxSize, ErrorKind::kCorrupt, "{}: {} is {}", how.source(), key,
            value.dump());
  }
  return block;
}

Quantization parse_fp8(const ConfigFields& how) {
  const auto format = how.text("fmt", "e4m3");
  const bool e4m3 = format == "e4m3" || format == "float8_e4m3fn";  // the second of MiniMax-M2
  require(e4m3, ErrorKind::kLayout, "{}: the weights are fp8 ({}); only e4m3 is read", how.source(),
          format);
  if (how.find("weight_block_size") == nullptr) return {};
  return {.block = parse_block(how, "weight_block_size")};
}

// compressed-tensors, format "float-quantized": one scale of a row, of a block or of a tensor.
Quantization parse_float8(const ConfigFields& how) {
  std::optional<Quantization> found;
  for (const auto& [name, group] : how.required("config_groups").items()) {
    const auto source = fmt::format("{}: config_groups.{}", how.source(), name);
    const ConfigFields weights(ConfigFields(group, source).required("weights"),
                               fmt::format("{}.weights", source));
    const auto bits = weights.size("num_bits");
    require(bits == 8 && weights.text("type", "") == "float" && weights.flag("symmetric", true),
            ErrorKind::kLayout, "{}: {} of {} bits; only symmetric float of 8 bits is read",
            weights.source(), weights.text("type", "elements"), bits);
    const auto strategy = weights.text("strategy", "tensor");
    Quantization parsed{.scale_suffix = kPlainScaleSuffix};
    if (strategy == "channel") {
      parsed.block = {1, 0};
    } else if (strategy == "block") {
      parsed.block = parse_block(weights, "block_structure");
    } else {
      require(strategy == "tensor", ErrorKind::kLayout, "{}: strategy \"{}\" is not read",
              weights.source(), strategy);
    }
    require(!found || *found == parsed, ErrorKind::kLayout,
            "{}: config_groups have scales of several kinds, which is not handled", how.source());
    found = parsed;
  }
  require(found.has_value(), ErrorKind::kCorrupt, "{}: config_groups is empty", how.source());
  return *found;
}

// True if a group is of neighbouring columns. An order in which alone they were quantised does not
// matter (compressed-tensors, ActivationOrdering).
bool keeps_columns(const ConfigFields& weights) {
  const auto* const order = weights.find("actorder");
  return order == nullptr || *order == false || *order == "static" || *order == "weight";
}

// The size of the groups of a row that have one scale, which all config_groups say alike.
std::int64_t parse_group_size(const ConfigFields& how, std::string_view type) {
  const auto& groups = how.required("config_groups");
  std::optional<std::int64_t> found;
  for (const auto& [name, group] : groups.items()) {
    const auto source = fmt::format("{}: config_groups.{}", how.source(), name);
    const ConfigFields weights(ConfigFields(group, source).required("weights"),
                               fmt::format("{}.weights", source));
    const auto bits = weights.size("num_bits");
    const bool plain =
        bits == 4 && weights.text("type", "") == type && weights.flag("symmetric", true);
    require(plain, ErrorKind::kLayout, "{}: {} of {} bits; only symmetric {} of 4 bits are read",
            weights.source(), weights.text("type", "elements"), bits, type);
    require(keeps_columns(weights), ErrorKind::kLayout,
            "{}: actorder is none of null, \"static\" and \"weight\": only groups of neighbouring "
            "columns are read",
            weights.source());
    const auto strategy = weights.text("strategy", "group");
    require(strategy == "group" || strategy == "tensor_group", ErrorKind::kLayout,
            "{}: strategy \"{}\" is not read: only scales of groups of a row are", weights.source(),
            strategy);
    const auto size = weights.size("group_size");
    require(!found || *found == size, ErrorKind::kLayout,
            "{}: config_groups have group sizes {} and {}, which is not handled", how.source(),
            found.value_or(0), size);
    found = size;
  }
  require(found.has_value(), ErrorKind::kCorrupt, "{}: config_groups is empty", how.source());
  return *found;
}

// The tensors of such a model are carried, whatever stands in them.
bool passes_through(const nlohmann::json& config) {
  const ConfigFields all(config, "config.json");
  const auto* const model_type = all.find("model_type");
  if (model_type == nullptr || !model_type->is_string()) return false;
  return family_of(model_type->get_ref<const std::string&>(), all.find("architectures"))
      .passes_through;
}

Quantization packed(const PackedWeight& weight, std::int64_t group_size) {
  return {.method = Method::kPacked, .block = {1, group_size}, .packed = &weight};
}

constexpr std::int64_t kNvfp4Group = 16;

// ModelOpt's, of which each layer has a format of its own: FP8 with a scale of the tensor, or
// NVFP4.
Quantization parse_mixed(const ConfigFields& how) {
  if (const auto* const layers = how.find("quantized_layers"); layers != nullptr) {
    for (const auto& [name, layer] : layers->items()) {
      const ConfigFields of_layer(layer,
                                  fmt::format("{}: quantized_layers.{}", how.source(), name));
      const auto format = of_layer.text("quant_algo", "no format");
      require(format == "FP8" || format == "NVFP4" || format == "W4A16_NVFP4", ErrorKind::kLayout,
              "{}: quant_algo is {}; read are FP8 and NVFP4", of_layer.source(), format);
      require(format == "FP8" || of_layer.size("group_size", kNvfp4Group) == kNvfp4Group,
              ErrorKind::kLayout, "{}: group_size is not {}", of_layer.source(), kNvfp4Group);
    }
  }
  auto mixed = packed(kModelOptWeight, kNvfp4Group);
  mixed.fp8_beside = true;
  mixed.scale_suffix = kPlainScaleSuffix;
  return mixed;
}

}  // namespace

std::optional<Quantization::Method> quantization_method(std::string_view name) {
  if (name == "fp8-block") return Method::kFp8;
  if (name == "fp8-block-lossless") return Method::kFp8Lossless;
  return name == "mxfp4" ? std::optional(Method::kMxfp4) : std::nullopt;
}

std::optional<Quantization> parse_quantization(std::string_view text, std::string_view source) {
  const auto object = distckpt::parse_python_json(text, source);
  const auto* value = quantization_config(object);
  if (value == nullptr || passes_through(object)) return std::nullopt;
  const ConfigFields how(*value, fmt::format("{}: quantization_config", source));
  require(value->is_object() && !value->empty(), ErrorKind::kLayout,
          "{}: says nothing: the weights may be quantised or not; take it out of config.json if "
          "they are not",
          how.source());
  const auto method = how.text("quant_method", "");
  if (method == "fp8") return parse_fp8(how);
  if (method == "mxfp4") return Quantization{.method = Method::kMxfp4, .block = {1, 1, 32}};
  const auto format = how.text("format", how.text("quant_algo", "no format"));
  if (method == "compressed-tensors" && format == "pack-quantized")
    return packed(kInt4Weight, parse_group_size(how, "int"));
  if (method == "compressed-tensors" && format == "mxfp4-pack-quantized")
    return packed(kMxfp4Weight, parse_group_size(how, "float"));
  if (method == "compressed-tensors" && format == "nvfp4-pack-quantized")
    return packed(kNvfp4Weight, parse_group_size(how, "float"));
  if (method == "compressed-tensors" &&
      (format == "float-quantized" || format == "naive-quantized"))
    return parse_float8(how);
  if (method == "modelopt" && format == "FP8")
    return Quantization{.scale_suffix = kPlainScaleSuffix};
  if (method == "modelopt" && (format == "NVFP4" || format == "W4A16_NVFP4")) {
    return packed(kModelOptWeight, how.find("config_groups") == nullptr
                                       ? kNvfp4Group
                                       : parse_group_size(how, "float"));
  }
  if (method == "modelopt" && format == "MIXED_PRECISION") return parse_mixed(how);
  fail(ErrorKind::kLayout,
       "{}: the weights are quantised by \"{}\" ({}); read are fp8 (e4m3), mxfp4, "
       "compressed-tensors (float-quantized, pack-quantized, mxfp4-pack-quantized, "
       "nvfp4-pack-quantized) and modelopt (FP8, NVFP4, MIXED_PRECISION of both)",
       how.source(), method, format);
}

bool is_activation_scale(std::string_view name) {
  const auto part = name.substr(name.rfind('.') + 1);
  return part == kActivationScale ||
         std::ranges::find(kModelOptOthers, part) != kModelOptOthers.end();
}

std::string quantized_weight(std::string_view name) {
  for (const auto suffix : {kScaleSuffix, kBlocksSuffix, kBlockScalesSuffix}) {
    if (name.ends_with(suffix)) return std::string(name.substr(0, name.size() - suffix.size()));
  }
  const auto dot = name.rfind('.') + 1;
  const auto of = name.substr(dot);
  const auto is_part = [&](const PackedWeight* weight) {
    return of == weight->elements || of == weight->scales || of == weight->global_scale ||
           std::ranges::find(weight->others, of) != weight->others.end();
  };
  constexpr std::array kPacked{&kInt4Weight, &kNvfp4Weight, &kModelOptWeight};
  if (of != kActivationScale && std::ranges::none_of(kPacked, is_part)) return std::string(name);
  return fmt::format("{}weight", name.substr(0, dot));
}

std::int64_t num_parameters(const distckpt::ModelTensor& tensor) {
  const std::string_view name = tensor.name;
  const auto part = name.substr(name.rfind('.') + 1);
  const bool packed = name.ends_with(kBlocksSuffix) || part == kInt4Weight.elements ||
                      (part == kModelOptWeight.elements && tensor.dtype == distckpt::DType::kU8);
  constexpr std::int64_t kFourBits = 2;  // in a byte
  if (packed) return tensor.shape.product() * size_of(tensor.dtype) * kFourBits;
  const bool other = quantized_weight(name) != name || is_activation_scale(name);
  return other ? 0 : tensor.shape.product();
}

std::string without_quantization(std::string_view text,
                                 distckpt::DType dtype,
                                 std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  for (const auto key : kQuantizationKeys) object.erase(std::string(key));
  const auto text_config = object.find("text_config");
  if (text_config != object.end() && text_config->is_object()) {
    for (const auto key : kQuantizationKeys) text_config->erase(std::string(key));
  }
  return with_dtype(distckpt::python_json(object), dtype, source);
}

std::string with_quantization(std::string_view text,
                              Method method,
                              const std::vector<std::string>& not_converted,
                              std::string_view source) {
  auto object = distckpt::parse_ordered_python_json(text, source);
  const bool fp8 = method != Method::kMxfp4;
  nlohmann::ordered_json how;
  if (fp8) {
    how["activation_scheme"] = "dynamic";
    how["fmt"] = "e4m3";
  }
  how["modules_to_not_convert"] = not_converted;
  how["quant_method"] = fp8 ? "fp8" : "mxfp4";
  if (method == Method::kFp8Lossless) how["scale_fmt"] = "ue8m0";
  if (fp8) how["weight_block_size"] = {128, 128};
  object["quantization_config"] = std::move(how);
  return distckpt::python_json(object, 2) + "\n";
}

}  // namespace ferry::converter
