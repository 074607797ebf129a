#include "converter/open/rank_files.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "converter/families/module_names.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/torch_save.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::PickleKind;
using distckpt::PickleValue;

constexpr std::string_view kSaveRankFileAnew =
    "{k:(__import__('argparse').Namespace(**{a:b for a,b in vars(v).items() if b is None or "
    "type(b) in (bool,int,float,str,list)}) if k=='args' else v) for k,v in d.items() if "
    "k.startswith('model') or k in ('args','iteration','checkpoint_version')}";

// One chunk of layers of one stage: "model", or "model0" and so on where stages are interleaved.
struct Chunk {
  std::uint32_t file = 0;
  int index = 0;
  struct Tensor {
    std::string name{};
    distckpt::TensorItem item{};
  };
  std::vector<Tensor> tensors{};
  std::int64_t num_layers = 0;
};

class RankFilesReader {
 public:
  explicit RankFilesReader(const fs::path& folder) : folder_(folder) {}

  RankFiles read() {
    std::vector<std::pair<std::vector<int>, std::string>> ranks;
    for (const auto& path : distckpt::list_source(folder_)) {
      const auto name = path.filename().string();
      if (auto parsed = distckpt::parse_rank_folder(name)) ranks.emplace_back(*parsed, name);
    }
    std::ranges::sort(ranks);
    for (const auto& [indices, name] : ranks) read_file(indices, name);
    check_ranks();
    add_tensors();
    return std::move(result_);
  }

 private:
  void read_file(const std::vector<int>& indices, const std::string& name) {
    const auto path = folder_ / name / distckpt::kRankFile;
    require(distckpt::source_exists(path), ErrorKind::kNotFound, "{}: is missing", path.string());
    distckpt::TorchFile file(path, distckpt::object_globals(), kSaveRankFileAnew);
    const auto root = file.root();
    with_context([&] { return fmt::format("reading {}", path.string()); },
                 [&] {
                   check_version(root, path);
                   compare_arguments(root, path);
                 });
    RankFile rank{.name = name, .tp = indices[0], .storage = file.storage()};
    const auto& parallel = result_.parallel;
    const bool stages = parallel.pipeline_model_parallel_size > 1;
    const bool experts = parallel.expert_model_parallel_size > 1;
    const auto expected = 1U + (stages ? 1U : 0U) + (experts ? 1U : 0U);
    require(indices.size() == expected, ErrorKind::kCorrupt,
            "{}: the folder's name has {} ranks, but PP{} EP{}, which the arguments say, make {}",
            path.string(), indices.size(), parallel.pipeline_model_parallel_size,
            parallel.expert_model_parallel_size, expected);
    if (stages) rank.pp = indices[1];
    if (experts) rank.ep = indices.back();
    read_chunks(file, static_cast<std::uint32_t>(result_.files.size()));
    result_.files.push_back(std::move(rank));
    if (result_.files.size() == 1) result_.common = std::move(file).take_pickle();
  }

  // Before 3.0 queries, keys and values lie in another order.
  static void check_version(PickleValue root, const fs::path& path) {
    require(root.kind() == PickleKind::kDict, ErrorKind::kCorrupt, "{}: holds {}, not a dict",
            path.string(), root.describe());
    const auto version = root.find("checkpoint_version");
    require(version && version->as_float() == 3.0, ErrorKind::kLayout,
            "{}: checkpoint_version is {}, only 3.0 is read", path.string(),
            version ? version->describe() : "absent");
  }

  // All files are of the same model in the same layout.
  void compare_arguments(PickleValue root, const fs::path& path) {
    const auto parallel = read_parallel_args(root);
    require(parallel.has_value(), ErrorKind::kNotFound,
            "{}: has no arguments (args), which say how the ranks divide the model", path.string());
    const auto config = read_args(root);
    if (result_.files.empty()) {
      result_.parallel = *parallel;
      config_ = config;
      return;
    }
    const auto& first = result_.files.front().storage.path;
    require(*parallel == result_.parallel && config.has_value() == config_.has_value(),
            ErrorKind::kCorrupt,
            "{}: its arguments (TP{} PP{} EP{}) are of another layout than those of {} (TP{} PP{} "
            "EP{})",
            path.string(), parallel->tensor_model_parallel_size,
            parallel->pipeline_model_parallel_size, parallel->expert_model_parallel_size,
            first.string(), result_.parallel.tensor_model_parallel_size,
            result_.parallel.pipeline_model_parallel_size,
            result_.parallel.expert_model_parallel_size);
    if (config) require_same_model(*config, *config_, path.string(), first.string());
  }

  void read_chunks(const distckpt::TorchFile& file, std::uint32_t index) {
    const auto first = chunks_.size();
    for (const auto& [key_value, value] : file.root().items()) {
      const auto key = key_value.as_string();
      constexpr std::string_view kModel = "model";
      const auto number = key.starts_with(kModel) ? key.substr(kModel.size()) : "x";
      const bool chunk = number.empty() ||
                         (number.size() == 1 && number[0] >= '0' && number[0] <= '9') ||
                         (number.size() == 2 && number[0] >= '1' && number[0] <= '9');
      if (chunk) {
        Chunk read{.file = index, .index = number.empty() ? 0 : std::stoi(std::string(number))};
        read_chunk(file, value, read);
        chunks_.push_back(std::move(read));
      } else if (is_training_state(std::string(key) + ".") || key == "opt_param_scheduler") {
        if (index == 0) result_.training_state.emplace_back(key);
      }
    }
    require(chunks_.size() > first, ErrorKind::kCorrupt, "{}: holds no model", file.source());
  }

