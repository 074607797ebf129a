#include "converter/adapter/factors/adapter_map.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

#include "converter/adapter/factors/lora_settings.h"
#include "distckpt/base/error.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::Shape;

constexpr std::string_view kWeight = ".weight";

std::string without_weight(std::string_view name) {
  if (name.ends_with(kWeight)) name.remove_suffix(kWeight.size());
  return std::string(name);
}

Box rows_of_rank(Box box, std::int64_t rank) {
  box.offset[1] = 0;
  box.size[1] = rank;
  return box;
}

class AdapterMapMaker {
 public:
  AdapterMapMaker(const ModelMap& base, std::span<const AdaptedParameter> adapted)
      : base_(base), adapted_(adapted) {
    map_.config = base.config;
    map_.family = base.family;
    for (const auto& one : adapted) {
      const auto& of = base.megatron[one.megatron];
      if (of.expert && of.merge != Merge::kGateUp) changes_down_.insert(experts_of(of));
    }
  }

  ModelMap make() {
    // Their modules have other names in transformers than in files, and several parts in one
    // matrix.
    require(!base_.config.is_hybrid_model(), ErrorKind::kLayout,
            "adapters of models of the family {} are not converted", base_.config.family);
    for (const auto& one : adapted_) {
      const auto& of = base_.megatron[one.megatron];
      const bool matrices = of.shape.rank() == 2 && of.unused.empty() &&
                            std::ranges::all_of(of.parts, [&](const MappedPart& part) {
                              return of.expert ? base_.tensors[part.model].interleaved == 1
                                               : part.axes.empty() && part.model_box.rank() == 2;
                            });
      require(matrices, ErrorKind::kLayout, "{}: adapters of it are not converted", of.key);
      if (of.expert) {
        add_expert(one, of);
      } else if (one.part == AdaptedParameter::kFused && !is_part_of_tensor(base_, of)) {
        add_fused(one, of);
      } else {
        add_one_tensor(one, of);
      }
    }
    leave_incomplete_stacks();
    return std::move(map_);
  }

 private:
  std::string experts_of(const MegatronTensor& of) const {
    return experts_prefix(base_, base_.tensors[of.parts.front().model].name);
  }

  std::uint32_t add_model(const std::string& name, const Shape& shape, std::int64_t interleaved) {
    const auto [at, added] =
        map_.index.emplace(name, static_cast<std::uint32_t>(map_.tensors.size()));
    if (added) map_.tensors.push_back({.name = name, .shape = shape, .interleaved = interleaved});
    return at->second;
  }
  std::uint32_t add_a(const std::string& prefix, const Shape& shape) {
    return add_model(prefix + ".lora_A.weight", shape, 1);
  }
  std::uint32_t add_b(const std::string& prefix, const Shape& shape, std::int64_t experts = 1) {
    return add_model(prefix + ".lora_B.weight", shape, experts);
  }

  // A factor of a parameter; tensor parallelism splits the first one's rank, or its columns where
  // it splits those of the parameter, and the second one's rows (megatron/bridge/peft/utils.py,
  // ParallelLinearAdapter).
  MegatronTensor factor(const MegatronTensor& of, const std::string& name, Shape shape) const {
    MegatronTensor factor{of};
    factor.parts.clear();
    factor.key = adapter_key(of.key, name);
    factor.stacked_key = of.stacked_key.empty() ? "" : adapter_key(of.stacked_key, name);
    for (auto& other : factor.also) other = adapter_key(other, name);
    factor.shape = shape;
    factor.merge = Merge::kCopy;
    factor.split = Split::kColumn;
    factor.vocabulary = factor.fp32 = factor.less_one = false;
    return factor;
  }
  MegatronTensor first_factor(const MegatronTensor& of, const AdaptedParameter& one) const {
    auto in = factor(of, canonical_prefix(of, one.part) + "linear_in", {one.rank, of.shape[1]});
    if (of.split == Split::kRow) in.split = Split::kRow;
    return in;
  }
  MegatronTensor second_factor(const MegatronTensor& of,
                               const AdaptedParameter& one,
                               std::int64_t rows) const {
    auto out = factor(of, canonical_prefix(of, one.part) + "linear_out", {rows, one.rank});
    out.vocabulary = of.vocabulary;
    if (of.merge == Merge::kGateUp) out.merge = Merge::kGateUp;
    return out;
  }

