// The difference of two checkpoints in numbers for people: per tensor, and as a table of layers by
// projections. Where verify answers yes or no, diff says how much.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "converter/checkpoint_pair.h"
#include "converter/progress.h"
#include "distckpt/elements/difference.h"

namespace ferry::converter {

struct TensorDiff {
  std::string name{};
  distckpt::DType dtype = distckpt::DType::kBF16;
  distckpt::Shape shape{};
  distckpt::ElementDifference difference{};
};

struct DiffReport {
  std::filesystem::path left{};
  std::filesystem::path right{};
  Format left_format = Format::kHuggingFace;
  Format right_format = Format::kHuggingFace;
  std::string family{};               // of the left one
  std::vector<TensorDiff> tensors{};  // that both hold, in the order of the left one
  std::vector<UnpairedTensor> unpaired{};
  std::vector<std::string> notes{};  // what was not compared, and why
  distckpt::ElementDifference total{};
  std::int64_t num_changed = 0;  // tensors
  std::int64_t bytes = 0;
  double seconds = 0;

  bool identical() const { return unpaired.empty() && num_changed == 0; }
};

// Reads both checkpoints once. The numbers do not depend on threads, nor on formats and layouts.
DiffReport diff(const PairOptions& options, const ProgressFunction& progress = {});

// The place of a tensor in the model: "model.layers.3.mlp.experts.17.up_proj.weight" is layer 3,
// expert 17 of "mlp.experts.*.up_proj". Outside of layers the column is the name. ".weight" is left
// away.
struct TensorPlace {
  std::optional<std::int64_t> layer{};
  std::optional<std::int64_t> expert{};
  std::string column{};
  std::string name{};  // with * for the expert
};
TensorPlace place_of(std::string_view name);

// The tensors of one layer and column: one, but for experts.
struct DiffCell {
  std::string column{};
  std::string name{};
  distckpt::ElementDifference difference{};
  std::int64_t num_tensors = 0;
  std::int64_t num_changed = 0;
  const TensorDiff* worst = nullptr;  // of several, by relative difference; lives in the report
  std::optional<std::int64_t> worst_expert{};
  std::vector<const UnpairedTensor*> unpaired{};  // in the report
};

struct DiffRow {
  std::optional<std::int64_t> layer{};  // nothing: the tensors outside of layers
  distckpt::ElementDifference difference{};
  std::int64_t num_tensors = 0;
  std::int64_t num_changed = 0;
  std::vector<DiffCell> cells{};  // in the order of `columns`; those that the layer has
  std::vector<distckpt::ElementDifference> experts{};  // by number, each over all its tensors
};

struct DiffTable {
  std::vector<std::string> columns{};  // of all layers
  DiffRow outside{};
  std::vector<DiffRow> layers{};
};

// True if `a` differs more than `b`: by the relative difference, then by the share of elements.
bool is_worse(const distckpt::ElementDifference& a, const distckpt::ElementDifference& b);

// Points into `report`, which must outlive it.
DiffTable tabulate(const DiffReport& report);

}  // namespace ferry::converter
