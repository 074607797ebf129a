#include "converter/write/megatron_target.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "converter/families/megatron_links.h"
#include "converter/open/slime_layout.h"
#include "converter/optimizer/common_state.h"
#include "converter/optimizer/optimizer_tensors.h"
#include "converter/optimizer/sharded_state.h"
#include "converter/stored/sidecar.h"
#include "converter/write/run_config.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::DType;
using distckpt::ModelTensor;

// The narrowest dtype that holds both without loss.
DType widest(DType a, DType b, const std::string& name) {
  if (a == b) return a;
  require(distckpt::can_cast(a, b), ErrorKind::kLayout, "{}: {} and {} cannot be stored together",
          name, short_name(a), short_name(b));
  if (a == DType::kF64 || b == DType::kF64) return DType::kF64;
  return DType::kF32;  // also of BF16 and F16
}

// Per Megatron tensor: one that is stacked over layers or experts has one dtype for all of them.
std::vector<DType> stored_dtypes(const ModelMap& map, const std::vector<ModelTensor>& tensors) {
  std::map<std::string_view, DType> by_key;
  for (const auto& tensor : map.megatron) {
    for (const auto& part : tensor.parts) {
      auto dtype = tensors[part.model].dtype;
      if (tensor.fp32) dtype = widest(dtype, DType::kF32, tensor.key);
      const auto [at, added] = by_key.emplace(map.written_key(tensor), dtype);
      if (!added) at->second = widest(at->second, dtype, tensor.key);
    }
  }
  std::vector<DType> dtypes;
  for (const auto& tensor : map.megatron) dtypes.push_back(by_key.at(map.written_key(tensor)));
  return dtypes;
}

class MegatronTarget : public FileTarget {
 public:
  MegatronTarget(const Checkpoint& source,
                 const std::vector<ModelTensor>& tensors,
                 const MegatronTargetOptions& options,
                 const fs::path& folder)
      : source_(source),
        options_(options),
        folder_(folder),
        slime_map_(options.layout == MegatronLayout::kSlime ? in_slime_layout(source.map)
                                                            : ModelMap()),
        torch_dist_(make(source, written_map(), tensors, options, folder)) {
    layout_ = torch_dist_.layout();
    links_ = link_megatron(written_map(), layout_);
    if (keeps_tower(options.layout))
      link_tower(source.map, options.layout, tensors, heads_of_tower(source), layout_, links_);
    if (const auto& training = source.training)
      link_optimizer(source.map, training->optimizer.kinds, training->first_tensor, layout_,
                     links_);
    add_derived(tensors);
    for (const auto& tensor : source.map.megatron) {
      const auto& model = tensors[tensor.parts.front().model];
      if (tensor.fp32 && model.dtype != DType::kF32) narrow_.emplace(model.name, model.dtype);
    }
  }

 private:
  std::vector<fs::path> other_files() const override {
    std::vector<fs::path> names{distckpt::kTorchDistMetadata, distckpt::kTorchDistConfig,
                                distckpt::kCommon};
    if (writes_run_config()) names.emplace_back(kRunConfig);
    if (!source_.hf) return names;
    names.push_back(fs::path(distckpt::kSidecar) / distckpt::kSidecarIndex);
    for (const auto& [name, _] : sidecar_files(*source_.hf, !options_.dtype))
      names.push_back(fs::path(distckpt::kSidecar) / name);
    return names;
  }

  std::vector<distckpt::ChecksumRange> protected_ranges() const override {
    return torch_dist_.protected_ranges();
  }

  void prepare() const override {
    if (derived_) fs::create_directories(derived_path(folder_).parent_path());
  }

  void begin_files(distckpt::FileSink& sink) const override {
    write_derived_header(sink);
    torch_dist_.begin_files(sink);
  }

  void finish_range(distckpt::FileSink& sink, std::uint32_t range) const override {
    torch_dist_.finish_chunk(sink, range);
  }

  void finish_files(distckpt::FileSink& sink) const override {
    write_derived_header(sink);
    torch_dist_.finish_files(sink);
  }

  void write_derived_header(distckpt::FileSink& sink) const {
    if (!derived_) return;
    const auto storage = static_cast<distckpt::StorageId>(layout_.storages().size() - 1);
    if (!sink.writes(storage)) return;  // another process does
    sink.write_raw(storage, 0, distckpt::as_bytes(derived_->prefix));
  }

  void finish_folder() const override {
    if (source_.hf) {
      std::optional<HfForm> cast;
      const auto& form = form_as(*source_.hf, options_.dtype, cast);
      write_sidecar(folder_, form, !options_.dtype, narrow_, source_.map.chosen);
    }
    torch_dist_.finish_folder();
    if (!writes_run_config()) return;
    const auto common =
        distckpt::read_common_state({.folder = folder_, .has_common_file = true}).value();
    distckpt::write_text(folder_ / kRunConfig,
                         run_config_text(find_args(distckpt::common_dict(common)).value(), source_,
                                         options_.layout, ""));
  }

  bool writes_run_config() const {
    return options_.run_config && !run_config_problem(source_, options_.layout);
  }

  // The parameters under the names that they have in the target.
  const ModelMap& written_map() const {
    return options_.layout == MegatronLayout::kSlime ? slime_map_ : source_.map;
  }

