#include "converter/open/hf_opener.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "converter/families/hf_config.h"
#include "converter/families/quantization.h"
#include "converter/families/unmapped.h"
#include "converter/open/experts_form.h"
#include "distckpt/base/error.h"
#include "distckpt/elements/dequantize.h"
#include "distckpt/execute/executor.h"
#include "distckpt/plan/copy_plan.h"

namespace ferry::converter {
namespace {

using distckpt::BoxLink;
using distckpt::DType;
using distckpt::TensorLayout;

class HfOpener {
 public:
  HfOpener(const Location& location, Stored stored, const OpenOptions& options)
      : keep_quantized_(options.keep_quantized), incomplete_(options.incomplete) {
    checkpoint_.location = location;
    checkpoint_.hf = std::move(stored.hf);
    checkpoint_.layout = std::move(stored.layout);
    checkpoint_.checksums = std::move(stored.checksums);
    checkpoint_.training_state = std::move(stored.training_state);
    checkpoint_.num_adapter_tensors = stored.num_adapter_tensors;
    replicas_ = std::move(stored.replicas);
  }

  Checkpoint open() {
    const auto& hf = *checkpoint_.hf;
    auto config = read_config();
    if (!config.untie_embeddings_and_output_weights && has_output_layer_of_its_own(config)) {
      config.untie_embeddings_and_output_weights = true;
      // The ends themselves say it where nothing else does.
      checkpoint_.untied = says_whether_tied(hf.config_text(), hf.config_source());
      if (checkpoint_.untied || !hf.part.empty()) checkpoint_.hf->untie_ends();
    }
    checkpoint_.map = make_part_map(
        config, hf.part, [this](const std::string& name) -> std::optional<distckpt::Shape> {
          const auto found = checkpoint_.layout.find(name);
          if (!found) return std::nullopt;
          return checkpoint_.layout.tensor(*found).shape;
        });
    quantization_ = parse_quantization(hf.config_text(), hf.config_source());
    if (uses(Quantization::Method::kFp8)) use_stored_suffix();
    checkpoint_.tensors = checkpoint_.map.tensors;
    for (std::uint32_t i = 0; i < checkpoint_.layout.tensors().size(); ++i) link(i);
    if (quantization_ && !keep_quantized_) checkpoint_.hf->leave_quantization();
    std::vector<std::string_view> missing;
    for (std::uint32_t i = 0; i < checkpoint_.map.tensors.size(); ++i) {
      if (!found_.contains(i) && !replaced_.contains(i))
        missing.push_back(checkpoint_.tensors[i].name);
    }
    for (const auto& name : checkpoint_.hf->absent) require_known(name);
    if (!missing.empty() && !incomplete_) {
      const bool head_alone =
          missing.size() == 1 && missing.front() == checkpoint_.map.family->names->output_layer();
      throw Error(
          ErrorKind::kLayout,
          fmt::format("{}: {} is missing{}", checkpoint_.location.folder.string(), missing.front(),
                      missing.size() == 1
                          ? ""
                          : fmt::format(", and {} other tensor{}", missing.size() - 1,
                                        missing.size() == 2 ? "" : "s")),
          head_alone ? "files of a model without its head (AutoModel) hold none, and config.json "
                       "ties none to the embedding (tie_word_embeddings)"
                     : "the download may be incomplete, or config.json of another model");
    }
    if (found_.size() < checkpoint_.map.tensors.size()) leave_out_missing();
    link_replicas(std::move(replicas_), checkpoint_.layout, checkpoint_.links);
    if (holds_state() && !checkpoint_.map.family->names->experts_together)
      separate_experts(checkpoint_, checkpoint_.tensors);
    return std::move(checkpoint_);
  }

 private:
  // True of what state_dict() of transformers' modules holds: save_pretrained would have taken the
  // experts of a layer apart.
  bool holds_state() const {
    const auto format = checkpoint_.location.format;
    return format == Format::kFsdp || format == Format::kDcp || format == Format::kTorchSave;
  }

  // transformers drops prediction layers when it saves, and leaves the number of them in place.
  models::TransformerConfig read_config() const {
    auto config = parse_hf_config(checkpoint_.hf->config_text(), checkpoint_.hf->config_source());
    const bool has_prediction = std::ranges::any_of(
        checkpoint_.layout.tensors(),
        [&](const TensorLayout& tensor) { return is_prediction_tensor(config, tensor.name); });
    if (!has_prediction) config.mtp_num_layers = 0;
    return config;
  }

