#include "converter/families/module_names.h"

#include <fmt/format.h>

#include <charconv>

namespace ferry::converter {
namespace {

constexpr std::string_view kLayers = "decoder.layers.";
constexpr std::string_view kExperts = ".mlp.experts.";
constexpr std::string_view kLocalExperts = "local_experts.";

// The number that `text` begins with, which is cut off.
std::optional<std::int64_t> take_number(std::string_view& text) {
  std::int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0 || number >= (std::int64_t{1} << 31)) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(stop - text.data()));
  return number;
}

}  // namespace

std::optional<ModuleExpert> parse_module_expert(std::string_view name) {
  const auto at = name.find(kExperts);
  if (at == std::string_view::npos) return std::nullopt;
  const auto prefix = name.substr(0, at + kExperts.size());
  auto rest = name.substr(prefix.size());
  if (rest.starts_with(kLocalExperts)) {
    rest.remove_prefix(kLocalExperts.size());
    const auto index = take_number(rest);
    if (!index || !rest.starts_with('.')) return std::nullopt;
    return ModuleExpert{std::string(prefix), *index, std::string(rest.substr(1))};
  }
  // "linear_fc1.weight3", and its halves "linear_fc1.weight3_w", "linear_fc1.weight3_v".
  for (const std::string_view kind : {".weight", ".bias"}) {
    const auto end = rest.find(kind);
    if (end == std::string_view::npos) continue;
    const auto stem = rest.substr(0, end + kind.size());
    auto tail = rest.substr(stem.size());
    const auto index = take_number(tail);
    if (!index || (!tail.empty() && tail != "_w" && tail != "_v")) return std::nullopt;
    return ModuleExpert{std::string(prefix), *index, fmt::format("{}{}", stem, tail)};
  }
  return std::nullopt;
}

std::optional<ModuleLayer> parse_module_layer(std::string_view name) {
  if (!name.starts_with(kLayers)) return std::nullopt;
  name.remove_prefix(kLayers.size());
  const auto index = take_number(name);
  if (!index || !name.starts_with('.')) return std::nullopt;
  return ModuleLayer{*index, name.substr(1)};
}

std::string key_of_module(std::string_view name,
                          std::int64_t first_layer,
                          std::int64_t first_expert) {
  std::string key(name);
  if (const auto layer = parse_module_layer(name))
    key = fmt::format("{}{}.{}", kLayers, layer->index + first_layer, layer->rest);
  if (const auto expert = parse_module_expert(key)) {
    key =
        fmt::format("{}experts.{}.{}", expert->prefix, expert->index + first_expert, expert->rest);
  }
  // Newer code calls the module so; keys of checkpoints do not, but those of hybrid models.
  constexpr std::string_view kModule = ".mtp_model_layer.";
  if (const auto at = key.find(kModule);
      at != std::string::npos && !key.substr(at + kModule.size()).starts_with("layers."))
    key.replace(at, kModule.size(), ".transformer_layer.");
  return key;
}

bool is_extra_state(std::string_view name) {
  return name.find("._extra_state") != std::string_view::npos;
}

}  // namespace ferry::converter
