// The numbers of a step under verl's names.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace ferry::trainer {

using Metrics = std::map<std::string, double, std::less<>>;

}  // namespace ferry::trainer
