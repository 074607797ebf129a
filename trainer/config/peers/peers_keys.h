// verl's keys without a namesake here: another key, or a reason why there is none.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace ferry::trainer {

// "optim.adam_beta1: the first of betas ..." for optim.betas. `exists` holds for the keys that
// this run has.
std::optional<std::string> hint_for_peers_key(
    std::string_view key, const std::function<bool(const std::string& key)>& exists);

// The same of a value, such as an estimator: that there is none of it here.
std::optional<std::string_view> hint_for_peers_value(std::string_view value);

}  // namespace ferry::trainer
