#include "rollout/text/eos_token_ids.h"

#include <algorithm>

#include "distckpt/base/json.h"

namespace ferry::rollout::text {

std::vector<std::int64_t> eos_token_ids(const ModelFiles& files, const Tokenizer* tokenizer) {
  std::vector<std::int64_t> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    const auto text = files.read(name);
    if (!text) continue;
    const auto config = distckpt::parse_python_json(*text, files.where(name));
    if (!config.is_object() || !config.contains("eos_token_id")) continue;
    const auto& value = config["eos_token_id"];
    for (const auto& id : value.is_array() ? value : nlohmann::json::array({value}))
      if (id.is_number_integer()) ids.push_back(id.get<std::int64_t>());
    if (!ids.empty()) break;
  }
  if (tokenizer != nullptr && tokenizer->eos_token_id()) ids.push_back(*tokenizer->eos_token_id());
  std::ranges::sort(ids);
  ids.erase(std::ranges::unique(ids).begin(), ids.end());
  return ids;
}

}  // namespace ferry::rollout::text
