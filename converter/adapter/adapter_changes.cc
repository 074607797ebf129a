#include "converter/adapter/adapter_changes.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "converter/adapter/base_names.h"
#include "converter/adapter/expert_modules.h"
#include "converter/adapter/lora_settings.h"
#include "converter/adapter/open_adapter.h"
#include "converter/bridge/tensor_stream.h"
#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"
#include "distckpt/elements/cast.h"
#include "distckpt/formats/safetensors.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::Box;
using distckpt::DType;
using distckpt::ModelTensor;
using distckpt::Shape;

// Factors of gate and up, or of down, of one expert.
struct ExpertFactors {
  std::string a{};
  std::string b{};
  std::int64_t rank = 0;
  float scaling = 1;
};

// The changes of the tensors that a parameter of an expert is made of.
void add_expert_changes(const ModelMap& base,
                        const MegatronTensor& of,
                        const ExpertFactors& factors,
                        std::vector<AdaptedTensor>& tensors) {
  std::int64_t first_out = 0;
  for (const auto model : merged_tensors(of)) {
    const auto& tensor = base.tensors[model];
    const auto part = std::ranges::find(of.parts, model, &MappedPart::model);
    AdaptedTensor adapted{.tensor = tensor.name,
                          .rank = factors.rank,
                          .scaling = factors.scaling,
                          .a = factors.a,
                          .b = factors.b,
                          .expert = *of.expert,
                          .num_experts = base.config.num_moe_experts};
    const int dim = tensor.shape.rank() - 2;  // one before: experts, where a tensor holds all
    adapted.rows = tensor.shape[dim];
    adapted.columns = tensor.shape[dim + 1];
    adapted.transposed = !part->axes.empty() && part->axes[0] > part->axes[1];
    if (dim == 0) {
      adapted.first_out = first_out;
      first_out += adapted.rows;
    } else {
      adapted.first_row = part->model_box.offset[0] * adapted.rows;
    }
    tensors.push_back(std::move(adapted));
  }
}

// A factor that has to be the transpose of another one.
struct TiedFactor {
  std::string factor{};
  std::string transposed{};
  std::int64_t rows = 0;  // of the second
};

// An adapter of PEFT. Its tensors are those of its file.
class PeftChanges {
 public:
  PeftChanges(const fs::path& folder, const Checkpoint& base)
      : base_(base.map),
        names_(base),
        folder_(folder),
        settings_(folder / kAdapterConfig),
        experts_(base_) {
    settings_.refuse("modules_to_save");
  }

  Checkpoint open() {
    Checkpoint checkpoint;
    checkpoint.location = {.root = folder_, .folder = folder_};
    const auto header = read_adapter_header(folder_);
    source_ = (folder_ / kAdapterWeights).string();
    distckpt::add_to_layout(header, folder_, checkpoint.layout);
    for (const auto& stored : checkpoint.layout.tensors()) {
      const auto index = static_cast<std::uint32_t>(checkpoint.tensors.size());
      checkpoint.tensors.push_back(
          {.name = stored.name, .dtype = stored.dtype, .shape = stored.shape});
      checkpoint.links.links.push_back(distckpt::BoxLink::whole(index, index, stored.shape));
    }
    checkpoint.map.tensors = checkpoint.tensors;
    for (const auto& tensor : checkpoint.tensors) {
      const auto key = settings_.parse_key(tensor.name, source_);
      modules_[key.module].emplace(key.part, &tensor);
      peft_modules_.insert(peft_module(base_, key.module));
    }
    require(!modules_.empty(), ErrorKind::kCorrupt, "{}: changes nothing", source_);
    for (const auto& [module, parts] : modules_) add_module(module, parts);
    require_named_parameters();
    return checkpoint;
  }

  std::vector<AdaptedTensor> take() { return std::move(tensors_); }
  const std::vector<TiedFactor>& tied() const { return tied_; }

