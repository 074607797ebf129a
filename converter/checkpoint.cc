#include "converter/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <utility>

#include "converter/hf_config.h"
#include "converter/megatron_args.h"
#include "converter/megatron_links.h"
#include "converter/sidecar.h"
#include "distckpt/cast.h"
#include "distckpt/dequantize.h"
#include "distckpt/error.h"
#include "distckpt/file_io.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Box;
using distckpt::DType;
using distckpt::Iteration;

Iteration read_tracker(const fs::path& path) {
  auto text = distckpt::read_text(path, 1024);
  while (!text.empty() && std::string_view(" \n\r\t").find(text.back()) != std::string_view::npos)
    text.pop_back();
  const auto iteration = distckpt::parse_iteration(text);
  require(iteration.has_value(), ErrorKind::kCorrupt,
          "{}: holds \"{}\", neither a number nor \"release\"", path.string(), text.substr(0, 40));
  return *iteration;
}

// The iterations that a Megatron root holds.
std::vector<Iteration> list_iterations(const fs::path& root) {
  std::vector<Iteration> found;
  for (const auto& entry : fs::directory_iterator(root)) {
    const auto iteration = distckpt::parse_iteration_folder(entry.path().filename().string());
    if (iteration && distckpt::is_torch_dist(entry.path())) found.push_back(*iteration);
  }
  return found;
}

Location locate_iteration(const fs::path& root, std::optional<Iteration> wanted) {
  const auto tracker = root / distckpt::kTracker;
  const auto there = list_iterations(root);
  if (!wanted && fs::exists(tracker)) wanted = read_tracker(tracker);
  if (!wanted && there.size() == 1) wanted = there.front();
  if (!wanted) {
    throw Error(ErrorKind::kNotFound,
                fmt::format("{}: holds {} iterations and no {}", root.string(), there.size(),
                            distckpt::kTracker),
                "choose one with --iteration");
  }
  const auto folder = root / distckpt::iteration_folder(*wanted);
  if (!distckpt::is_torch_dist(folder)) {
    const bool legacy = fs::exists(folder / "mp_rank_00") || fs::exists(folder / "mp_rank_00_000");
    std::vector<std::string> names;
    for (const auto& one : there) names.push_back(distckpt::iteration_text(one));
    throw Error(
        ErrorKind::kNotFound,
        legacy ? fmt::format("{}: is a legacy checkpoint (mp_rank_*), which is not read",
                             folder.string())
               : fmt::format("{}: is not there, or holds no {}", folder.string(),
                             distckpt::kTorchDistMetadata),
        names.empty() ? "" : fmt::format("iterations that are there: {}", fmt::join(names, ", ")));
  }
  return {.format = Format::kTorchDist, .root = root, .folder = folder, .iteration = wanted};
}

// The families' tensors are all weights.
void require_floats(const std::string& name, DType dtype) {
  require(distckpt::can_cast(dtype, DType::kF32), ErrorKind::kLayout,
          "{}: is of dtype {}, weights of fp16, bf16, fp32 or fp64 are expected", name,
          short_name(dtype));
}

// What was dequantised is written anew, with a configuration that says so. A Megatron checkpoint is
// not quantised, though the configuration named for it may be.
void leave_quantization(HfForm& hf) {
  const auto text = hf.config_text();
  if (!parse_quantization(text, hf.config_source())) return;
  hf.new_config = without_quantization(text, DType::kBF16, hf.config_source());
  hf.headers.clear();
  hf.index_text.reset();
}

// What a Hugging Face folder holds, linked to the model: each tensor is itself.
class HfOpener {
 public:
  HfOpener(const Location& location, bool keep_fp8) : keep_fp8_(keep_fp8) {
    checkpoint_.location = location;
  }