  static void link_whole(MegatronTensor& factor, std::uint32_t model) {
    const auto box = Box::whole(factor.shape);
    factor.parts.push_back({.model = model, .model_box = box, .box = box, .axes = {}});
  }

  void add_fused(const AdaptedParameter& one, const MegatronTensor& of) {
    auto in = first_factor(of, one);
    auto out = second_factor(of, one, of.shape[0]);
    std::map<std::uint32_t, std::uint32_t> second;  // by tensor of the base
    std::optional<std::uint32_t> first;
    for (const auto model : merged_tensors(of)) {
      const auto& tensor = base_.tensors[model];
      const auto prefix = factor_prefix(base_, tensor.name);
      if (!first) {
        first = add_a(prefix, in.shape);
      } else {
        map_.copies.emplace(prefix + ".lora_A.weight", *first);
      }
      second.emplace(model, add_b(prefix, {tensor.shape[0], one.rank}));
    }
    link_whole(in, *first);
    for (const auto& part : of.parts) {
      out.parts.push_back({.model = second.at(part.model),
                           .model_box = rows_of_rank(part.model_box, one.rank),
                           .box = rows_of_rank(part.box, one.rank),
                           .axes = {}});
    }
    map_.megatron.push_back(std::move(in));
    map_.megatron.push_back(std::move(out));
  }

  // The factors of one tensor of Hugging Face, of several in a parameter or in several of them.
  void add_one_tensor(const AdaptedParameter& one, const MegatronTensor& of) {
    const auto part = one.part == AdaptedParameter::kFused ? 0 : one.part;
    const auto& tensor = base_.tensors[merged_tensors(of).at(static_cast<std::size_t>(part))];
    const auto prefix = factor_prefix(base_, tensor.name);
    const auto rows = tensor.shape[0];
    auto in = first_factor(of, one);
    auto out = second_factor(of, one, rows);
    link_whole(in, add_a(prefix, in.shape));
    const auto model = add_b(prefix, out.shape);
    if (of.merge == Merge::kGateUp && one.tp > 1) {
      const auto size = rows / (2 * one.tp);
      require(rows % (2 * one.tp) == 0, ErrorKind::kUsage,
              "{}: {} rows cannot be split over {} ranks", out.key, rows, one.tp);
      for (std::int64_t rank = 0; rank < one.tp; ++rank) {
        for (std::int64_t half = 0; half < 2; ++half) {
          const auto box_at = [&](std::int64_t slot) {
            return Box{.offset = {slot * size, 0}, .size = {size, one.rank}};
          };
          out.parts.push_back({.model = model,
                               .model_box = box_at(2 * rank + half),
                               .box = box_at(half * one.tp + rank),
                               .axes = {}});
        }
      }
    } else {
      link_whole(out, model);
    }
    map_.megatron.push_back(std::move(in));
    map_.megatron.push_back(std::move(out));
  }

  // All experts' factors in two tensors: rows of the first belong to an expert after the other, the
  // columns of the second take turns (peft/tuners/lora/layer.py, ParamWrapper). The parameters of a
  // module wrap each other, gate and up innermost.
  void add_expert(const AdaptedParameter& one, const MegatronTensor& of) {
    const auto experts = base_.config.num_moe_experts;
    const auto e = *of.expert;
    auto prefix = experts_of(of);
    if (of.merge == Merge::kGateUp && changes_down_.contains(prefix)) prefix += ".base_layer";
    auto in = first_factor(of, one);
    auto out = second_factor(of, one, of.shape[0]);
    in.parts.push_back({.model = add_a(prefix, {experts * one.rank, in.shape[1]}),
                        .model_box = {.offset = {e * one.rank, 0}, .size = in.shape},
                        .box = Box::whole(in.shape),
                        .axes = {}});
    out.parts.push_back({.model = add_b(prefix, {out.shape[0], experts * one.rank}, experts),
                         .model_box = {.offset = {0, 0, e}, .size = {out.shape[0], one.rank, 1}},
                         .box = Box::whole(out.shape),
                         .axes = {0, 1}});
    map_.megatron.push_back(std::move(in));
    map_.megatron.push_back(std::move(out));
  }

