#include "converter/write/hf_target.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "converter/stored/sidecar.h"
#include "distckpt/base/error.h"
#include "distckpt/base/json.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::ModelTensor;
using distckpt::SafetensorsEntry;
using distckpt::SafetensorsHeader;

constexpr std::string_view kTiedHead = "lm_head.weight";
constexpr std::int64_t kDefaultShardSize = 50'000'000'000;  // transformers 5: "50GB"

// transformers core_model_loading.py, dot_natural_key: name by name between the dots, numbers as
// numbers and first.
bool natural_less(std::string_view a, std::string_view b) {
  // Kind (number or text), text, number at its end.
  using Key = std::tuple<bool, std::string_view, std::int64_t>;
  const auto next_key = [](std::string_view& name) -> Key {
    const auto part = name.substr(0, name.find('.'));
    name.remove_prefix(std::min(name.size(), part.size() + 1));
    const auto digits = part.find_last_not_of("0123456789") + 1;
    std::int64_t number = -1;
    std::from_chars(part.data() + digits, part.data() + part.size(), number);
    return {digits > 0, part.substr(0, digits), number};
  };
  while (!a.empty() && !b.empty()) {
    const auto left = next_key(a);
    const auto right = next_key(b);
    if (left != right) return left < right;
  }
  return a.empty() && !b.empty();
}

// Tensors that share memory in transformers, and so go into one file: the experts of a layer, whose
// projections it holds stacked.
struct Block {
  std::string key{};  // by which save_pretrained sorts
  int order = 0;      // among blocks of one key: gate before up
  std::int64_t bytes = 0;
  std::vector<SafetensorsEntry> entries{};
};

// transformers conversion_mapping.py: what Nemotron-H's files call "backbone." is "model." in
// memory.
std::string in_memory(std::string name) {
  constexpr std::string_view kBackbone = "backbone.";
  if (name.starts_with(kBackbone)) name.replace(0, kBackbone.size(), "model.");
  return name;
}

// transformers core_model_loading.py, revert_weight_conversion: sorted by the names in memory.
std::vector<Block> make_blocks(const ModelMap& map, const std::vector<ModelTensor>& tensors) {
  std::map<std::string_view, std::pair<std::string, int>> fused;  // of experts: key and order
  for (const auto& tensor : map.megatron) {
    if (!tensor.expert) continue;
    for (std::size_t i = 0; i < tensor.parts.size(); ++i) {
      const auto& model = map.tensors[tensor.parts[i].model];
      if (model.shape.rank() > tensor.shape.rank()) continue;  // of all experts
      const auto& name = model.name;
      // Nemotron-H's: "….mixer.experts.7.up_proj.weight".
      if (const auto at = name.find(".mixer."); at != std::string::npos) {
        const auto projection = name.substr(0, name.rfind('.'));
        fused.emplace(name,
                      std::pair(in_memory(fmt::format("{}.mixer.experts{}", name.substr(0, at),
                                                      projection.substr(projection.rfind('.')))),
                                0));
        continue;
      }
      const auto layer =
          name.substr(0, std::min(name.find(".mlp."), name.find(".block_sparse_moe.")));
      const bool gate_up = tensor.merge == Merge::kGateUp;
      fused.emplace(name, std::pair(fmt::format("{}.mlp.experts.{}_proj", layer,
                                                gate_up ? "gate_up" : "down"),
                                    static_cast<int>(i)));
    }
  }
  std::map<std::pair<std::string, int>, Block> blocks;
  for (const auto& tensor : tensors) {
    auto key = std::pair(in_memory(tensor.name), 0);
    if (const auto found = fused.find(tensor.name); found != fused.end()) {
      key = found->second;
    } else if (const auto at = key.first.find(".block_sparse_moe."); at != std::string::npos) {
      key.first.replace(at, std::string_view(".block_sparse_moe.").size(), ".mlp.");
    }
    auto& block = blocks[key];
    block.key = key.first;
    block.order = key.second;
    block.bytes += tensor.num_bytes();
    block.entries.push_back({.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape});
  }
  std::vector<Block> sorted;
  for (auto& [_, block] : blocks) sorted.push_back(std::move(block));
  std::ranges::sort(sorted, [](const Block& a, const Block& b) {
    return a.key == b.key ? a.order < b.order : natural_less(a.key, b.key);
  });
  return sorted;
}

