// The normalizer of a tokenizer.json, applied to a text before it is cut into pieces.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace ferry::rollout::text {

class Normalizer {
 public:
  Normalizer() = default;  // changes nothing
  // `settings` may be null. Throws Error that names an unsupported type.
  Normalizer(const nlohmann::json& settings, const std::string& where);

  bool empty() const { return steps_.empty(); }
  std::string normalize(std::string_view text) const;  // valid UTF-8

 private:
  std::vector<std::function<std::string(std::string_view)>> steps_;
};

}  // namespace ferry::rollout::text
