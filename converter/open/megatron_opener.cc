#include "converter/open/megatron_opener.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "converter/families/hf_config.h"
#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "converter/families/tower.h"
#include "converter/open/slime_layout.h"
#include "converter/stored/sidecar.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/torch_dist.h"
#include "models/spec/parameter_table.h"

namespace ferry::converter {
namespace {

using distckpt::DType;

// The dtypes that the Hugging Face side had: where a tensor was widened to be stored, the original
// comes back.
void restore_dtypes(const HfForm& hf,
                    std::vector<distckpt::ModelTensor>& tensors,
                    const ModelMap& map) {
  const auto restore = [&](const std::string& name, DType dtype) {
    const auto known = map.index.find(name);
    if (known == map.index.end()) return;
    auto& tensor = tensors[known->second];
    if (distckpt::can_cast(dtype, tensor.dtype) && size_of(dtype) < size_of(tensor.dtype)) {
      tensor.dtype = dtype;
    }
  };
  for (const auto& header : hf.headers) {
    for (const auto& entry : header.entries) restore(entry.name, entry.dtype);
  }
  for (const auto& tensor :
       map.megatron) {  // of another's configuration: only where Megatron widens
    if (!tensor.fp32) continue;
    const auto& name = map.tensors[tensor.parts.front().model].name;
    const auto there = hf.dtypes.find(name);
    if (there != hf.dtypes.end()) restore(name, there->second);
  }
}

bool is_of(const models::ParameterSection& section, std::string_view key) {
  return std::ranges::any_of(section.rows,
                             [&](const auto& row) { return key.ends_with(row.name); });
}

class MegatronOpener {
 public:
  MegatronOpener(const Location& location, Stored stored) : stored_(std::move(stored)) {
    checkpoint_.location = location;
    checkpoint_.megatron_names = true;
    checkpoint_.hf = std::move(stored_.hf);
    checkpoint_.training_state = std::move(stored_.training_state);
    if (stored_.assemble) return;
    for (const auto& tensor : stored_.layout.tensors())
      stored_.outline.emplace_back(tensor.name, tensor.shape);
  }

  Checkpoint open() {
    if (checkpoint_.hf) checkpoint_.hf->leave_quantization();
    read_config();
    drop_absent_prediction_layers();
    FindTensor find;
    if (checkpoint_.hf)
      find = [this](const std::string& name) { return checkpoint_.hf->find(name); };
    checkpoint_.map = make_part_map(config_, checkpoint_.hf ? checkpoint_.hf->part : Part(), find);
    if (stored_.assemble) stored_.assemble(checkpoint_.map, stored_);
    checkpoint_.layout = std::move(stored_.layout);
    checkpoint_.checksums = std::move(stored_.checksums);
    const bool slime = is_slime_layout(stored_.outline);
    auto stored_map = slime ? in_slime_layout(checkpoint_.map) : ModelMap();
    if (slime) use_gated_names(stored_.outline, stored_map);
    const auto& map = slime ? stored_map : checkpoint_.map;
    checkpoint_.links = link_megatron(map, checkpoint_.layout, LinkedSide::kSource);
    link_replicas(std::move(stored_.replicas), checkpoint_.layout, checkpoint_.links);
    checkpoint_.tensors = checkpoint_.map.tensors;
    for (const auto& link : checkpoint_.links.links) {
      const auto& stored = checkpoint_.layout.tensor(link.stored);
      require_weight_dtype(stored.name, stored.dtype);
      checkpoint_.tensors[link.model].dtype = stored.dtype;
    }
    if (checkpoint_.hf) restore_dtypes(*checkpoint_.hf, checkpoint_.tensors, checkpoint_.map);
    if (slime) {
      checkpoint_.megatron_layout = MegatronLayout::kSlime;
    } else {
      add_tower();
    }
    add_derived();
    check_object_keys(map, stored_.objects);
    // Elsewhere it holds the model itself, or arguments alone.
    if (stored_.common && stored_.common_is_apart)
      checkpoint_.common = std::make_shared<distckpt::Pickle>(std::move(*stored_.common));
    return std::move(checkpoint_);
  }