  Checkpoint open() {
    checkpoint_.hf = read_hf_folder(checkpoint_.location.folder);
    const auto& hf = *checkpoint_.hf;
    checkpoint_.map = make_model_map(config_of(hf));
    checkpoint_.tensors = checkpoint_.map.tensors;
    quantization_ = parse_quantization(hf.config_text(), hf.config_source());
    for (const auto& header : hf.headers) {
      distckpt::add_to_layout(header, checkpoint_.location.folder, checkpoint_.layout);
    }
    for (const auto& header : hf.headers) {
      for (const auto& entry : header.entries) link(header, entry);
    }
    if (quantization_ && !keep_fp8_) leave_quantization(*checkpoint_.hf);
    std::vector<std::string_view> missing;
    for (std::uint32_t i = 0; i < checkpoint_.map.tensors.size(); ++i) {
      if (!found_.contains(i)) missing.push_back(checkpoint_.tensors[i].name);
    }
    if (!missing.empty()) {
      throw Error(
          ErrorKind::kLayout,
          fmt::format(
              "{}: {} is missing{}", checkpoint_.location.folder.string(), missing.front(),
              missing.size() == 1 ? "" : fmt::format(", and {} other tensors", missing.size() - 1)),
          "the download may be incomplete, or config.json of another model");
    }
    return std::move(checkpoint_);
  }

 private:
  // transformers drops prediction layers when it saves, and leaves the number of them in place.
  static distckpt::TransformerConfig config_of(const HfForm& hf) {
    auto config = parse_hf_config(hf.config_text(), hf.config_source());
    const bool has_prediction = std::ranges::any_of(hf.headers, [&](const auto& header) {
      return std::ranges::any_of(header.entries, [&](const auto& entry) {
        return is_prediction_tensor(config, entry.name);
      });
    });
    if (!has_prediction) config.mtp_num_layers = 0;
    return config;
  }

  void link(const distckpt::SafetensorsHeader& header, const distckpt::SafetensorsEntry& entry) {
    const auto& map = checkpoint_.map;
    const auto second = map.copies.find(entry.name);
    const bool copy = second != map.copies.end();
    const auto known = copy ? second : map.index.find(entry.name);
    std::uint32_t model = 0;
    int scale = -1;
    if (quantization_ && entry.name.ends_with(kScaleSuffix)) return link_scales(header, entry);
    if (quantization_ && distckpt::can_dequantize(entry.dtype)) {
      if (!keep_fp8_) scale = scales_of(header, entry.name);
    } else {
      require_floats(entry.name, entry.dtype);
    }
    if (copy || known != map.index.end()) {
      model = known->second;
      auto& tensor = checkpoint_.tensors[model];
      require(tensor.shape == entry.shape, ErrorKind::kLayout,
              "{}: has shape {}, expected {} as config.json says ({})", entry.name,
              to_string(entry.shape), to_string(tensor.shape), header.filename);
      if (!copy) {
        tensor.dtype = scale < 0 ? entry.dtype : DType::kBF16;
        found_.insert(model);
      }
    } else {
      if (!is_derived(entry)) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: no rule of the family {} maps it ({})", entry.name,
                                checkpoint_.map.family->model_type, header.filename),
                    entry.name.ends_with(kScaleSuffix)
                        ? "scales of fp8 blocks need a quantization_config in config.json"
                        : "");
      }
      model = static_cast<std::uint32_t>(checkpoint_.tensors.size());
      checkpoint_.tensors.push_back({.name = entry.name,
                                     .dtype = entry.dtype,
                                     .shape = entry.shape,
                                     .role = distckpt::Role::kDerived});
    }
    const auto stored = *checkpoint_.layout.find(entry.name);
    checkpoint_.links.links.push_back({.model = model,
                                       .model_box = Box::whole(entry.shape),
                                       .stored = stored,
                                       .stored_box = Box::whole(entry.shape),
                                       .copy = copy ? ++num_copies_[model] : 0,
                                       .scale = scale});
  }

  // The index of the scales of a weight.
  int scales_of(const distckpt::SafetensorsHeader& header, const std::string& weight) {
    const auto name = fmt::format("{}{}", weight, kScaleSuffix);
    const auto stored = checkpoint_.layout.find(name);
    require(stored.has_value(), ErrorKind::kLayout, "{}: is in FP8, but {} is missing ({})", weight,
            name, header.filename);
    auto& scales = checkpoint_.links.scales;
    scales.push_back({.stored = *stored, .block = quantization_->block});
    return static_cast<int>(scales.size()) - 1;
  }

  // Scales that are kept are tensors of their own; others go with their weights.
  void link_scales(const distckpt::SafetensorsHeader& header,
                   const distckpt::SafetensorsEntry& entry) {
    const auto weight = entry.name.substr(0, entry.name.size() - kScaleSuffix.size());
    const auto stored = checkpoint_.layout.find(weight);
    require(stored && distckpt::can_dequantize(checkpoint_.layout.tensor(*stored).dtype),
            ErrorKind::kLayout, "{}: are scales, but {} is not there in FP8 ({})", entry.name,
            weight, header.filename);
    if (!keep_fp8_) return;
    checkpoint_.links.links.push_back(
        {.model = static_cast<std::uint32_t>(checkpoint_.tensors.size()),
         .model_box = Box::whole(entry.shape),
         .stored = *checkpoint_.layout.find(entry.name),
         .stored_box = Box::whole(entry.shape)});
    checkpoint_.tensors.push_back({.name = entry.name, .dtype = entry.dtype, .shape = entry.shape});
  }

  bool is_derived(const distckpt::SafetensorsEntry& entry) const {
    return entry.name.ends_with("rotary_emb.inv_freq") &&
           distckpt::is_floating_point(entry.dtype) &&
           entry.shape == distckpt::Shape{checkpoint_.map.config.kv_channels / 2};
  }

  bool keep_fp8_;
  Checkpoint checkpoint_;
  std::optional<BlockQuantization> quantization_;
  std::set<std::uint32_t> found_;
  std::map<std::uint32_t, int> num_copies_;
};

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

