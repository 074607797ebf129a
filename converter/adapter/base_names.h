// The tensors of the checkpoint that an adapter changes, by the names that adapters have for them:
// those of transformers' modules, or those of files, as older releases had.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "converter/open/checkpoint.h"

namespace ferry::converter {

class BaseNames {
 public:
  // `base` has to outlive it.
  explicit BaseNames(const Checkpoint& base);

  struct Found {
    std::string name{};                             // in files
    const distckpt::ModelTensor* tensor = nullptr;  // null: the base has none
    bool is_copy = false;  // `tensor` is what the name repeats: a tied head
  };
  // The tensor that an adapter calls so: "model.language_model.norm.weight".
  Found find(std::string_view name) const;

 private:
  const Checkpoint& base_;
  std::map<std::string_view, const distckpt::ModelTensor*> tensors_;  // by name in files
};

}  // namespace ferry::converter