 private:
  using Parts = std::map<std::string, const ModelTensor*>;

  void require_matrix(const ModelTensor& tensor) const {
    require(tensor.shape.rank() == 2 && distckpt::is_floating_point(tensor.dtype),
            ErrorKind::kLayout, "{}: {}: is {} {}, expected a matrix of floating-point numbers",
            source_, tensor.name, short_name(tensor.dtype), to_string(tensor.shape));
  }

  const ModelTensor& factor(const std::string& module,
                            const Parts& parts,
                            const std::string& name) const {
    const auto found = parts.find(name);
    require(found != parts.end(), ErrorKind::kCorrupt, "{}: {}: one of two factors is missing",
            source_, module);
    require_matrix(*found->second);
    return *found->second;
  }

  void add_module(const std::string& module, const Parts& parts) {
    const auto experts =
        experts_.find(peft_module(base_, module), settings_,
                      [&](const std::string& other) { return peft_modules_.contains(other); });
    if (experts) {
      add_experts(module, parts, *experts);
    } else if (!is_second_end(module, parts)) {
      tensors_.push_back(adapted_tensor(module, parts));
      adapted_parameters_.push_back(module + ".weight");
    }
  }

  // True of the output layer of an adapter that changes it and the embedding, which are one tensor,
  // alike. PEFT's merge changes both ends by what was trained for one, or by the change of both.
  bool is_second_end(const std::string& module, const Parts& parts) {
    const auto found = names_.find(module + ".weight");
    const bool is_head = found.is_copy && !is_prediction_tensor(base_.config, found.name);
    const bool is_end = is_head || found.name == base_.family->names->embedding();
    const bool has_factors = parts.size() > (parts.contains("base_layer") ? 1 : 0);
    if (!base_.config.is_tied() || !is_end || !has_factors) return false;
    if (settings_.ties_weights()) {
      if (is_head) add_tied(module, parts);
      return is_head;
    }
    throw Error(
        ErrorKind::kLayout,
        fmt::format("{}: {}: the base has one tensor for embedding and output layer, and the "
                    "adapter was trained on one end without the other (ensure_weight_tying)",
                    source_, module),
        "merge it into a base with an output layer of its own: a copy of the embedding as "
        "lm_head.weight, and tie_word_embeddings false in config.json");
  }

  // The factors are those of the embedding, the first for the second.
  void add_tied(const std::string& module, const Parts& parts) {
    const auto embedding = std::ranges::find_if(
        modules_, [](const auto& one) { return one.second.contains("lora_embedding_A"); });
    require(embedding != modules_.end(), ErrorKind::kCorrupt,
            "{}: {}: ensure_weight_tying is set, but the embedding has no factors", source_,
            module);
    for (const auto& [part, other] :
         {std::pair("lora_A", "lora_embedding_B"), std::pair("lora_B", "lora_embedding_A")}) {
      const auto& transposed = factor(embedding->first, embedding->second, other);
      tied_.push_back({factor(module, parts, part).name, transposed.name, transposed.shape[0]});
    }
  }

  void add_experts(const std::string& module,
                   const Parts& parts,
                   const ExpertModules::Parameter& parameter) {
    require(!settings_.uses_dora(), ErrorKind::kLayout, "{}: {}: DoRA of experts is not merged",
            source_, module);
    const auto& a = factor(module, parts, "lora_A");
    const auto& b = factor(module, parts, "lora_B");
    require(!parameter.experts.empty(), ErrorKind::kLayout, "{}: {}: the base has no such tensors",
            source_, parameter.name);
    const auto& first = base_.megatron[parameter.experts.front()];
    const auto num_experts = base_.config.num_moe_experts;
    const bool fits = std::ssize(parameter.experts) == num_experts && a.shape[0] > 0 &&
                      a.shape[0] % num_experts == 0 && b.shape[1] == a.shape[0] &&
                      b.shape[0] == first.shape[0] && a.shape[1] == first.shape[1];
    require(fits, ErrorKind::kLayout,
            "{}: {}: the factors {} and {} are not those of {} experts with weights of {}", source_,
            parameter.name, to_string(a.shape), to_string(b.shape), num_experts,
            to_string(first.shape));
    const auto rank = a.shape[0] / num_experts;
    const ExpertFactors factors{
        .a = a.name, .b = b.name, .rank = rank, .scaling = settings_.scaling(parameter.name, rank)};
    for (const auto index : parameter.experts)
      add_expert_changes(base_, base_.megatron[index], factors, tensors_);
    adapted_parameters_.push_back(parameter.name);
  }

