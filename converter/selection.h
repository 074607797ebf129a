// Which of a model's tensors are meant: globs over their names in Hugging Face terms.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "distckpt/tensor_map.h"

namespace ferry::converter {

// True if the pattern (of *, ? and [...]) matches the whole name; an empty one matches everything.
bool matches(std::string_view pattern, std::string_view name);

struct Selection {
  std::vector<std::string> include{};  // empty: everything
  std::vector<std::string> exclude{};  // of that

  bool is_all() const { return include.empty() && exclude.empty(); }
  bool selects(std::string_view name) const;
  bool selects(const distckpt::ModelTensor& tensor) const;  // padding is what its tensor is

  // Throws Error(kUsage) naming a pattern that matches none of the tensors.
  void require_matches(const std::vector<std::string_view>& names) const;
  std::string describe() const;  // "--include '*.norm.weight' --exclude 'lm_head.*'"
};

}  // namespace ferry::converter
