// The normalizer of a tokenizer.json: what is done to a text before anything is cut.
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
  // `settings` may be null. Throws Error that names a type that is not supported.
  Normalizer(const nlohmann::json& settings, const std::string& where);

  bool empty() const { return steps_.empty(); }
  std::string normalize(std::string_view text) const;  // valid UTF-8

 private:
  std::vector<std::function<std::string(std::string_view)>> steps_;
};

}  // namespace ferry::rollout::text