  AdaptedTensor adapted_tensor(const std::string& module, const Parts& parts) const {
    AdaptedTensor tensor{.tensor = names_.find(module + ".weight").name};
    Shape base_shape;
    if (const auto base = parts.find("base_layer"); base != parts.end()) {
      require_matrix(*base->second);
      base_shape = base->second->shape;
      tensor.base = base->second->name;
      tensor.rows = base_shape[0];
      tensor.columns = base_shape[1];
      if (parts.size() == 1) return tensor;
    }
    tensor.transposed = parts.contains("lora_embedding_A");
    const std::string prefix = tensor.transposed ? "lora_embedding_" : "lora_";
    const auto& a = factor(module, parts, prefix + "A");
    const auto& b = factor(module, parts, prefix + "B");
    tensor.a = a.name;
    tensor.b = b.name;
    tensor.rank = a.shape[0];
    require(tensor.rank > 0 && b.shape[1] == tensor.rank, ErrorKind::kCorrupt,
            "{}: {}: the factors {} and {} have no common rank", source_, module,
            to_string(a.shape), to_string(b.shape));
    const Shape shape{tensor.transposed ? a.shape[1] : b.shape[0],
                      tensor.transposed ? b.shape[0] : a.shape[1]};
    require(!tensor.base || base_shape == shape, ErrorKind::kCorrupt,
            "{}: {}: the factors change {}, the base's weight is {}", source_, module,
            to_string(shape), to_string(base_shape));
    tensor.rows = shape[0];
    tensor.columns = shape[1];
    tensor.scaling = settings_.scaling(module, tensor.rank);
    const auto magnitude = parts.find("lora_magnitude_vector");
    require((magnitude != parts.end()) == settings_.uses_dora(), ErrorKind::kLayout,
            "{}: {}: use_dora and the presence of its magnitudes contradict each other", source_,
            module);
    if (magnitude == parts.end()) return tensor;
    require(!tensor.transposed, ErrorKind::kLayout,
            "{}: {}: DoRA of an embedding is not handled: its magnitudes are those of columns, "
            "each of which all rows make up",
            source_, module);
    const auto count = magnitude->second->shape.product();
    require(count == tensor.rows, ErrorKind::kLayout,
            "{}: {}: {} magnitudes, expected one for each of {} rows", source_, module, count,
            tensor.rows);
    tensor.magnitude = magnitude->second->name;
    return tensor;
  }

  // Parameters that the settings name are those of experts, or weights of modules.
  void require_named_parameters() const {
    for (const auto& name : settings_.target_parameters()) {
      const bool found = std::ranges::any_of(
          adapted_parameters_, [&](const auto& adapted) { return is_named(adapted, name); });
      require(found, ErrorKind::kLayout,
              "{}: target_parameters: {}: is not merged: the adapter has no factors of such "
              "parameters of the base",
              source_, name);
    }
  }

  const ModelMap& base_;
  BaseNames names_;
  fs::path folder_;
  LoraSettings settings_;
  ExpertModules experts_;
  std::string source_;
  std::map<std::string, Parts> modules_;  // by the adapter's names
  std::set<std::string> peft_modules_;    // the same, by peft_module()
  std::vector<std::string> adapted_parameters_;
  std::vector<AdaptedTensor> tensors_;
  std::vector<TiedFactor> tied_;
};

