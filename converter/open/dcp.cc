// Sharded checkpoints of torch.distributed.checkpoint (DCP), as FSDP trainers write them, with
// Hugging Face names, and Megatron's torch_dcp and fsdp_dtensor, with those of its modules.
#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/families/families.h"
#include "converter/families/megatron_links.h"
#include "converter/families/module_names.h"
#include "converter/open/formats.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_dist.h"

namespace ferry::converter {
namespace {

// Every model has its embedding: what stands before the name of it stands before all names.
constexpr std::string_view kHfAnchor = "model.embed_tokens.weight";
constexpr std::string_view kMegatronAnchor = "embedding.word_embeddings.weight";

// Its names in files of all families and in their modules.
std::set<std::string> hf_anchors() {
  std::set<std::string> anchors;
  for (const auto model_type : known_families()) {
    const auto& family = family_of(model_type);
    if (family.passes_through) continue;
    anchors.emplace(family.names->embedding());
    anchors.insert(module_name(family, family.names->embedding()));
  }
  return anchors;
}

// The part of a name before an anchor that it ends in: the shortest, of several.
std::optional<std::string> prefix_before(const std::set<std::string>& anchors,
                                         const std::string& name) {
  std::optional<std::string> prefix;
  for (const auto& anchor : anchors) {
    if (!name.ends_with(anchor)) continue;
    auto before = name.substr(0, name.size() - anchor.size());
    const bool whole = before.empty() || before.ends_with('.');
    if (whole && (!prefix || before.size() < prefix->size())) prefix = std::move(before);
  }
  return prefix;
}

// Takes out the parts that wrappers put into the names of the modules that they wrap: FSDP,
// torch.compile, activation checkpointing.
std::string without_wrappers(std::string_view key) {
  constexpr std::array<std::string_view, 3> kWrappers{"_fsdp_wrapped_module.", "_orig_mod.",
                                                      "_checkpoint_wrapped_module."};
  std::string name(key);
  for (const auto wrapper : kWrappers) {
    for (auto at = name.find(wrapper); at != std::string::npos; at = name.find(wrapper))
      name.erase(at, wrapper.size());
  }
  return name;
}

// State of a training run, by the first part of its key.
bool is_training_key(std::string_view key) {
  constexpr std::array<std::string_view, 9> kParts{
      "optim",     "optimizer",   "optimizers", "lr_scheduler",       "scheduler",
      "rng_state", "train_state", "dataloader", "opt_param_scheduler"};
  return std::ranges::find(kParts, key.substr(0, key.find('.'))) != kParts.end();
}

class Reader {
 public:
  Reader(const Location& location, const OpenOptions& options)
      : location_(location), options_(options) {}

  Stored read() {
    checkpoint_ = distckpt::read_dcp(location_.folder);
    if (!checkpoint_.is_planned) {
      throw Error(
          ErrorKind::kNotFound,
          fmt::format("{}: is missing", (location_.folder / distckpt::kTorchDistConfig).string()),
          "Megatron-Core writes it last: without it the checkpoint is not whole");
    }
    find_prefix();
    read_configuration();
    add_tensors();
    for (const auto& object : checkpoint_.objects) {
      if (!is_extra_state(object.key)) stored_.training_state.push_back(object.key);
    }
    return std::move(stored_);
  }

 private:
  // Finds the prefix of the names of the model's tensors: "", "model.", "state.model.module.".
  void find_prefix() {
    const auto of_hf = hf_anchors();
    const std::set<std::string> of_megatron{std::string(kMegatronAnchor)};
    std::set<std::pair<std::string, bool>> found;
    for (const auto& tensor : checkpoint_.tensors) {
      const auto name = without_wrappers(tensor.key);
      for (const auto* names : {&of_hf, &of_megatron}) {
        const auto prefix = prefix_before(*names, name);
        if (prefix && !is_training_key(*prefix)) found.emplace(*prefix, names == &of_megatron);
      }
    }
    const auto source = (location_.folder / distckpt::kTorchDistMetadata).string();
    if (found.empty()) {
      throw Error(
          ErrorKind::kLayout,
          fmt::format("{}: no key ends in {} or {}", source, kHfAnchor, kMegatronAnchor),
          "only the names of Hugging Face and Megatron-Core are known, not those that other "
          "trainers give to tensors");
    }
    require(found.size() == 1, ErrorKind::kLayout, "{}: holds several models: \"{}\" and \"{}\"",
            source, found.begin()->first, found.rbegin()->first);
    prefix_ = found.begin()->first;
    stored_.megatron_names = found.begin()->second;
  }

  void read_configuration() {
    if (!stored_.megatron_names) {
      stored_.hf = hf_form_of(location_, options_);
      return;
    }
    if (location_.has_own_config() || !options_.hf_config.empty())
      stored_.hf = hf_form_of(location_, options_);
    const auto args =
        std::ranges::find(checkpoint_.objects, "args", &distckpt::TorchDistObject::key);
    if (args != checkpoint_.objects.end())
      stored_.common = distckpt::read_object(checkpoint_, *args);
  }

  void add_tensors() {
    std::vector<distckpt::TorchDistTensor> model;
    for (auto& tensor : checkpoint_.tensors) {
      auto name = without_wrappers(tensor.key);
      if (is_extra_state(name)) continue;
      if (!is_of_model(name)) {
        stored_.training_state.push_back(tensor.key);
        continue;
      }
      if (name.starts_with(prefix_)) name.erase(0, prefix_.size());
      tensor.key =
          stored_.megatron_names ? key_of_module(models::strip_wrappers(name), 0, 0) : name;
      model.push_back(std::move(tensor));
    }
    std::vector<const distckpt::TorchDistTensor*> wanted;
    for (const auto& tensor : model) wanted.push_back(&tensor);
    auto resolved = distckpt::resolve_layout(checkpoint_, wanted);
    stored_.layout = std::move(resolved.layout);
    stored_.checksums = std::move(resolved.checksums);
  }

  // A tensor beside the model is no part of it; a tensor in it is, whether or not it is known.
  bool is_of_model(const std::string& name) const {
    if (name.starts_with(prefix_)) return !prefix_.empty() || !is_training_key(name);
    const auto part = prefix_.substr(0, prefix_.find('.') + 1);
    return name.starts_with(part);
  }

  const Location& location_;
  const OpenOptions& options_;
  distckpt::TorchDistCheckpoint checkpoint_;
  Stored stored_;
  std::string prefix_;
};

}  // namespace

Stored read_dcp(const Location& location, const OpenOptions& options) {
  return Reader(location, options).read();
}

}  // namespace ferry::converter