// huggingface_hub serialization/_base.py, split_state_dict_into_shards_factory: in order, a file is
// closed when the next block does not fit; a block larger than a file gets one of its own, at once.
std::vector<std::vector<SafetensorsEntry>> split_into_shards(std::vector<Block> blocks,
                                                             std::int64_t max_shard_size) {
  std::vector<std::vector<SafetensorsEntry>> shards;
  std::vector<SafetensorsEntry> current;
  std::int64_t current_size = 0;
  for (auto& block : blocks) {
    if (block.bytes > max_shard_size) {
      shards.push_back(std::move(block.entries));
      continue;
    }
    if (current_size + block.bytes > max_shard_size) {
      shards.push_back(std::exchange(current, {}));
      current_size = 0;
    }
    std::ranges::move(block.entries, std::back_inserter(current));
    current_size += block.bytes;
  }
  if (!current.empty()) shards.push_back(std::move(current));
  return shards;
}

// transformers modeling_utils.py, save_pretrained. A router's bias is a buffer, no parameter.
std::string make_index(const ModelMap& map,
                       const std::vector<SafetensorsHeader>& headers,
                       const std::vector<ModelTensor>& tensors) {
  nlohmann::json index;
  std::int64_t parameters = 0;
  std::int64_t bytes = 0;
  std::set<std::string_view> buffers;
  for (const auto& tensor : map.megatron) {
    if (tensor.fp32) buffers.insert(map.tensors[tensor.parts.front().model].name);
  }
  for (const auto& tensor : tensors) {
    if (!buffers.contains(tensor.name)) parameters += tensor.shape.product();
    bytes += tensor.num_bytes();
  }
  index["metadata"] = {{"total_parameters", parameters}, {"total_size", bytes}};
  for (const auto& header : headers) {
    for (const auto& entry : header.entries) index["weight_map"][entry.name] = header.filename;
  }
  return index.dump(2) + "\n";
}

class HfTarget : public FileTarget {
 public:
  HfTarget(const Checkpoint& source,
           const std::vector<ModelTensor>& tensors,
           std::optional<distckpt::DType> dtype,
           std::optional<std::int64_t> max_shard_size,
           fs::path folder)
      : hf_(*source.hf), dtype_(dtype), folder_(std::move(folder)) {
    if (keeps_headers(hf_, dtype, max_shard_size)) {
      headers_ = hf_.headers;
      index_text_ = hf_.index_text;
    } else {
      make_headers(source.map, tensors, max_shard_size.value_or(kDefaultShardSize));
    }
    for (const auto& header : headers_) {
      distckpt::add_to_layout(header, folder_, layout_);
      for (const auto& entry : header.entries) link(source, tensors, entry);
    }
  }

 private:
  std::vector<fs::path> other_files() const override {
    std::vector<fs::path> names(hf_.carried.begin(), hf_.carried.end());
    if (!hf_.part.empty()) names.emplace_back(distckpt::kPartRecord);
    if (index_text_) names.emplace_back(distckpt::kSafetensorsIndex);
    return names;
  }

  void prepare() const override {}

  void begin_files(distckpt::FileSink& sink) const override {
    for (std::size_t i = 0; i < headers_.size(); ++i) {
      sink.write_raw(static_cast<distckpt::StorageId>(i), 0,
                     distckpt::as_bytes(headers_[i].prefix));
    }
  }

  void finish_files(distckpt::FileSink& sink) const override {
    begin_files(sink);
    sink.sync();
  }

  void finish_folder() const override {
    std::optional<HfForm> cast;
    const auto& form = form_as(hf_, dtype_, cast);
    for (const auto& name : form.carried) form.file(name).copy_to(folder_ / name);
    carry_part(hf_, folder_);
    if (index_text_) distckpt::write_text(folder_ / distckpt::kSafetensorsIndex, *index_text_);
  }