  static void read_chunk(const distckpt::TorchFile& file, PickleValue model, Chunk& chunk) {
    require(!model.find("language_model"), ErrorKind::kLayout,
            "{}: is of Megatron before its core, with a language_model, and is not read",
            file.source());
    for (const auto& [key, value] : model.items()) {
      const std::string name(models::strip_wrappers(key.as_string()));
      if (is_extra_state(name)) continue;
      const bool grouped = name.ends_with(".experts.weight1") || name.ends_with(".experts.weight2");
      if (grouped) {
        throw Error(ErrorKind::kLayout,
                    fmt::format("{}: {}: holds all experts of GroupedMLP, transposed, in one "
                                "tensor, which is not read",
                                file.source(), name),
                    "let Megatron-LM save it with --ckpt-format torch_dist");
      }
      if (const auto layer = parse_module_layer(name))
        chunk.num_layers = std::max(chunk.num_layers, layer->index + 1);
      chunk.tensors.push_back({.name = name, .item = file.tensor(value, name)});
    }
  }

  // Every rank that the arguments speak of is there, once.
  void check_ranks() const {
    const auto& parallel = result_.parallel;
    const int tp = parallel.tensor_model_parallel_size;
    const int etp = parallel.expert_tensor_parallel();
    const int ep = parallel.expert_model_parallel_size;
    require(tp % etp == 0, ErrorKind::kLayout,
            "{}: expert tensor parallel size {} does not divide tensor parallel size {}, which is "
            "not read",
            folder_.string(), etp, tp);
    std::set<std::tuple<int, int, int>> there;
    for (const auto& file : result_.files) there.emplace(file.tp, file.pp, file.ep);
    // The ranks of a stage that hold the first copy of the experts (mpu.get_expert_data_parallel_
    // rank() is 0) save; where there are fewer than tensor parallel ranks, all of those do.
    for (int pp = 0; pp < parallel.pipeline_model_parallel_size; ++pp) {
      for (int rank = 0; rank < std::max(tp, etp * ep); ++rank) {
        const std::tuple expected(rank % tp, pp, rank / etp % ep);
        const auto& [t, p, e] = expected;
        require(there.contains(expected), ErrorKind::kNotFound,
                "{}: the file of tensor parallel rank {}, pipeline stage {}, expert parallel rank "
                "{} is missing (TP{} PP{} EP{})",
                folder_.string(), t, p, e, tp, parallel.pipeline_model_parallel_size, ep);
      }
    }
    for (const auto& file : result_.files) {
      require(file.tp < tp && file.pp < parallel.pipeline_model_parallel_size && file.ep < ep,
              ErrorKind::kCorrupt, "{}: is beyond TP{} PP{} EP{}, which the arguments say",
              (folder_ / file.name).string(), tp, parallel.pipeline_model_parallel_size, ep);
    }
  }

  // Layers count on from chunk to chunk of the pipeline: first chunk of each stage, then the
  // second.
  std::map<std::pair<int, int>, std::int64_t> first_layers() const {
    std::map<std::pair<int, int>, const Chunk*> chunks;  // by (index, stage)
    for (const auto& chunk : chunks_) {
      const auto& file = result_.files[chunk.file];
      const auto [at, added] = chunks.emplace(std::pair(chunk.index, file.pp), &chunk);
      require(added || at->second->num_layers == chunk.num_layers, ErrorKind::kCorrupt,
              "{}: holds {} layers, but {}, of the same stage, {}", file.storage.path.string(),
              chunk.num_layers, result_.files[at->second->file].storage.path.string(),
              at->second->num_layers);
    }
    std::map<std::pair<int, int>, std::int64_t> first;
    std::int64_t layer = 0;
    for (const auto& [place, chunk] : chunks) {
      first.emplace(place, layer);
      layer += chunk->num_layers;
    }
    return first;
  }

  // Ranks hold equally many experts each.
  std::int64_t experts_per_rank() const {
    std::map<std::pair<std::uint32_t, std::string>, std::set<std::int64_t>> experts;
    for (const auto& chunk : chunks_) {
      for (const auto& tensor : chunk.tensors) {
        if (const auto expert = parse_module_expert(tensor.name))
          experts[{chunk.file, expert->prefix + expert->rest}].insert(expert->index);
      }
    }
    if (experts.empty()) return 0;
    const auto& [first, set] = *experts.begin();
    const auto count = static_cast<std::int64_t>(set.size());
    for (const auto& [place, indices] : experts) {
      const auto here = static_cast<std::int64_t>(indices.size());
      require(here == count && *indices.rbegin() == count - 1, ErrorKind::kCorrupt,
              "{}: {}: holds {} experts, the last of which is {}, but {} holds {} of {}",
              result_.files[place.first].storage.path.string(), place.second, here,
              *indices.rbegin(), result_.files[first.first].name, count, first.second);
    }
    return count;
  }

  void add_tensors() {
    const auto layers = first_layers();
    const auto experts = experts_per_rank();
    for (const auto& chunk : chunks_) {
      const auto& file = result_.files[chunk.file];
      const auto first_layer = layers.at({chunk.index, file.pp});
      for (const auto& tensor : chunk.tensors) {
        const auto key = key_of_module(tensor.name, first_layer, file.ep * experts);
        auto& all = result_.tensors[key];
        require(all.empty() || all.back().file != chunk.file, ErrorKind::kCorrupt,
                "{}: holds {} twice", file.storage.path.string(), tensor.name);
        all.push_back({.file = chunk.file, .item = tensor.item});
      }
    }
  }

  fs::path folder_;
  RankFiles result_;
  std::optional<models::TransformerConfig> config_;
  std::vector<Chunk> chunks_;
};

}  // namespace

RankFiles read_rank_files(const fs::path& folder) {
  return RankFilesReader(folder).read();
}

}  // namespace ferry::converter
