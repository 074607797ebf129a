// The variables that a configuration gives to the chat template.
#pragma once

#include <nlohmann/json.hpp>

#include "trainer/config/config_value.h"

namespace ferry::trainer {

// An object: data.apply_chat_template_kwargs as ChatOptions::variables.
nlohmann::ordered_json template_variables(const ConfigValue::Table& kwargs);

}  // namespace ferry::trainer
