#include "converter/adapter/base_names.h"

#include "converter/families/families.h"

namespace ferry::converter {

BaseNames::BaseNames(const Checkpoint& base) : base_(base) {
  for (const auto& tensor : base.tensors) tensors_.emplace(tensor.name, &tensor);
}

BaseNames::Found BaseNames::find(std::string_view name) const {
  auto names = file_names(*base_.map.family, name);
  for (auto& one : names) {
    if (const auto copy = base_.map.copies.find(one); copy != base_.map.copies.end())
      return {std::move(one), &base_.tensors[copy->second], true};
    if (const auto at = tensors_.find(one); at != tensors_.end())
      return {std::move(one), at->second, false};
  }
  return {.name = std::move(names.front())};
}

}  // namespace ferry::converter