// An adapter of Megatron-Bridge or of FSDP by rank, whose factors have PEFT's names here
// (open_adapter.h).
std::vector<AdaptedTensor> changes_of(const Adapter& adapter, const ModelMap& base) {
  const auto& map = adapter.checkpoint.map;
  std::vector<AdaptedTensor> tensors;
  for (std::size_t i = 0; i < adapter.adapted.size(); ++i) {
    const auto& one = adapter.adapted[i];
    const auto& of = base.megatron[one.megatron];
    const auto name_of = [&](std::size_t factor) {
      return map.tensors[map.megatron[factor].parts.front().model].name;
    };
    const auto a = name_of(2 * i);
    if (of.expert) {
      add_expert_changes(
          base, of,
          {.a = a, .b = name_of(2 * i + 1), .rank = one.rank, .scaling = adapter.scaling[i]},
          tensors);
      continue;
    }
    const auto merged = merged_tensors(of);
    for (std::size_t part = 0; part < merged.size(); ++part) {
      if (one.part != AdaptedParameter::kFused && one.part != static_cast<int>(part)) continue;
      const auto& tensor = base.tensors[merged[part]];
      tensors.push_back({.tensor = tensor.name,
                         .rows = tensor.shape[0],
                         .columns = tensor.shape[1],
                         .rank = one.rank,
                         .scaling = adapter.scaling[i],
                         .a = a,
                         .b = factor_prefix(base, tensor.name) + ".lora_B.weight"});
    }
  }
  for (const auto& one : adapter.tower) {
    tensors.push_back({.tensor = one.tensor.name,
                       .rows = one.tensor.shape[0],
                       .columns = one.tensor.shape[1],
                       .rank = one.rank,
                       .scaling = one.scaling,
                       .a = one.prefix + ".lora_A.weight",
                       .b = one.prefix + ".lora_B.weight"});
  }
  return tensors;
}

// Element (i, j) of a matrix [rows, columns] becomes (j, i).
std::vector<float> transposed(const std::vector<float>& matrix, std::int64_t rows) {
  const auto columns = static_cast<std::int64_t>(matrix.size()) / rows;
  std::vector<float> result(matrix.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c)
      result[static_cast<std::size_t>(c * rows + r)] =
          matrix[static_cast<std::size_t>(r * columns + c)];
  }
  return result;
}

std::optional<fs::path> find_peft(const fs::path& path) {
  for (const auto& folder : {path, path / kVerlAdapter})
    if (distckpt::source_exists(folder / kAdapterConfig)) return folder;
  return std::nullopt;
}

distckpt::Digest digest_of(const distckpt::SourceFiles& files, const std::optional<double>& alpha) {
  distckpt::RunningDigest digest;
  for (const auto& [path, file] : files.files()) {
    digest.add(distckpt::as_bytes(fmt::format("{} {} {} {} {}\n", path.string(), file.device,
                                              file.inode, file.size, file.modified_ns)));
  }
  if (alpha) digest.add(distckpt::as_bytes(fmt::format("{}", *alpha)));
  return digest.digest();
}

}  // namespace

AdapterChanges::AdapterChanges(const fs::path& path,
                               const Checkpoint& base,
                               const std::optional<double>& alpha) {
  auto checkpoint = std::make_shared<Checkpoint>();
  std::vector<TiedFactor> tied;
  if (const auto folder = find_peft(path)) {
    require(!alpha, ErrorKind::kUsage, "{}: says its alpha itself; --lora-alpha is of others",
            (*folder / kAdapterConfig).string());
    const auto files = std::make_shared<distckpt::SourceFiles>();
    const distckpt::NotedFiles noted(*files);
    PeftChanges changes(*folder, base);
    *checkpoint = changes.open();
    checkpoint->files = files;
    tensors_ = changes.take();
    tied = changes.tied();
  } else {
    auto adapter = open_adapter(path, base, {.alpha = alpha});
    tensors_ = changes_of(adapter, base.map);
    *checkpoint = std::move(adapter.checkpoint);
  }
  checkpoint->files->settle();
  identity_ = digest_of(*checkpoint->files, alpha);
  parts_ = std::make_unique<const CheckpointParts>(std::move(checkpoint));
  for (const auto& one : tied) {
    require(*whole(one.factor) == transposed(*whole(one.transposed), one.rows), ErrorKind::kLayout,
            "{}: {}: ensure_weight_tying is set, but it is not the transpose of {}", path.string(),
            one.factor, one.transposed);
  }
}