class MegatronOpener {
 public:
  MegatronOpener(const Location& location, const OpenOptions& options) : options_(options) {
    checkpoint_.location = location;
  }

  Checkpoint open() {
    const auto& folder = checkpoint_.location.folder;
    checkpoint_.torch_dist = distckpt::read_torch_dist(folder);
    distckpt::check_objects(*checkpoint_.torch_dist);
    if (options_.hf_config.empty()) {
      checkpoint_.hf = read_sidecar(folder);
    } else {
      checkpoint_.hf = read_hf_config(options_.hf_config);
    }
    if (checkpoint_.hf) leave_quantization(*checkpoint_.hf);
    read_config();
    drop_absent_prediction_layers();
    resolve();
    checkpoint_.map = make_model_map(config_);
    checkpoint_.links = link_megatron(checkpoint_.map, checkpoint_.layout);
    checkpoint_.tensors = checkpoint_.map.tensors;
    for (const auto& link : checkpoint_.links.links) {
      const auto& stored = checkpoint_.layout.tensor(link.stored);
      require_floats(stored.name, stored.dtype);
      checkpoint_.tensors[link.model].dtype = stored.dtype;
    }
    if (checkpoint_.hf) restore_dtypes(*checkpoint_.hf, checkpoint_.tensors, checkpoint_.map);
    add_derived();
    check_keys();
    return std::move(checkpoint_);
  }