  static distckpt::TorchDistTarget make(const Checkpoint& source,
                                        const ModelMap& written_map,
                                        const std::vector<ModelTensor>& tensors,
                                        const MegatronTargetOptions& options,
                                        const fs::path& folder) {
    const auto dtypes = stored_dtypes(written_map, tensors);
    const auto states_of = [&](const ModelMap& map, const std::vector<DType>& of) {
      return options.mesh != nullptr ? sharded_state(map, of, options.mesh->ranks)
                                     : sharded_state(map, of, options.parallel);
    };
    auto ranks = states_of(written_map, dtypes);
    require(options.layout != MegatronLayout::kSlime || !source.training, ErrorKind::kUsage,
            "--megatron-layout {}: optimizer and RNG are not converted: leave them behind with "
            "--no-save-optim",
            layout_name(options.layout));
    if (keeps_tower(options.layout)) add_tower(source, tensors, options, ranks);
    // The dtype of most of the model is that of its first weight.
    WrittenState written{.dtype = dtypes.front(),
                         .iteration = options.iteration.number.value_or(0)};
    std::optional<CarriedState> carried;
    if (source.common) carried = {.common = distckpt::common_dict(*source.common)};
    if (const auto& training = source.training) {
      written.optimizer = !training->optimizer.kinds.empty();
      if (written.optimizer) carried->optimizers = training->param_groups;
      for (const auto& kind : training->optimizer.kinds) {
        const auto map = optimizer_map(source.map, kind);
        const auto states = states_of(map, std::vector(map.megatron.size(), DType::kF32));
        for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
          auto& to = ranks[rank].tensors;
          to.insert(to.end(), states[rank].tensors.begin(), states[rank].tensors.end());
        }
      }
      written.rng = keeps_rng(*training, options.parallel);
      auto& objects = ranks.front().objects;
      if (written.rng) objects = training->rng;
      objects.insert(objects.end(), training->objects.begin(), training->objects.end());
    }
    return {folder, ranks, [&](distckpt::PickleWriter& pickle) {
              write_common_state(pickle, source.map.config, options.parallel, written, carried);
            }};
  }

  static std::int64_t heads_of_tower(const Checkpoint& source) {
    require_hf_form(source);
    return tower_heads(source.hf->config_text(), source.hf->config_source());
  }

  // The language model goes below its prefix, and the tower to the first rank.
  static void add_tower(const Checkpoint& source,
                        const std::vector<ModelTensor>& tensors,
                        const MegatronTargetOptions& options,
                        std::vector<distckpt::RankState>& ranks) {
    for (auto& rank : ranks) {
      for (auto& tensor : rank.tensors) tensor.key.insert(0, kLanguageModelPrefix);
      for (auto& state : rank.extra_states) state.key.insert(0, kLanguageModelPrefix);
    }
    auto tower = tower_state(source.map, options.layout, tensors, heads_of_tower(source));
    std::ranges::move(tower.tensors, std::back_inserter(ranks.front().tensors));
    std::ranges::move(tower.extra_states, std::back_inserter(ranks.front().extra_states));
  }

  // Tensors that Megatron holds less a number, rounded, where the source has them as they are.
  std::set<std::uint32_t> rounded() const {
    std::set<std::uint32_t> found;
    if (!source_.hf) return found;
    for (const auto& link : links_.links) {
      if (link.less != 0) found.insert(link.model);
    }
    for (const auto& link : source_.links.links) {
      if (link.copy == 0 && link.less != 0) found.erase(link.model);
    }
    return found;
  }

  // inv_freq, a vision tower: Megatron has no place for them, the sidecar does. It also keeps what
  // Megatron rounds: the first copy, of which Megatron's is the second.
  void add_derived(const std::vector<ModelTensor>& tensors) {
    const auto kept = rounded();
    for (auto& link : links_.links) {
      if (kept.contains(link.model)) ++link.copy;
    }
    const auto is_beside = [&](std::uint32_t i) {
      return tensors[i].role == distckpt::Role::kDerived || kept.contains(i) ||
             (!keeps_tower(options_.layout) && source_.map.is_carried(tensors[i].name));
    };
    std::vector<distckpt::SafetensorsEntry> entries;
    for (std::uint32_t i = 0; i < tensors.size(); ++i) {
      const auto& tensor = tensors[i];
      if (is_beside(i))
        entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
    }
    if (entries.empty()) return;
    const auto path = derived_path(folder_);
    derived_ = distckpt::make_safetensors_header(path.filename().string(), std::move(entries), {});
    distckpt::add_to_layout(*derived_, path.parent_path(), layout_);
    for (std::uint32_t i = 0; i < tensors.size(); ++i) {
      if (!is_beside(i)) continue;
      links_.links.push_back(
          distckpt::BoxLink::whole(i, *layout_.find(tensors[i].name), tensors[i].shape));
    }
  }

  const Checkpoint& source_;
  MegatronTargetOptions options_;
  fs::path folder_;
  const ModelMap slime_map_;
  distckpt::TorchDistTarget torch_dist_;
  std::optional<distckpt::SafetensorsHeader> derived_;
  std::map<std::string, DType> narrow_;  // of tensors that Megatron widens to fp32
};

}  // namespace

bool keeps_rng(const TrainingState& training, const models::ParallelConfig& parallel) {
  return !training.rng.empty() &&
         training.parallel.tensor_model_parallel_size == parallel.tensor_model_parallel_size &&
         training.parallel.pipeline_model_parallel_size == parallel.pipeline_model_parallel_size;
}

std::unique_ptr<FileTarget> make_megatron_target(const Checkpoint& source,
                                                 const std::vector<ModelTensor>& tensors,
                                                 const MegatronTargetOptions& options,
                                                 const fs::path& folder) {
  return std::make_unique<MegatronTarget>(source, tensors, options, folder);
}

}  // namespace ferry::converter