 private:
  void read_config() {
    const auto& folder = checkpoint_.location.folder;
    const auto& common = stored_.common;
    const bool slime = is_slime_layout(stored_.outline);
    require(!slime || checkpoint_.hf, ErrorKind::kNotFound,
            "{}: slime's arguments do not say the sizes of gated delta nets; name the folder of "
            "config.json with --hf-config",
            folder.string());
    const auto args =
        common && !slime ? with_context([&] { return fmt::format("reading {}", common->source()); },
                                        [&] { return read_args(distckpt::common_dict(*common)); })
                         : std::nullopt;
    if (checkpoint_.hf) {
      config_ = parse_hf_config(checkpoint_.hf->config_text(), checkpoint_.hf->config_source());
      with_context([&] { return fmt::format("reading {}", checkpoint_.hf->config_source()); },
                   [&] { find_family(config_.family); });
      read_unsaid_ends(args);
      if (args)
        require_same_model(*args, config_, common->source(), checkpoint_.hf->config_source());
      return;
    }
    if (!args) {
      throw Error(ErrorKind::kNotFound,
                  fmt::format("{}: does not say which model it is of", folder.string()),
                  "name the folder of its config.json with --hf-config");
    }
    config_ = *args;
    if (holds_tower()) refuse_unnamed_tower();
    const bool two_sizes = std::ranges::any_of(stored_.outline, [](const auto& tensor) {
      return is_of(models::kGlobalAttentionSection, tensor.first);
    });
    require(!two_sizes, ErrorKind::kNotFound,
            "{}: its arguments do not say the sizes of attention in Gemma 4; name the folder of "
            "config.json with --hf-config",
            folder.string());
    require(!config_.multi_latent_attention || config_.kv_lora_rank > 0, ErrorKind::kNotFound,
            "{}: its arguments do not say the sizes of latent attention; name the folder of "
            "config.json with --hf-config",
            folder.string());
    if (config_.vocab_size == 0) config_.vocab_size = stored_vocabulary();
    read_from_tensors(stored_.outline, config_);
  }

  // A config.json that leaves it to its class whether the ends are tied is of a model that
  // transformers unties where they differ.
  void read_unsaid_ends(const std::optional<models::TransformerConfig>& args) {
    if (!family_of(config_.family).tied ||
        says_whether_tied(checkpoint_.hf->config_text(), checkpoint_.hf->config_source()))
      return;
    const bool untied = args ? args->untie_embeddings_and_output_weights
                             : std::ranges::any_of(stored_.outline, [](const auto& tensor) {
                                 return language_model_key(tensor.first) == "output_layer.weight";
                               });
    if (untied) config_.untie_embeddings_and_output_weights = true;
  }

  [[noreturn]] void refuse_unnamed_tower() const {
    fail(ErrorKind::kNotFound,
         "{}: holds a model that also sees; name the folder of its config.json with --hf-config",
         checkpoint_.location.folder.string());
  }

  // Keys of a language model below a prefix, and others beside them, whatever their family.
  bool holds_tower() const {
    const auto is_below = [](const auto& tensor) {
      return models::strip_wrappers(tensor.first).starts_with(kLanguageModelPrefix);
    };
    const auto is_beside = [&](const auto& tensor) {
      return !is_below(tensor) && !is_training_state(tensor.first);
    };
    return std::ranges::any_of(stored_.outline, is_below) &&
           std::ranges::any_of(stored_.outline, is_beside);
  }

  // The stored tensors decide whether there are prediction layers.
  void drop_absent_prediction_layers() {
    const bool there = std::ranges::any_of(stored_.outline, [&](auto& tensor) {
      return language_model_key(tensor.first).starts_with(models::kPredictionLayers);
    });
    if (!there) config_.mtp_num_layers = 0;
  }

  // Without a stated vocabulary every stored row counts.
  std::int64_t stored_vocabulary() const {
    for (const auto& [name, shape] : stored_.outline) {
      if (language_model_key(name) == "embedding.word_embeddings.weight" && !shape.empty())
        return shape[0];
    }
    fail(ErrorKind::kLayout, "{}: holds no embedding.word_embeddings.weight",
         checkpoint_.location.folder.string());
  }