std::vector<float> AdapterChanges::read(const std::string& name,
                                        const std::optional<Box>& box) const {
  const auto part = parts_->part_with(name);
  TensorStream stream(part, box_of_tensor(*part, name, box), {.threads = 1});
  const auto& wanted = stream.tensors().front();
  std::vector<std::byte> raw(static_cast<std::size_t>(wanted.num_bytes()));
  stream.start({raw.data()});
  while (stream.wait({})) {
  }
  std::vector<float> values(static_cast<std::size_t>(wanted.shape.product()));
  const auto into = std::as_writable_bytes(std::span(values));
  if (wanted.dtype == DType::kF32) {
    std::ranges::copy(raw, into.begin());
  } else {
    distckpt::cast(wanted.dtype, raw, DType::kF32, into, distckpt::CastRule::kRound);
  }
  return values;
}

AdapterChanges::Values AdapterChanges::whole(const std::string& name) const {
  constexpr std::size_t kKept = 8;  // two of gate and up, two of down, of a layer and the next
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(recent_, name, &std::pair<std::string, Values>::first);
  if (found != recent_.end()) return found->second;
  auto values = std::make_shared<const std::vector<float>>(read(name, std::nullopt));
  if (recent_.size() == kKept) recent_.pop_front();
  recent_.emplace_back(name, values);
  return values;
}

std::vector<float> AdapterChanges::base_elements(const AdaptedTensor& tensor,
                                                 std::int64_t first,
                                                 std::int64_t count) const {
  const auto begin = first / tensor.columns;
  const auto end = distckpt::ceil_div(first + count, tensor.columns);
  auto rows =
      read(tensor.base.value(), Box{.offset = {begin, 0}, .size = {end - begin, tensor.columns}});
  const auto skipped = first - begin * tensor.columns;
  rows.erase(rows.begin(), rows.begin() + skipped);
  rows.resize(static_cast<std::size_t>(count));
  return rows;
}

LowRankChange AdapterChanges::load(const AdaptedTensor& tensor) const {
  const auto rank = tensor.rank;
  const auto in = tensor.transposed ? tensor.rows : tensor.columns;
  const auto out = tensor.transposed ? tensor.columns : tensor.rows;
  const auto all_a = whole(tensor.a);
  const auto all_b = whole(tensor.b);
  const auto first = all_a->begin() + tensor.expert * rank * in;
  std::vector<float> a(first, first + rank * in);
  std::vector<float> b(static_cast<std::size_t>(out * rank));
  for (std::int64_t o = 0; o < out; ++o) {
    const auto row = (tensor.first_out + o) * rank * tensor.num_experts;
    for (std::int64_t k = 0; k < rank; ++k)
      b[static_cast<std::size_t>(o * rank + k)] =
          (*all_b)[static_cast<std::size_t>(row + k * tensor.num_experts + tensor.expert)];
  }
  LowRankChange change;
  if (tensor.transposed) {
    change.left = transposed(a, rank);
    change.right = transposed(b, out);
  } else {
    change.left = std::move(b);
    change.right = std::move(a);
  }
  if (tensor.magnitude) change.magnitude = read(*tensor.magnitude, std::nullopt);
  return change;
}

}  // namespace ferry::converter