 private:
  void read_config() {
    const auto& folder = checkpoint_.location.folder;
    const auto common = distckpt::read_common_state(*checkpoint_.torch_dist);
    const auto args =
        common ? with_context([&] { return fmt::format("reading {}", common->source()); },
                              [&] { return read_args(distckpt::common_dict(*common)); })
               : std::nullopt;
    if (checkpoint_.hf) {
      config_ = parse_hf_config(checkpoint_.hf->config_text(), checkpoint_.hf->config_source());
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
    require(!config_.multi_latent_attention || config_.kv_lora_rank > 0, ErrorKind::kNotFound,
            "{}: its arguments do not say the sizes of latent attention; name the folder of "
            "config.json with --hf-config",
            folder.string());
    if (config_.vocab_size == 0) config_.vocab_size = stored_vocabulary();
    read_from_tensors();
    config_.family = infer_family(config_);
  }

  // Megatron's arguments know nothing of value heads: an output layer with a bias or with fewer
  // rows than the vocabulary is one. Nor do old ones of what a router has.
  void read_from_tensors() {
    for (const auto& tensor : checkpoint_.torch_dist->tensors) {
      const auto key = strip_wrappers(tensor.key);
      if (is_training_state(key)) continue;
      if (key.ends_with(".mlp.router.expert_bias")) config_.moe_router_enable_expert_bias = true;
      if (key.ends_with(".mlp.shared_experts.gate_weight")) config_.moe_shared_expert_gate = true;
      if (key == "output_layer.bias") config_.head = distckpt::Head::kTokenClassification;
      if (key != "output_layer.weight" || tensor.shape.empty()) continue;
      if (tensor.shape[0] >= config_.vocab_size) continue;
      if (config_.head == distckpt::Head::kLanguageModel)
        config_.head = distckpt::Head::kSequenceClassification;
      config_.num_labels = tensor.shape[0];
    }
  }

  // What the checkpoint holds decides whether there are prediction layers.
  void drop_absent_prediction_layers() {
    const auto* mtp = find_family(config_.family).rules->mtp;
    const bool there =
        mtp != nullptr && std::ranges::any_of(checkpoint_.torch_dist->tensors, [&](auto& tensor) {
          return strip_wrappers(tensor.key).starts_with(mtp->megatron);
        });
    if (!there) config_.mtp_num_layers = 0;
  }

  // Without a stated vocabulary every stored row counts.
  std::int64_t stored_vocabulary() const {
    for (const auto& tensor : checkpoint_.torch_dist->tensors) {
      if (strip_wrappers(tensor.key) == "embedding.word_embeddings.weight" &&
          !tensor.shape.empty()) {
        return tensor.shape[0];
      }
    }
    fail(ErrorKind::kLayout, "{}: holds no embedding.word_embeddings.weight",
         checkpoint_.location.folder.string());
  }

  void resolve() {
    std::vector<const distckpt::TorchDistTensor*> model;
    for (const auto& tensor : checkpoint_.torch_dist->tensors) {
      if (is_training_state(tensor.key)) {
        checkpoint_.training_state.push_back(tensor.key);
      } else {
        model.push_back(&tensor);
      }
    }
    auto resolved = distckpt::resolve_layout(*checkpoint_.torch_dist, model);
    checkpoint_.layout = std::move(resolved.layout);
    checkpoint_.checksums = std::move(resolved.checksums);
  }

  // Derived tensors of the Hugging Face side, kept in the sidecar.
  void add_derived() {
    const auto path = derived_path(checkpoint_.location.folder);
    if (!options_.hf_config.empty() || !fs::exists(path)) return;
    const auto header = distckpt::read_safetensors_header(path);
    distckpt::add_to_layout(header, path.parent_path(), checkpoint_.layout);
    for (const auto& entry : header.entries) {
      const auto model = static_cast<std::uint32_t>(checkpoint_.tensors.size());
      checkpoint_.tensors.push_back({.name = entry.name,
                                     .dtype = entry.dtype,
                                     .shape = entry.shape,
                                     .role = distckpt::Role::kDerived});
      checkpoint_.links.links.push_back({.model = model,
                                         .model_box = Box::whole(entry.shape),
                                         .stored = *checkpoint_.layout.find(entry.name),
                                         .stored_box = Box::whole(entry.shape)});
    }
  }

  void check_keys() {
    std::vector<std::string> keys;
    for (const auto& object : checkpoint_.torch_dist->objects) {
      keys.push_back(object.key);
      if (is_training_state(object.key)) checkpoint_.training_state.push_back(object.key);
    }
    with_context([&] { return fmt::format("reading {}", checkpoint_.location.folder.string()); },
                 [&] { check_object_keys(checkpoint_.map, keys); });
  }

  const OpenOptions& options_;
  Checkpoint checkpoint_;
  distckpt::TransformerConfig config_;
};

}  // namespace

std::string_view to_string(Format format) {
  return format == Format::kHuggingFace ? "huggingface" : "torch_dist";
}