  // The tower of a layout that holds it.
  void add_tower() {
    const auto& family = *checkpoint_.map.family;
    const auto layout = layout_of(family, checkpoint_.layout);
    checkpoint_.megatron_layout = layout;
    if (layout == MegatronLayout::kLanguageModel) return;
    if (!checkpoint_.hf) refuse_unnamed_tower();
    for (auto& tensor : tower_tensors(family, layout, checkpoint_.layout))
      checkpoint_.tensors.push_back(std::move(tensor));
    link_tower(checkpoint_.map, layout, checkpoint_.tensors,
               tower_heads(checkpoint_.hf->config_text(), checkpoint_.hf->config_source()),
               checkpoint_.layout, checkpoint_.links);
  }

  // Derived and carried tensors of the Hugging Face side, kept in the sidecar, and the originals of
  // those that Megatron holds rounded, which are their first copies.
  void add_derived() {
    if (!stored_.derived) return;
    distckpt::add_to_layout(*stored_.derived, derived_file().parent_path(), checkpoint_.layout);
    for (const auto& entry : stored_.derived->entries) {
      const auto original = checkpoint_.map.index.find(entry.name);
      const bool is_original = original != checkpoint_.map.index.end();
      const auto model =
          is_original ? original->second : static_cast<std::uint32_t>(checkpoint_.tensors.size());
      if (is_original) {
        take_original(entry, model);
      } else {
        const bool carried = checkpoint_.map.is_carried(entry.name);
        checkpoint_.tensors.push_back(
            {.name = entry.name,
             .dtype = entry.dtype,
             .shape = entry.shape,
             .role = carried ? distckpt::Role::kWeight : distckpt::Role::kDerived});
      }
      checkpoint_.links.links.push_back(
          distckpt::BoxLink::whole(model, *checkpoint_.layout.find(entry.name), entry.shape));
    }
  }

  std::filesystem::path derived_file() const { return derived_path(checkpoint_.location.folder); }

  void take_original(const distckpt::SafetensorsEntry& entry, std::uint32_t model) {
    auto& tensor = checkpoint_.tensors[model];
    require(tensor.shape == entry.shape, ErrorKind::kCorrupt, "{}: {} has shape {}, expected {}",
            derived_file().string(), entry.name, to_string(entry.shape), to_string(tensor.shape));
    tensor.dtype = entry.dtype;
    for (auto& link : checkpoint_.links.links) {
      if (link.model == model) ++link.copy;
    }
  }

  Stored stored_;
  Checkpoint checkpoint_;
  models::TransformerConfig config_;
};

}  // namespace

// Megatron's arguments know nothing of value heads: an output layer with a bias or with fewer rows
// than the vocabulary is one. Nor do they know of norms behind attention and feed-forward, or
// behind them alone, or over all heads; old ones nothing of a router's bias and gate either.
void read_from_tensors(const TensorOutline& outline, models::TransformerConfig& config) {
  bool pre_norm = false;
  for (const auto& [name, shape] : outline) {
    const auto key = language_model_key(name);
    if (key.ends_with(".mlp.router.expert_bias")) config.moe_router_enable_expert_bias = true;
    if (key.ends_with(".mlp.shared_experts.gate_weight")) config.moe_shared_expert_gate = true;
    pre_norm |=
        key.ends_with(".linear_qkv.layer_norm_weight") || key.ends_with(".input_layernorm.weight");
    if (key.ends_with(".post_self_attn_layernorm.weight"))
      config.post_norm = models::PostNorm::kOfLayer;
    if (key.ends_with(".linear_proj.post_layernorm.weight"))
      config.post_norm = models::PostNorm::kOfLinear;
    if (key.ends_with(".self_attention.q_layernorm.weight") && !config.multi_latent_attention &&
        !shape.empty() && shape[shape.rank() - 1] != config.kv_channels)
      config.qk_layernorm_full = true;
    if (key == "output_layer.bias") config.head = models::Head::kTokenClassification;
    if (key != "output_layer.weight" || shape.empty()) continue;
    if (shape[0] >= config.vocab_size) continue;
    if (config.head == models::Head::kLanguageModel)
      config.head = models::Head::kSequenceClassification;
    config.num_labels = shape[0];
  }
  if (config.post_norm == models::PostNorm::kOfLayer) config.pre_norm = pre_norm;
  set_family(config, infer_family(config));
}

Checkpoint open_megatron(const Location& location, Stored stored) {
  return MegatronOpener(location, std::move(stored)).open();
}

}  // namespace ferry::converter
