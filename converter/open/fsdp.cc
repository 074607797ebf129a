// FSDP states that every rank saved by itself, as verl does: model_world_size_W_rank_R.pt, with the
// rank's parts of the tensors: a model, a LoRA adapter of PEFT, or both.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "converter/open/formats.h"
#include "converter/stored/verl_lora.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/dtensor.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/storage/filenames.h"
#include "distckpt/storage/source_tree.h"

namespace ferry::converter {
namespace fs = std::filesystem;
namespace {

using distckpt::TensorLayout;

constexpr std::string_view kSaveDTensorsAnew =
    "{k:v for k,v in d.items() if isinstance(v,torch.Tensor)}";

enum class FsdpPart { kModel, kAdapter };

class FsdpReader {
 public:
  FsdpReader(const Location& location, FsdpPart part) : folder_(location.folder), part_(part) {}

  Stored read() {
    const auto ranks = find_ranks();
    for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank)
      read_file(rank, ranks[static_cast<std::size_t>(rank)]);
    for (auto& [name, copies] : tensors_) {
      std::string of = name;
      for (auto& [copy, tensor] : copies) {
        if (copy == copies.begin()->first) {
          stored_.layout.add_tensor(std::move(tensor));
        } else {
          tensor.name = fmt::format("{} of copy {}", name, copy);
          stored_.replicas.push_back({.tensor = std::move(tensor), .of = of});
        }
      }
    }
    stored_.num_adapter_tensors = std::ranges::count_if(names_, is_lora_factor);
    return std::move(stored_);
  }

 private:
  // The files, by rank: all of one world size, none missing.
  std::vector<fs::path> find_ranks() {
    std::map<int, std::map<int, fs::path>> worlds;
    for (const auto& path : distckpt::list_source(folder_)) {
      const auto name = path.filename().string();
      if (const auto rank = distckpt::parse_fsdp_filename(name)) {
        worlds[rank->world_size][rank->rank] = path;
      } else if (name.starts_with("optim_world_size_") ||
                 name.starts_with("extra_state_world_size_")) {
        stored_.training_state.push_back(name);
      }
    }
    require(worlds.size() == 1, ErrorKind::kCorrupt, "{}: holds files of world sizes {} and {}",
            folder_.string(), worlds.begin()->first, worlds.rbegin()->first);
    const auto& [world, files] = *worlds.begin();
    std::vector<fs::path> ranks;
    for (int rank = 0; rank < world; ++rank) {
      const auto file = files.find(rank);
      require(file != files.end(), ErrorKind::kNotFound, "{}: is missing",
              (folder_ / distckpt::fsdp_filename({.world_size = world, .rank = rank})).string());
      ranks.push_back(file->second);
    }
    require(files.size() == ranks.size(), ErrorKind::kCorrupt, "{}: is beyond its world size",
            files.rbegin()->second.string());
    return ranks;
  }

  void read_file(int rank, const fs::path& path) {
    const distckpt::TorchFile file(path, distckpt::dtensor_globals(), kSaveDTensorsAnew);
    const auto storage = stored_.layout.add_storage(file.storage());
    std::set<std::int64_t> records;
    std::set<std::string> names;
    for (const auto& [key, value] : file.root().items()) {
      const bool is_factor = is_lora_factor(key.as_string());
      const auto name =
          is_factor ? std::string(key.as_string()) : name_in_base(key.as_string(), path.string());
      require(names.insert(name).second, ErrorKind::kCorrupt, "{}: holds {} twice", path.string(),
              name);
      require(first_.empty() || names_.contains(name), ErrorKind::kCorrupt,
              "{}: holds {}, which {} lacks", path.string(), name, first_.string());
      if (is_factor != (part_ == FsdpPart::kAdapter)) continue;
      const auto parts = distckpt::parse_rank_parts(file, value, name);
      auto& tensor = tensor_of(name, parts, rank, path);
      for (const auto& part : parts.parts) {
        require(tensor.shards.empty() || tensor.dtype == part.item.dtype, ErrorKind::kCorrupt,
                "{}: {}: is of dtype {}, but {} in files of ranks before", path.string(), name,
                short_name(part.item.dtype), short_name(tensor.dtype));
        tensor.dtype = part.item.dtype;
        tensor.shards.push_back(distckpt::shard_of(part.item, part.box, storage));
        auto checksum = distckpt::checksum_of(part.item, storage, name);
        if (checksum && records.insert(checksum->range.offset).second)
          stored_.checksums.push_back(std::move(*checksum));
      }
    }
    for (const auto& name : names_)
      require(names.contains(name), ErrorKind::kCorrupt, "{}: lacks {}, which {} holds",
              path.string(), name, first_.string());
    if (first_.empty()) first_ = path;
    names_ = std::move(names);
  }

  TensorLayout& tensor_of(const std::string& name,
                          const distckpt::RankTensorParts& parts,
                          int rank,
                          const fs::path& path) {
    auto& copies = tensors_[name];
    const auto [at, added] = copies.try_emplace(parts.copy.value_or(rank),
                                                TensorLayout{.name = name, .shape = parts.shape});
    require(at->second.shape == parts.shape, ErrorKind::kCorrupt,
            "{}: {}: has shape {}, but {} in files of ranks before", path.string(), name,
            to_string(parts.shape), to_string(at->second.shape));
    return at->second;
  }

  fs::path folder_;
  FsdpPart part_;
  Stored stored_;
  fs::path first_;                                                       // of the files read
  std::set<std::string> names_;                                          // in each, of both parts
  std::map<std::string, std::map<std::int64_t, TensorLayout>> tensors_;  // by name, then by copy
};

}  // namespace

Stored read_fsdp(const Location& location, const OpenOptions& options) {
  auto stored = FsdpReader(location, FsdpPart::kModel).read();
  const bool alone = stored.layout.tensors().empty();
  if (stored.num_adapter_tensors > 0 && (alone || !options.without_adapter))
    refuse_adapter(location, alone);
  stored.hf = hf_form_of(location, options);
  return stored;
}

Stored read_fsdp_adapter(const Location& location) {
  return FsdpReader(location, FsdpPart::kAdapter).read();
}

}  // namespace ferry::converter