Location locate(const fs::path& path, std::optional<Iteration> iteration) {
  require(fs::exists(path), ErrorKind::kNotFound, "{}: is not there", path.string());
  require(fs::is_directory(path), ErrorKind::kNotFound, "{}: is not a folder", path.string());
  if (distckpt::is_torch_dist(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is the folder of one iteration, so --iteration has nothing to choose",
            path.string());
    const auto name = fs::weakly_canonical(path).filename().string();
    return {.format = Format::kTorchDist,
            .root = path,
            .folder = path,
            .iteration = distckpt::parse_iteration_folder(name)};
  }
  if (fs::exists(path / distckpt::kTracker) || !list_iterations(path).empty()) {
    return locate_iteration(path, iteration);
  }
  if (distckpt::is_torch_dist(path / "weights")) {  // NeMo 2
    require(!iteration, ErrorKind::kUsage,
            "{}: holds one checkpoint (weights/), so --iteration has nothing to choose",
            path.string());
    return {.format = Format::kTorchDist,
            .root = path,
            .folder = path / "weights",
            .iteration = std::nullopt};
  }
  if (is_hf_folder(path)) {
    require(!iteration, ErrorKind::kUsage,
            "{}: is a Hugging Face checkpoint, which has no iterations", path.string());
    return {
        .format = Format::kHuggingFace, .root = path, .folder = path, .iteration = std::nullopt};
  }
  throw Error(
      ErrorKind::kNotFound, fmt::format("{}: holds no checkpoint that is known", path.string()),
      fmt::format(
          "looked for {} or iter_*/ or release/ (Megatron-Core), {} (one iteration of it), {} and "
          "*.safetensors (Hugging Face)",
          distckpt::kTracker, distckpt::kTorchDistMetadata, distckpt::kHfConfig));
}

bool is_hf_checkpoint(const fs::path& path) {
  return is_hf_folder(path) && !distckpt::is_torch_dist(path) &&
         !fs::exists(path / distckpt::kTracker) && list_iterations(path).empty();
}

void refuse_hf_config(const fs::path& path, const fs::path& hf_config) {
  require(hf_config.empty(), ErrorKind::kUsage,
          "{}: is a Hugging Face checkpoint, which has its own config.json: --hf-config is for "
          "Megatron checkpoints",
          path.string());
}

Checkpoint open(const fs::path& path, const OpenOptions& options) {
  const auto location = locate(path, options.iteration);
  if (location.format == Format::kTorchDist) return MegatronOpener(location, options).open();
  refuse_hf_config(path, options.hf_config);
  return HfOpener(location, options.keep_fp8).open();
}

std::unique_ptr<distckpt::FileSource> Checkpoint::source(distckpt::ReadMode mode) const {
  return std::make_unique<distckpt::FileSource>(layout.storages(), checksums, mode);
}

void check_derived(const Checkpoint& checkpoint) {
  const auto& config = checkpoint.map.config;
  std::unique_ptr<distckpt::FileSource> source;
  for (const auto& link : checkpoint.links.links) {
    const auto& tensor = checkpoint.tensors[link.model];
    if (tensor.role != distckpt::Role::kDerived) continue;
    if (!source) source = checkpoint.source();
    const auto& shard = checkpoint.layout.tensor(link.stored).shards.front();
    std::vector<std::byte> found(static_cast<std::size_t>(tensor.num_bytes()));
    std::vector<distckpt::ChecksumPart> parts;
    source->read({.at = shard.at, .size = tensor.shape, .element_size = size_of(tensor.dtype)},
                 found, parts);
    for (std::int64_t i = 0; i < tensor.shape[0]; ++i) {
      // transformers, modeling_rope_utils: 1 / base ** (2i / dim); the last bits are the power
      // function's.
      const double expected =
          std::pow(config.rotary_base,
                   -2.0 * static_cast<double>(i) / static_cast<double>(config.kv_channels));
      std::vector<std::byte> element(static_cast<std::size_t>(size_of(tensor.dtype)));
      distckpt::cast(DType::kF64, std::as_bytes(std::span(&expected, 1)), tensor.dtype, element,
                     distckpt::CastRule::kRound);
      const auto* const there = found.data() + i * size_of(tensor.dtype);
      const auto ulps = distckpt::ulp_distance(tensor.dtype, element.data(), there);
      require(ulps && *ulps <= 4, ErrorKind::kCorrupt,
              "{}: element {} is {}, but rope_theta {} gives {}", tensor.name, i,
              distckpt::element_value(tensor.dtype, there), config.rotary_base, expected);
    }
  }
}

}  // namespace ferry::converter
