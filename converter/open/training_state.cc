#include "converter/open/training_state.h"

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "converter/open/checkpoint.h"
#include "converter/optimizer/optimizer_records.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/torch_dist.h"

namespace ferry::converter {
namespace {

using distckpt::DType;
using distckpt::PickleKind;
using distckpt::PickleValue;
using distckpt::TorchDistCheckpoint;

class StateReader {
 public:
  explicit StateReader(Checkpoint& checkpoint)
      : checkpoint_(checkpoint),
        torch_dist_(distckpt::read_torch_dist(checkpoint.location.folder)) {}

  void read() {
    require(checkpoint_.common != nullptr, ErrorKind::kLayout,
            "{}: holds the state of an optimizer, but no arguments of the run",
            checkpoint_.location.folder.string());
    const auto common = distckpt::common_dict(*checkpoint_.common);
    const auto parallel = read_parallel_args(common);
    require(parallel.has_value(), ErrorKind::kLayout,
            "{}: holds the state of an optimizer, but no arguments of the run",
            checkpoint_.location.folder.string());
    state_.parallel = *parallel;
    if (checkpoint_.map.config.num_moe_experts == 0) {  // Megatron-LM sets them all the same
      state_.parallel.expert_model_parallel_size = 1;
      state_.parallel.expert_tensor_parallel_size.reset();
    }
    if (has_optimizer(checkpoint_)) {
      const auto form = form_of(common);
      checkpoint_.map.trains_tower = has_state_of_tower();
      state_.first_tensor = static_cast<std::uint32_t>(checkpoint_.tensors.size());
      state_.optimizer = add_optimizer_tensors(torch_dist_, checkpoint_.map, state_.parallel, form,
                                               checkpoint_.layout, checkpoint_.links,
                                               checkpoint_.tensors, checkpoint_.checksums);
      read_param_groups(common);
      const auto stranger = find_stranger();
      if (!stranger) {
      } else if (form.starts_with("dp_")) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: is not the master of the weights: parameters lie in the "
                                "optimizer's buckets in an order that is not known",
                                *stranger),
                    "--no-save-optim converts the model alone");
      } else {
        state_.notes.push_back(fmt::format(
            "{}: is not the master of the weights. megatron-core 0.19 mixes parameters up as it "
            "saves {} where a buffer has several buckets",
            *stranger, form));
      }
    }
    read_objects();
    checkpoint_.training = std::move(state_);
  }

 private:
  bool has_state_of_tower() const {
    const auto of_tower = fmt::format(".{}", models::kVisionModel);
    return checkpoint_.map.config.computes_vision() &&
           std::ranges::any_of(checkpoint_.training_state, [&](const std::string& key) {
             return key.find(kStatePrefix) != std::string::npos &&
                    key.find(of_tower) != std::string::npos;
           });
  }

  // param_state_sharding_type, of one optimizer or of the first of several.
  static std::string form_of(PickleValue common) {
    const auto optimizer = common.find("optimizer");
    if (!optimizer || optimizer->kind() != PickleKind::kDict) return {};
    if (auto form = form_of_one(*optimizer); !form.empty()) return form;
    for (const auto& [key, value] : optimizer->items()) {
      if (key.kind() == PickleKind::kInt && value.kind() == PickleKind::kDict)
        return form_of_one(value);
    }
    return {};
  }
  static std::string form_of_one(PickleValue optimizer) {
    const auto form = optimizer.find("param_state_sharding_type");
    return form ? std::string(form->as_string()) : "";
  }

  void read_param_groups(PickleValue common) {
    auto groups = param_groups_of_common(common.at("optimizer"));
    if (groups.empty()) groups = param_groups_of_objects();
    require(!groups.empty(), ErrorKind::kLayout,
            "{}: the optimizer's param_groups are missing, so that its steps are not known",
            checkpoint_.location.folder.string());
    state_.param_groups = std::move(groups);
  }

  // Each model parallel rank has its own; they must agree.
  std::vector<PickleValue> param_groups_of_objects() {
    std::vector<PickleValue> found;
    std::vector<std::string> texts;
    for (const auto& object : torch_dist_.objects) {
      const auto key = parse_group_key(models::strip_wrappers(object.key), "optimizer");
      if (!key) continue;
      const auto pickle =
          std::make_shared<distckpt::Pickle>(distckpt::read_object(torch_dist_, object));
      const auto root = pickle->root();
      require(root.kind() == PickleKind::kList && root.size() == 1 && root[0].find("param_groups"),
              ErrorKind::kCorrupt, "{}: holds {}, not an optimizer's param_groups", object.key,
              root.describe());
      const auto text = root.describe(1 << 20);
      const auto index = static_cast<std::size_t>(key->optimizer);
      require(index <= found.size(), ErrorKind::kLayout,
              "{}: there is no such object of the optimizer before it", object.key);
      if (index == found.size()) {
        state_.pickles.push_back(pickle);
        found.push_back(root[0]);
        texts.push_back(text);
      }
      require(text == texts[index], ErrorKind::kLayout, "{}: other ranks have other param_groups",
              object.key);
    }
    return found;
  }

  void read_objects() {
    for (const auto& object : torch_dist_.objects) {
      const auto key = models::strip_wrappers(object.key);
      if (key.starts_with("rng_state/")) {
        state_.rng.push_back(
            {.key = std::string(key), .archive = distckpt::read_archive(torch_dist_, object)});
      } else if (key.starts_with(kTrainerPrefix)) {
        state_.objects.push_back(
            {.key = std::string(key), .archive = distckpt::read_archive(torch_dist_, object)});
      } else if (key.starts_with("rerun_state_machine")) {
        state_.notes.push_back(
            "rerun_state_machine was left out: it belongs to the ranks of the run that wrote it");
      } else if (key.find("grad_scaler") != std::string_view::npos) {
        state_.notes.push_back(fmt::format("{} was left out: the loss scale starts anew", key));
      }
    }
    std::ranges::sort(state_.notes);
    const auto repeats = std::ranges::unique(state_.notes);
    state_.notes.erase(repeats.begin(), repeats.end());
  }

  // Checks that each master, where it begins, rounds to its weight: that proves the order in which
  // parameters were found. Returns the first one that does not.
  std::optional<std::string> find_stranger() {
    const auto source = checkpoint_.source();
    const auto prefix = fmt::format("{}param.", kStatePrefix);
    std::unordered_map<std::string, std::uint32_t> weights;  // Megatron's keys
    for (std::uint32_t i = 0; i < checkpoint_.layout.tensors().size(); ++i)
      weights.try_emplace(std::string(models::strip_wrappers(checkpoint_.layout.tensor(i).name)),
                          i);
    for (const auto& tensor : checkpoint_.layout.tensors()) {
      if (!tensor.name.starts_with(prefix) || tensor.name.ends_with(')')) continue;
      const auto weight = weights.find(tensor.name.substr(prefix.size()));
      if (weight == weights.end()) continue;
      for (const auto& shard : tensor.shards) {
        const auto box = find_difference(*source, tensor, shard, weight->second);
        if (box) return fmt::format("{} {}", tensor.name, to_string(*box));
      }
    }
    return std::nullopt;
  }

  static constexpr std::int64_t kCompared = 32;  // elements of each shard

  std::optional<distckpt::Box> find_difference(distckpt::FileSource& source,
                                               const distckpt::TensorLayout& master,
                                               const distckpt::Shard& shard,
                                               std::uint32_t weight_index) const {
    const auto& weight = checkpoint_.layout.tensor(weight_index);
    const int last = master.shape.rank() - 1;
    auto row = shard.box;  // the beginning of its first row
    for (int d = 0; d < last; ++d) row.size[d] = 1;
    row.size[last] = std::min(row.size[last], kCompared);
    for (const auto& there : weight.shards) {
      const auto both = intersect(there.box, row);
      if (!both) continue;
      const auto masters = read_box(source, shard, *both, DType::kF32);
      const auto weights = read_box(source, there, *both, weight.dtype);
      std::vector<std::byte> rounded(weights.size());
      distckpt::cast(DType::kF32, masters, weight.dtype, rounded, distckpt::CastRule::kRound);
      if (rounded != weights) return both;
    }
    return std::nullopt;
  }

  static std::vector<std::byte> read_box(distckpt::FileSource& source,
                                         const distckpt::Shard& shard,
                                         const distckpt::Box& box,
                                         DType dtype) {
    auto at = shard.at;
    for (int d = 0; d < box.rank(); ++d)
      at.offset += (box.offset[d] - shard.box.offset[d]) * at.strides[d];
    std::vector<std::byte> bytes(static_cast<std::size_t>(box.volume() * size_of(dtype)));
    std::vector<distckpt::ChecksumPart> parts;
    source.read({.at = at, .size = box.size, .element_size = size_of(dtype)}, bytes, parts);
    return bytes;
  }

  Checkpoint& checkpoint_;
  TorchDistCheckpoint torch_dist_;
  TrainingState state_;
};

}  // namespace

std::vector<PickleValue> param_groups_of_common(PickleValue optimizer) {
  std::vector<PickleValue> found;
  const auto add = [&](PickleValue one) {
    const auto inner = one.find("optimizer");
    if (inner && inner->find("param_groups")) found.push_back(*inner);
  };
  add(optimizer);
  if (!found.empty()) return found;
  for (const auto& [key, value] : optimizer.items()) {
    if (key.kind() == PickleKind::kInt && value.kind() == PickleKind::kDict) add(value);
  }
  return found;
}

bool has_optimizer(const Checkpoint& checkpoint) {
  return std::ranges::any_of(checkpoint.training_state, [](const std::string& key) {
    return key.find("optimizer.") != std::string::npos;
  });
}

void add_training_state(Checkpoint& checkpoint) {
  if (!checkpoint.training_state.empty()) StateReader(checkpoint).read();
}

}  // namespace ferry::converter
