// A part of a model, in the place of the whole: globs over the tensors' names in Hugging Face
// terms, the record of them beside config.json, and a map of the model without the rest.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/families/model_map.h"
#include "distckpt/plan/tensor_map.h"

namespace ferry::converter {

// True if the pattern (of *, ? and [...]) matches the whole name.
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

// The map of a model without the tensors that `part` does not select. Throws as make_model_map
// does.
ModelMap make_part_map(const models::TransformerConfig& config,
                       const Part& part,
                       const FindTensor& find = {});
void restrict_map(ModelMap& map, const Part& part);
// Makes tensor i of the map tensor at[i], or takes it out.
void keep_tensors(ModelMap& map, const std::vector<std::optional<std::uint32_t>>& at);

// Takes out the tensors that `part` does not select. Returns the new index of each, if it has one.
std::vector<std::optional<std::uint32_t>> keep_selected(std::vector<distckpt::ModelTensor>& tensors,
                                                        const Part& part);

}  // namespace ferry::converter