  // True of a model whose ends would be tied, and that has an output layer that is not its
  // embedding: transformers does not tie those (modeling_utils.py, tie_weights).
  bool has_output_layer_of_its_own(const models::TransformerConfig& config) const {
    const auto& family = family_of(config.family);
    if (family.passes_through) return false;
    const auto& layout = checkpoint_.layout;
    const auto first = layout.find(std::string(family.names->embedding()));
    const auto last = layout.find(std::string(family.names->output_layer()));
    if (!first || !last) return false;
    const auto& embedding = layout.tensor(*first);
    const auto& output = layout.tensor(*last);
    if (output.shape != embedding.shape || output.dtype != embedding.dtype) return false;
    // torch.save keeps tied tensors once.
    const auto& one = embedding.shards.front().at;
    const auto& other = output.shards.front().at;
    if (one.storage == other.storage && one.offset == other.offset) return false;
    distckpt::TensorMap both{.links = {BoxLink::whole(0, *first, embedding.shape),
                                       BoxLink::whole(0, *last, output.shape)}};
    both.links.back().copy = 1;
    for (std::uint32_t i = 0; i < layout.tensors().size(); ++i) {
      if (i != *first && i != *last)
        both.left_out.push_back({.stored = i, .box = distckpt::Box::whole(layout.tensor(i).shape)});
    }
    const auto plan = distckpt::plan_read(
        {{.name = embedding.name, .dtype = embedding.dtype, .shape = embedding.shape}},
        {.layout = &layout, .map = &both});
    std::atomic<bool> differs = false;
    const auto source = checkpoint_.source();
    try {
      const distckpt::Executor executor({.on_compared = [&](const distckpt::Comparison& part) {
        if (part.equal) return;
        differs = true;  // the rest need not be read
        throw Error(ErrorKind::kCancelled, "the ends differ");
      }});
      executor.submit(plan, *source, nullptr).wait();
    } catch (const Error&) {
      if (!differs) throw;
    }
    return differs;
  }

  // A tensor of the index that no file holds: those of the model are listed as missing.
  void require_known(const std::string& name) const {
    const bool is_scale = quantization_ && quantized_weight(name) != name;
    require(checkpoint_.map.index.contains(name) || is_scale, ErrorKind::kCorrupt,
            "{}: names {}, which no file holds",
            (checkpoint_.location.folder / distckpt::kSafetensorsIndex).string(), name);
  }

  void leave_out_missing() {
    std::vector<std::optional<std::uint32_t>> at;
    std::vector<distckpt::ModelTensor> kept;
    for (std::uint32_t i = 0; i < checkpoint_.tensors.size(); ++i) {
      const bool is_there = i >= checkpoint_.map.tensors.size() || found_.contains(i);
      at.push_back(is_there ? std::optional(static_cast<std::uint32_t>(kept.size()))
                            : std::nullopt);
      if (is_there) kept.push_back(checkpoint_.tensors[i]);
    }
    checkpoint_.tensors = std::move(kept);
    keep_tensors(checkpoint_.map, at);
    distckpt::restrict_links(checkpoint_.links, checkpoint_.layout, at);
  }

  // For messages.
  std::string file_of(const TensorLayout& stored) const {
    if (stored.shards.empty()) return "empty";
    const auto storage = stored.shards.front().at.storage;
    const auto* path = distckpt::file_of(checkpoint_.layout.storages()[storage]);
    return path != nullptr ? path->filename().string() : "memory";
  }

  // AutoFP8 says of itself what models of DeepSeek's kind say, and names scales as ModelOpt does.
  void use_stored_suffix() {
    const auto has = [&](std::string_view suffix) {
      return std::ranges::any_of(checkpoint_.layout.tensors(), [&](const TensorLayout& tensor) {
        return tensor.name.ends_with(suffix);
      });
    };
    const bool plain = quantization_->block.empty() && !has(kScaleSuffix) && has(kPlainScaleSuffix);
    if (plain) quantization_->scale_suffix = kPlainScaleSuffix;
  }

  bool has_fp8() const {
    return uses(Quantization::Method::kFp8) || (quantization_ && quantization_->fp8_beside);
  }