  void make_headers(const ModelMap& map,
                    const std::vector<ModelTensor>& tensors,
                    std::int64_t max_shard_size) {
    std::vector<ModelTensor> saved;  // save_pretrained writes no derived tensors
    for (const auto& tensor : tensors) {
      if (tensor.role == distckpt::Role::kWeight) saved.push_back(tensor);
    }
    for (const auto& [name, of] : map.copies) {  // a tied head is not saved, other copies are
      if (name.ends_with(kTiedHead)) continue;
      saved.push_back(tensors[of]);
      saved.back().name = name;
    }
    if (const auto tower = map.family->names->carried; !tower.empty() && hf_.part.empty()) {
      const bool there =
          std::ranges::any_of(saved, [&](auto& one) { return map.is_carried(one.name); });
      if (!there) {
        throw Error(
            ErrorKind::kLayout,
            fmt::format("{}: describes a model that also sees, but the source holds no {}*",
                        hf_.config_source(), tower.front()),
            "name the folder of a config.json of the language model alone with --hf-config");
      }
    }
    auto shards = split_into_shards(make_blocks(map, saved), max_shard_size);
    const auto count = static_cast<int>(shards.size());
    for (int i = 0; i < count; ++i) {
      headers_.push_back(distckpt::make_safetensors_header(
          distckpt::safetensors_filename(i, count), std::move(shards[static_cast<std::size_t>(i)]),
          {{"format", "pt"}}));
    }
    if (count > 1) index_text_ = make_index(map, headers_, saved);
  }

  void link(const Checkpoint& source,
            const std::vector<ModelTensor>& tensors,
            const SafetensorsEntry& entry) {
    if (by_name_.empty()) {
      for (std::uint32_t i = 0; i < tensors.size(); ++i) by_name_.emplace(tensors[i].name, i);
    }
    const auto copy = source.map.copies.find(entry.name);
    const bool is_copy = copy != source.map.copies.end();
    const auto found = by_name_.find(entry.name);
    require(is_copy || found != by_name_.end(), ErrorKind::kLayout,
            "{}: the sidecar's headers list it, but no tensor holds it", entry.name);
    const auto model = is_copy ? copy->second : found->second;
    const auto& tensor = tensors[model];
    if (tensor.shape != entry.shape || tensor.dtype != entry.dtype) {
      throw Error(ErrorKind::kLayout,
                  fmt::format("{}: is {} {}, but the sidecar's header says {} {}", entry.name,
                              short_name(tensor.dtype), to_string(tensor.shape),
                              short_name(entry.dtype), to_string(entry.shape)),
                  "with --max-shard-size new headers are made");
    }
    links_.links.push_back(distckpt::BoxLink::whole(model, *layout_.find(entry.name), entry.shape));
    if (is_copy) links_.links.back().copy = ++num_copies_[model];
  }

  const HfForm& hf_;
  std::optional<distckpt::DType> dtype_;
  fs::path folder_;
  std::vector<SafetensorsHeader> headers_;
  std::optional<std::string> index_text_;
  std::map<std::string_view, std::uint32_t> by_name_;
  std::map<std::uint32_t, int> num_copies_;
};

}  // namespace

bool keeps_headers(const HfForm& form,
                   std::optional<distckpt::DType> dtype,
                   std::optional<std::int64_t> max_shard_size) {
  return !form.headers.empty() && !dtype && !max_shard_size;
}

std::unique_ptr<Target> make_hf_target(const Checkpoint& source,
                                       const std::vector<ModelTensor>& tensors,
                                       std::optional<distckpt::DType> dtype,
                                       std::optional<std::int64_t> max_shard_size,
                                       const fs::path& folder) {
  require_hf_form(source);
  return std::make_unique<HfTarget>(source, tensors, dtype, max_shard_size, folder);
}

}  // namespace ferry::converter