  // Layers are stacked where all of them have the factor, alike.
  void leave_incomplete_stacks() {
    std::map<std::string, std::map<std::int64_t, Shape>> stacks;
    for (const auto& tensor : map_.megatron) {
      if (!tensor.stacked_key.empty())
        stacks[tensor.stacked_key].emplace(*tensor.layer, tensor.shape);
    }
    const auto is_whole = [](const std::map<std::int64_t, Shape>& layers, std::int64_t size) {
      return std::ssize(layers) == size && std::ranges::all_of(layers, [&](const auto& one) {
               return one.second == layers.begin()->second;
             });
    };
    for (auto& tensor : map_.megatron) {
      if (tensor.stacked_key.empty() || is_whole(stacks.at(tensor.stacked_key), tensor.stack_size))
        continue;
      tensor.stacked_key.clear();
      tensor.also.clear();
    }
  }

  const ModelMap& base_;
  std::span<const AdaptedParameter> adapted_;
  std::set<std::string> changes_down_;  // experts_prefix
  ModelMap map_;
};

}  // namespace

std::string file_prefix(std::string_view hf_name) {
  return std::string(kPeftPrefix) + without_weight(hf_name);
}

std::string factor_prefix(const ModelMap& base, std::string_view hf_name) {
  return file_prefix(module_name(*base.family, hf_name));
}

std::string experts_prefix(const ModelMap& base, std::string_view hf_name) {
  auto name = factor_prefix(base, hf_name);
  return name.substr(0, name.rfind(".experts.")) + ".experts";
}

std::string peft_module(const ModelMap& base, std::string_view module) {
  return factor_prefix(base, file_names(*base.family, module).front());
}

std::vector<std::uint32_t> merged_tensors(const MegatronTensor& tensor) {
  std::vector<std::uint32_t> models;
  for (const auto& part : tensor.parts) {
    if (std::ranges::find(models, part.model) == models.end()) models.push_back(part.model);
  }
  return models;
}

std::string adapter_key(const std::string& key, std::string_view factor) {
  return fmt::format("{}.adapter.{}.weight", without_weight(key), factor);
}

std::string canonical_prefix(const MegatronTensor& tensor, int part) {
  constexpr std::array<std::string_view, 3> kQkv{"adapter_q.", "adapter_k.", "adapter_v."};
  constexpr std::array<std::string_view, 2> kGateUp{"adapter_gate.", "adapter_up."};
  if (part == AdaptedParameter::kFused) return "";
  const auto index = static_cast<std::size_t>(part);
  if (tensor.merge == Merge::kQkvGroups) return std::string(kQkv.at(index));
  require(tensor.merge == Merge::kGateUp, ErrorKind::kBug, "{}: is not merged", tensor.key);
  return std::string(kGateUp.at(index));
}

bool is_part_of_tensor(const ModelMap& base, const MegatronTensor& of) {
  const auto merged = merged_tensors(of);
  return !of.expert && merged.size() == 1 &&
         of.shape.product() < base.tensors[merged.front()].shape.product();
}

void require_own_factors(const ModelMap& base, std::span<const AdaptedParameter> adapted) {
  for (const auto& one : adapted) {
    const auto& of = base.megatron[one.megatron];
    require(!is_part_of_tensor(base, of), ErrorKind::kLayout,
            "{}: Megatron-Core holds it in parts, and Megatron-Bridge has no factors of them",
            base.tensors[of.parts.front().model].name);
  }
}

ModelMap make_adapter_map(const ModelMap& base, std::span<const AdaptedParameter> adapted) {
  return AdapterMapMaker(base, adapted).make();
}

}  // namespace ferry::converter
