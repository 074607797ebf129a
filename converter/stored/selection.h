// Which of a model's tensors are meant: globs over their names in Hugging Face terms.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// True if the pattern (of *, ? and [...]) matches the whole name; an empty one matches everything.
bool matches(std::string_view pattern, std::string_view name);

struct Selection {
  std::vector<std::string> include{};  // empty: everything
  std::vector<std::string> exclude{};  // of that

  bool operator==(const Selection&) const = default;
  bool is_all() const { return include.empty() && exclude.empty(); }
  bool selects(std::string_view name) const;
  // Padding and the scales of FP8 blocks are what their tensor is.
  bool selects(const distckpt::ModelTensor& tensor) const;

  // Throws Error(kUsage) naming a pattern that matches none of the tensors, or if all of them
  // together select none.
  void require_matches(const std::vector<distckpt::ModelTensor>& tensors) const;
  std::string describe() const;  // "--include '*.norm.weight' --exclude 'lm_head.*'"
};

// A part of a model, of a part of it, ...: what a checkpoint holds that was converted so. Empty: a
// whole model. docs/formats/part.md.
using Part = std::vector<Selection>;

bool selects(const Part& part, const distckpt::ModelTensor& tensor);
std::string describe(const Part& part);
nlohmann::json part_json(const Part& part);
Part parse_part_json(const nlohmann::json& json, std::string_view source);

// The record that lies beside config.json.
std::string write_part(const Part& part);
Part parse_part(std::string_view text, std::string_view source);

}  // namespace ferry::converter
