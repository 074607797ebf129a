#include "converter/adapter/expert_factors.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;

// The experts of a layer, and gate and up of them or down.
using ExpertGroup = std::pair<std::string, bool>;

ExpertGroup group_of(const ModelMap& base, const MegatronTensor& of) {
  return {experts_prefix(base, base.tensors[of.parts.front().model].name),
          of.merge == Merge::kGateUp};
}

}  // namespace

std::vector<StoredFactor> expert_factors(const ModelMap& base,
                                         const ModelMap& adapter,
                                         std::span<const AdaptedParameter> adapted) {
  std::vector<StoredFactor> factors;
  for (std::size_t i = 0; i < adapted.size(); ++i) {
    const auto& of = base.megatron[adapted[i].megatron];
    if (!of.expert) continue;
    const auto rank = adapted[i].rank;
    const auto& a = adapter.megatron[2 * i].parts.front();
    const auto& b = adapter.megatron[2 * i + 1].parts.front();
    std::int64_t row = 0;
    int copy = 0;
    for (const auto model : merged_tensors(of)) {
      const auto& tensor = base.tensors[model];
      if (tensor.shape.rank() != 2) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: holds all experts of a layer, and so do the factors that "
                                "vLLM and SGLang read",
                                tensor.name),
                    "convert the adapter with --to peft");
      }
      const auto prefix = file_prefix(tensor.name);
      const auto rows = tensor.shape[0];
      factors.push_back({.name = prefix + ".lora_A.weight",
                         .shape = a.model_box.size,
                         .link = {.model = a.model,
                                  .model_box = a.model_box,
                                  .stored_box = Box::whole(a.model_box.size),
                                  .copy = copy++}});
      auto box = b.model_box;
      box.offset[0] = row;
      box.size[0] = rows;
      row += rows;
      factors.push_back({.name = prefix + ".lora_B.weight",
                         .shape = {rows, rank},
                         .link = {.model = b.model,
                                  .model_box = box,
                                  .stored_box = Box::whole({rows, rank}),
                                  .axes = b.axes}});
    }
  }
  return factors;
}

void require_all_experts(const ModelMap& base, std::span<const AdaptedParameter> adapted) {
  std::map<ExpertGroup, std::int64_t> ranks;
  std::set<std::uint32_t> there;
  for (const auto& one : adapted) {
    const auto& of = base.megatron[one.megatron];
    if (!of.expert) continue;
    there.insert(one.megatron);
    const auto rank = ranks.emplace(group_of(base, of), one.rank).first->second;
    require(rank == one.rank, ErrorKind::kLayout,
            "{}: the factors of an expert have rank {}, others {}; factors of all experts of a "
            "layer have one",
            base.tensors[of.parts.front().model].name, one.rank, rank);
  }
  for (std::uint32_t i = 0; i < base.megatron.size(); ++i) {
    const auto& of = base.megatron[i];
    if (!of.expert || of.shape.rank() != 2 || there.contains(i)) continue;
    require(!ranks.contains(group_of(base, of)), ErrorKind::kLayout,
            "{}: is not adapted, other experts of the layer are; factors of a layer are of all of "
            "its experts",
            base.tensors[of.parts.front().model].name);
  }
}

}  // namespace ferry::converter