  bool uses(Quantization::Method method) const {
    return quantization_ && quantization_->method == method;
  }

  void link(std::uint32_t index) {
    if (checkpoint_.map.family->passes_through) return link_as_it_is(index);
    const auto& stored = checkpoint_.layout.tensor(index);
    if (uses(Quantization::Method::kMxfp4) && stored.name.ends_with(kBlocksSuffix))
      return link_blocks(index);
    if (uses(Quantization::Method::kMxfp4) && stored.name.ends_with(kBlockScalesSuffix))
      return link_block_scales(index);
    if (uses(Quantization::Method::kPacked) && link_packed(index)) return;
    const auto& map = checkpoint_.map;
    const auto second = map.copies.find(stored.name);
    const bool copy = second != map.copies.end();
    const auto known = copy ? second : map.index.find(stored.name);
    std::uint32_t model = 0;
    int scale = -1;
    const bool fp8 = has_fp8();
    if (fp8 && is_activation_scale(stored.name)) return link_aside(index);
    if (fp8 && stored.name.ends_with(quantization_->scale_suffix)) return link_scales(index);
    if (fp8 && distckpt::can_dequantize(stored.dtype)) {
      if (!keep_quantized_) scale = scales_of(stored);
    } else {
      require_weight_dtype(stored.name, stored.dtype);
    }
    if (copy || known != map.index.end()) {
      model = known->second;
      auto& tensor = checkpoint_.tensors[model];
      require(tensor.shape == stored.shape, ErrorKind::kLayout,
              "{}: has shape {}, expected {} as config.json says ({})", stored.name,
              to_string(stored.shape), to_string(tensor.shape), file_of(stored));
      if (!copy) {
        tensor.dtype = scale < 0 ? stored.dtype : DType::kBF16;
        found_.insert(model);
      }
    } else {
      const bool carried = map.is_carried(stored.name);
      if (!carried && !is_derived(stored)) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: no rule of the family {} maps it ({})", stored.name,
                                checkpoint_.map.family->model_type, file_of(stored)),
                    why_unmapped_here(stored.name));
      }
      model = static_cast<std::uint32_t>(checkpoint_.tensors.size());
      checkpoint_.tensors.push_back(
          {.name = stored.name,
           .dtype = stored.dtype,
           .shape = stored.shape,
           .role = carried ? distckpt::Role::kWeight : distckpt::Role::kDerived});
    }
    auto& link = checkpoint_.links.links.emplace_back(BoxLink::whole(model, index, stored.shape));
    if (copy) link.copy = ++num_copies_[model];
    link.scale = scale;
  }

  std::string why_unmapped_here(const std::string& name) const {
    if (name.ends_with(kScaleSuffix))
      return "scales of fp8 blocks need a quantization_config in config.json";
    if (quantized_weight(name) == name) return why_unmapped(checkpoint_.map, name);
    return "weights that are quantised need a quantization_config in config.json: older exports of "
           "ModelOpt have theirs in hf_quant_config.json alone";
  }

  // The index of the scales of a weight; in one of all experts each expert has its own blocks.
  int scales_of(const TensorLayout& weight) {
    const auto name = fmt::format("{}{}", weight.name, quantization_->scale_suffix);
    const auto stored = checkpoint_.layout.find(name);
    require(stored.has_value(), ErrorKind::kLayout, "{}: is in FP8, but {} is missing ({})",
            weight.name, name, file_of(weight));
    auto& scales = checkpoint_.links.scales;
    auto block = quantization_->fp8_beside ? distckpt::Dims() : quantization_->block;
    if (block.empty()) {
      block = weight.shape;
      if (checkpoint_.layout.tensor(*stored).shape.rank() == 3) block[0] = 1;
    } else if (weight.shape.rank() == block.rank() + 1) {
      block.push_front(1);
    }
    for (int d = 0; d < block.rank(); ++d)
      if (block[d] == 0) block[d] = weight.shape[d];
    scales.push_back({.stored = *stored, .block = block});
    return static_cast<int>(scales.size()) - 1;
  }

  // Scales that are kept are tensors of their own; others go with their weights.
  void link_scales(std::uint32_t index) {
    const auto& scales = checkpoint_.layout.tensor(index);
    const auto weight =
        scales.name.substr(0, scales.name.size() - quantization_->scale_suffix.size());
    const auto stored = checkpoint_.layout.find(weight);
    require(stored && distckpt::can_dequantize(checkpoint_.layout.tensor(*stored).dtype),
            ErrorKind::kLayout, "{}: are scales, but {} is not there in FP8 ({})", scales.name,
            weight, file_of(scales));
    if (keep_quantized_) link_as_it_is(index);
  }

  // A tensor that is one of the model's under its own name.
  void link_as_it_is(std::uint32_t index) {
    const auto& stored = checkpoint_.layout.tensor(index);
    const auto model = static_cast<std::uint32_t>(checkpoint_.tensors.size());
    checkpoint_.links.links.push_back(BoxLink::whole(model, index, stored.shape));
    checkpoint_.tensors.push_back(
        {.name = stored.name, .dtype = stored.dtype, .shape = stored.shape});
  }

  // A tensor that holds nothing of a weight, though it belongs to one.
  void link_aside(std::uint32_t index) {
    if (keep_quantized_) return link_as_it_is(index);
    checkpoint_.links.left_out.push_back(
        {.stored = index, .box = distckpt::Box::whole(checkpoint_.layout.tensor(index).shape)});
  }

  // True if it is one of the tensors of a weight of four bits.
  bool link_packed(std::uint32_t index) {
    const auto& packed = *quantization_->packed;
    const auto& stored = checkpoint_.layout.tensor(index);
    const auto module = stored.name.substr(0, stored.name.rfind('.') + 1);
    const auto part = std::string_view(stored.name).substr(module.size());
    if (std::ranges::find(packed.others, part) != packed.others.end()) {
      link_aside(index);
      return true;
    }
    const bool scale = part == packed.scales || part == packed.global_scale;
    if (!scale && part != packed.elements) return false;
    const auto elements = checkpoint_.layout.find(module + std::string(packed.elements));
    const bool is_packed =
        elements && distckpt::holds(checkpoint_.layout.tensor(*elements).dtype, packed.encoding);
    const bool is_fp8 = elements && quantization_->fp8_beside &&
                        distckpt::can_dequantize(checkpoint_.layout.tensor(*elements).dtype);
    if (is_fp8) return false;
    require(!scale || is_packed, ErrorKind::kLayout,
            "{}: are scales, but {}{} is not there in four bits ({})", stored.name, module,
            packed.elements, file_of(stored));
    if (!is_packed) return false;
    if (keep_quantized_) link_as_it_is(index);
    if (!scale) link_elements(index, module, packed);
    return true;
  }

  // The tensor of the model that `stored` stands for.
  std::uint32_t known_weight(const TensorLayout& stored, const std::string& weight) const {
    const auto known = checkpoint_.map.index.find(weight);
    require(known != checkpoint_.map.index.end(), ErrorKind::kLayout,
            "{}: no rule of the family {} maps {} ({})", stored.name,
            checkpoint_.map.family->model_type, weight, file_of(stored));
    return known->second;
  }

  // Elements [rows, columns / those of a pack] of a weight [rows, columns].
  void link_elements(std::uint32_t index, const std::string& module, const PackedWeight& packed) {
    const auto& stored = checkpoint_.layout.tensor(index);
    const auto weight = module + "weight";
    const auto known = known_weight(stored, weight);
    if (keep_quantized_) {
      replaced_.insert(known);
      return;
    }
    auto& tensor = checkpoint_.tensors[known];
    const auto& shape = tensor.shape;
    const auto pack = distckpt::pack_size(packed.encoding);
    const auto group = quantization_->block[1];
    require(shape.rank() == 2 && shape[1] % pack == 0 && shape[1] % group == 0 &&
                stored.shape == distckpt::Shape{shape[0], shape[1] / pack},
            ErrorKind::kLayout,
            "{}: has shape {}, which is not {} {} in four bits and groups of {} ({})", stored.name,
            to_string(stored.shape), weight, to_string(shape), group, file_of(stored));
    tensor.dtype = DType::kBF16;
    require(found_.insert(known).second, ErrorKind::kLayout, "{}: is there, and so is {} ({})",
            stored.name, weight, file_of(stored));
    distckpt::ScaleLink scale{.stored = part_of(stored, module, packed.scales),
                              .block = quantization_->block,
                              .encoding = packed.encoding,
                              .how = packed.how};
    if (packed.how != distckpt::GlobalScale::kNone)
      scale.global = part_of(stored, module, packed.global_scale);
    auto& links = checkpoint_.links;
    links.links.push_back({.model = known,
                           .model_box = distckpt::Box::whole(shape),
                           .stored = index,
                           .stored_box = distckpt::Box::whole(stored.shape),
                           .axes = {0, 1},
                           .scale = static_cast<int>(links.scales.size())});
    links.scales.push_back(scale);
  }

  // The index of a tensor of the module whose elements those are.
  std::uint32_t part_of(const TensorLayout& elements,
                        const std::string& module,
                        std::string_view part) const {
    const auto name = module + std::string(part);
    const auto found = checkpoint_.layout.find(name);
    require(found.has_value(), ErrorKind::kLayout, "{}: is in four bits, but {} is missing ({})",
            elements.name, name, file_of(elements));
    return *found;
  }

  // MXFP4 blocks [experts, rows, blocks, 16] of a weight [experts, columns, rows].
  void link_blocks(std::uint32_t index) {
    const std::string weight(quantized_weight(checkpoint_.layout.tensor(index).name));
    const auto scales_name = fmt::format("{}{}", weight, kBlockScalesSuffix);
    const auto scales = checkpoint_.layout.find(scales_name);
    auto& stored = checkpoint_.layout.tensor(index);
    require(scales.has_value(), ErrorKind::kLayout, "{}: are blocks, but {} is missing ({})",
            stored.name, scales_name, file_of(stored));
    const auto known = known_weight(stored, weight);
    if (keep_quantized_) {
      replaced_.insert(known);
      return link_as_it_is(index);
    }
    auto& tensor = checkpoint_.tensors[known];
    const auto& shape = tensor.shape;
    constexpr std::int64_t kBlock = 32;
    const bool fits =
        shape.rank() == 3 && shape[1] % kBlock == 0 &&
        stored.shape == distckpt::Shape{shape[0], shape[2], shape[1] / kBlock, kBlock / 2};
    require(fits, ErrorKind::kLayout, "{}: has shape {}, which are not the blocks of {} {} ({})",
            stored.name, to_string(stored.shape), weight, to_string(shape), file_of(stored));
    distckpt::fold_last_dimensions(stored);
    tensor.dtype = DType::kBF16;
    require(found_.insert(known).second, ErrorKind::kLayout, "{}: is there, and so is {} ({})",
            stored.name, weight, file_of(stored));
    auto& links = checkpoint_.links;
    links.links.push_back({.model = known,
                           .model_box = distckpt::Box::whole(shape),
                           .stored = index,
                           .stored_box = distckpt::Box::whole(stored.shape),
                           .axes = {0, 2, 1},
                           .scale = static_cast<int>(links.scales.size())});
    links.scales.push_back(
        {.stored = *scales, .block = quantization_->block, .encoding = distckpt::Encoding::kE2M1});
  }

  void link_block_scales(std::uint32_t index) {
    const auto& scales = checkpoint_.layout.tensor(index);
    const auto blocks = fmt::format("{}{}", quantized_weight(scales.name), kBlocksSuffix);
    require(checkpoint_.layout.find(blocks).has_value(), ErrorKind::kLayout,
            "{}: are scales, but {} is missing ({})", scales.name, blocks, file_of(scales));
    if (keep_quantized_) link_as_it_is(index);
  }

  bool is_derived(const TensorLayout& stored) const {
    return stored.name.ends_with("rotary_emb.inv_freq") &&
           distckpt::is_floating_point(stored.dtype) &&
           stored.shape == distckpt::Shape{checkpoint_.map.config.kv_channels / 2};
  }

  bool keep_quantized_;
  bool incomplete_;
  Checkpoint checkpoint_;
  std::vector<Replica> replicas_;
  std::optional<Quantization> quantization_;
  std::set<std::uint32_t> found_;
  std::set<std::uint32_t> replaced_;  // by blocks that are kept
  std::map<std::uint32_t, int> num_copies_;
};

}  // namespace

Checkpoint open_huggingface(const Location& location, Stored stored, const OpenOptions& options) {
  return HfOpener(location, std::move(stored), options).open();
}

}  // namespace ferry::converter
