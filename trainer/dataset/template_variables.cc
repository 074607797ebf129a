#include "trainer/dataset/template_variables.h"

#include <type_traits>
#include <variant>

namespace ferry::trainer {
namespace {

nlohmann::ordered_json to_json(const ConfigValue& value) {
  return std::visit(
      [](const auto& one) -> nlohmann::ordered_json {
        if constexpr (std::is_same_v<std::decay_t<decltype(one)>, ConfigValue::Table>) {
          return template_variables(one);
        } else if constexpr (std::is_same_v<std::decay_t<decltype(one)>, ConfigValue::List>) {
          auto list = nlohmann::ordered_json::array();
          for (const auto& item : one) list.push_back(to_json(item));
          return list;
        } else {
          return one;
        }
      },
      value.value);
}

}  // namespace

nlohmann::ordered_json template_variables(const ConfigValue::Table& kwargs) {
  auto object = nlohmann::ordered_json::object();
  for (const auto& [name, value] : kwargs) object[name] = to_json(value);
  return object;
}

}  // namespace ferry::trainer
