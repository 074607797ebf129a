// Megatron's legacy format: the slices of all ranks put together.
#include <algorithm>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/open/formats.h"
#include "converter/open/rank_files.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/torch_tensor.h"

namespace ferry::converter {
namespace {

using distckpt::Box;
using distckpt::Shape;
using distckpt::TensorLayout;

constexpr std::string_view kHead = "output_layer.weight";
constexpr std::string_view kEmbeddingKey = "embedding.word_embeddings.weight";

class Assembler {
 public:
  Assembler(const RankFiles& ranks, const ModelMap& map, Stored& stored)
      : ranks_(ranks), map_(map), stored_(stored) {}

  void run() {
    for (const auto& file : ranks_.files) stored_.layout.add_storage(file.storage);
    for (const auto& tensor : map_.megatron) assemble(tensor);
    for (const auto& [key, tensors] : ranks_.tensors) {
      if (used_.contains(key)) continue;
      if (key == kHead && assemble_tied_copy()) continue;
      fail(ErrorKind::kLayout, "{}: {}: no rule of the family {} maps it",
           file_of(tensors.front()).storage.path.string(), key, map_.family->model_type);
    }
  }

 private:
  const RankFile& file_of(const RankFileTensor& tensor) const { return ranks_.files[tensor.file]; }

  void assemble(const MegatronTensor& tensor) {
    std::vector<std::string> keys{single_key(tensor)};
    if (!tensor.also.empty()) keys.push_back(tensor.also.front());
    for (const auto& key : keys) {
      const auto found = ranks_.tensors.find(key);
      if (found == ranks_.tensors.end()) continue;
      used_.insert(key);
      return add(tensor, key, found->second);
    }
    // A tensor that is missing is named when the tensors are linked.
  }

  // A tied output layer is the embedding's second copy, on the last stage.
  bool assemble_tied_copy() {
    const auto embedding = std::ranges::find(map_.megatron, kEmbeddingKey, &MegatronTensor::key);
    if (!map_.config.is_tied() || embedding == map_.megatron.end()) return false;
    const std::string key(kHead);
    add(*embedding, key, ranks_.tensors.at(key));
    return true;
  }

  // The dimension that ranks split, in how many parts, and of which part a rank's slice is.
  struct Cut {
    int dim = 0;
    int parts = 1;
    int halves = 1;  // gate over up: each is split on its own
  };

  Cut cut_of(const MegatronTensor& tensor) const {
    if (tensor.split == Split::kNone) return {};
    return {.dim = tensor.split == Split::kColumn ? 0 : 1,
            .parts = tensor.expert ? ranks_.parallel.expert_tensor_parallel()
                                   : ranks_.parallel.tensor_model_parallel_size,
            .halves = tensor.merge == Merge::kGateUp && tensor.split == Split::kColumn ? 2 : 1};
  }

  void add(const MegatronTensor& tensor,
           const std::string& key,
           const std::vector<RankFileTensor>& slices) {
    const auto cut = cut_of(tensor);
    Shape shape = tensor.shape;
    if (tensor.vocabulary && !slices.front().item.shape.empty())
      shape[0] = slices.front().item.shape[0] * cut.parts;
    Shape local = shape;
    require(shape[cut.dim] % (cut.parts * cut.halves) == 0, ErrorKind::kLayout,
            "{}: dimension {} of {} is not divisible by {}", key, cut.dim, to_string(shape),
            cut.parts * cut.halves);
    local[cut.dim] /= cut.parts;
    std::vector<std::vector<const RankFileTensor*>> parts(static_cast<std::size_t>(cut.parts));
    for (const auto& slice : slices) {
      const auto& file = file_of(slice);
      require(slice.item.shape == local && slice.item.dtype == slices.front().item.dtype,
              ErrorKind::kLayout, "{}: {}: is {} {}, expected {} {}, a part of {}",
              file.storage.path.string(), key, short_name(slice.item.dtype),
              to_string(slice.item.shape), short_name(slices.front().item.dtype), to_string(local),
              to_string(shape));
      parts[static_cast<std::size_t>(file.tp % cut.parts)].push_back(&slice);
    }
    auto copies = slices.size();
    for (std::size_t i = 0; i < parts.size(); ++i) {
      require(!parts[i].empty(), ErrorKind::kLayout,
              "{}: part {} of {}, of tensor parallel rank {}, is in no file", key, i, parts.size(),
              i);
      copies = std::min(copies, parts[i].size());
    }
    for (std::size_t copy = 0; copy < copies; ++copy) {
      TensorLayout whole{
          .name = key, .dtype = slices.front().item.dtype, .shape = shape, .shards = {}};
      for (std::size_t i = 0; i < parts.size(); ++i)
        add_slice(cut, static_cast<int>(i), *parts[i][copy], whole);
      if (copy == 0) {
        stored_.layout.add_tensor(std::move(whole));
      } else {
        whole.name = fmt::format("{} of {}", key, file_of(*parts.front()[copy]).name);
        stored_.replicas.push_back({.tensor = std::move(whole), .of = key});
      }
    }
  }

  void add_slice(const Cut& cut, int part, const RankFileTensor& slice, TensorLayout& whole) {
    const auto& item = slice.item;
    const auto rows = item.shape[cut.dim] / cut.halves;
    for (int half = 0; half < cut.halves; ++half) {
      Box box = Box::whole(whole.shape);
      box.offset[cut.dim] = half * (whole.shape[cut.dim] / cut.halves) + part * rows;
      box.size[cut.dim] = rows;
      auto shard = distckpt::shard_of(item, box, slice.file);
      shard.at.offset += half * rows * shard.at.strides[cut.dim];
      whole.shards.push_back(shard);
    }
    auto checksum = distckpt::checksum_of(item, slice.file,
                                          fmt::format("{} of {}", whole.name, file_of(slice).name));
    if (!checksum) return;
    const auto& range = checksum->range;
    if (records_.emplace(range.storage, range.offset).second)
      stored_.checksums.push_back(std::move(*checksum));
  }

  const RankFiles& ranks_;
  const ModelMap& map_;
  Stored& stored_;
  std::set<std::string> used_;
  std::set<std::pair<distckpt::StorageId, std::int64_t>> records_;
};

}  // namespace

Stored read_legacy(const Location& location, const OpenOptions& options) {
  auto ranks = std::make_shared<RankFiles>(read_rank_files(location.folder));
  Stored stored{.megatron_names = true,
                .training_state = std::move(ranks->training_state),
                .common = std::move(ranks->common)};
  stored.hf = find_hf_form(location, options);
  const auto embedding = ranks->tensors.find(std::string(kEmbeddingKey));
  for (const auto& [key, slices] : ranks->tensors) {
    auto shape = slices.front().item.shape;
    // A vocabulary is split over the ranks, the rows of a value head are not.
    const bool vocabulary =
        key == kEmbeddingKey || (key == kHead && embedding != ranks->tensors.end() &&
                                 embedding->second.front().item.shape == shape);
    if (vocabulary && !shape.empty()) shape[0] *= ranks->parallel.tensor_model_parallel_size;
    stored.outline.emplace_back(key, shape);
  }
  stored.assemble = [ranks](const ModelMap& map, Stored& into) {
    Assembler(*ranks, map, into).run();
  };
  return stored;
}

}  // namespace ferry::converter
