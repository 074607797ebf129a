#include "converter/adapter/factors/peft_tensors.h"

#include <algorithm>
#include <utility>

#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

// The parameters of experts that factors of a whole module change (target_parameters), which the
// files of ranks do not say: down has its own shape.
std::string adapted_experts(const distckpt::Layout& layout, const ModelMap& base) {
  const auto hidden = base.config.hidden_size;
  const auto columns = base.config.moe_ffn_hidden_size;
  for (const auto& a : layout.tensors()) {
    const auto end = a.name.find(".experts.lora_A.");
    if (end == a.name.npos) continue;
    auto name = a.name;
    const auto b = layout.find(name.replace(name.rfind("lora_A"), 6, "lora_B"));
    const bool down =
        a.shape.rank() == 2 && a.shape[1] == columns && b && layout.tensor(*b).shape[0] == hidden;
    return down ? "down_proj" : "gate_up_proj";
  }
  return "";
}

}  // namespace

PeftTensors read_peft(const fs::path& folder) {
  PeftTensors found{.settings = LoraSettings(folder / kAdapterConfig),
                    .source = (folder / kAdapterWeights).string(),
                    .location = {.root = folder, .folder = folder}};
  found.config = found.settings.text();
  const auto header = distckpt::read_safetensors_header(adapter_weights(folder));
  distckpt::add_to_layout(header, folder, found.layout);
  return found;
}

PeftTensors read_ranks(const Location& location,
                       const ModelMap& base,
                       const std::optional<double>& named_alpha) {
  const auto folder = location.folder.string();
  auto stored = read_fsdp_adapter(location);
  const auto record = find_lora_record(location).value_or(LoraRecord{.source = folder});
  const auto& tensors = stored.layout.tensors();
  require(!tensors.empty(), ErrorKind::kLayout, "{}: holds no factors of an adapter", folder);
  const auto alpha = named_alpha ? named_alpha : record.alpha;
  if (!alpha) {
    throw Error(ErrorKind::kLayout,
                fmt::format("{}: no {} says the adapter's alpha", folder, kVerlLoraRecord),
                "name it with --lora-alpha");
  }
  const auto first = std::ranges::find_if(
      tensors, [](const auto& one) { return one.name.find(".lora_A.") != std::string::npos; });
  const auto rank = first != tensors.end() && first->shape.rank() == 2 ? first->shape[0] : 0;
  nlohmann::ordered_json settings{
      {"peft_type", "LORA"}, {"r", record.rank.value_or(rank)}, {"lora_alpha", *alpha}};
  if (const auto experts = adapted_experts(stored.layout, base); !experts.empty())
    settings["target_parameters"] = {experts};
  PeftTensors found{.settings = LoraSettings(settings.dump(), record.source),
                    .source = folder,
                    .task_type = record.task_type,
                    .location = location,
                    .layout = std::move(stored.layout),
                    .replicas = std::move(stored.replicas),
                    .checksums = std::move(stored.checksums)};
  for (const auto& tensor : found.layout.tensors()) {
    require(found.settings.parse_key(tensor.name, folder).is_factor(), ErrorKind::kLayout,
            "{}: {}: is no factor of a linear layer; of an adapter that ranks saved those alone "
            "are read",
            folder, tensor.name);
  }
  return found;
}

}  // namespace ferry::converter
