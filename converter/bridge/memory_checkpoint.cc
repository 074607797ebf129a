#include "converter/bridge/memory_checkpoint.h"

#include <algorithm>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "converter/families/families.h"
#include "converter/open/experts_form.h"
#include "converter/open/hf_opener.h"
#include "converter/stored/stored.h"
#include "distckpt/base/error.h"
#include "distckpt/formats/safetensors.h"

namespace ferry::converter {
namespace {

bool lists(const distckpt::SafetensorsEntry& entry, const distckpt::ModelTensor& tensor) {
  return entry.dtype == tensor.dtype && entry.shape == tensor.shape;
}

// A Hugging Face file's header lists what the model still has, as it has it.
bool fits(const distckpt::SafetensorsHeader& header, const Checkpoint& model) {
  return std::ranges::all_of(header.entries, [&](const distckpt::SafetensorsEntry& entry) {
    const auto copy = model.map.copies.find(entry.name);
    const auto at = copy != model.map.copies.end() ? copy : model.map.index.find(entry.name);
    if (model.map.is_carried(entry.name)) {
      return std::ranges::any_of(model.tensors, [&](const distckpt::ModelTensor& tensor) {
        return lists(entry, tensor) && tensor.name == entry.name;
      });
    }
    return at != model.map.index.end() && lists(entry, model.tensors[at->second]);
  });
}

// The names that the tensors of a checkpoint have, also of those that are given the names of
// transformers' modules, as state_dict() has them.
class FileNames {
 public:
  explicit FileNames(const Checkpoint& like) : family_(*like.map.family) {
    for (const auto& tensor : like.tensors) names_.insert(tensor.name);
  }
  std::string of(const std::string& name) const {
    if (names_.contains(name)) return name;
    for (auto& one : file_names(family_, name))
      if (names_.contains(one)) return std::move(one);
    return file_name(family_, name);
  }

 private:
  const Family& family_;
  std::set<std::string_view> names_;
};

}  // namespace

void adapt_form(const Checkpoint& origin, const Checkpoint& model, HfForm& form) {
  const auto dtype = model.tensors.front().dtype;
  if (dtype != origin.tensors.front().dtype) form.set_dtype(dtype);
  const bool keep =
      origin.map.config == model.map.config &&
      std::ranges::all_of(form.headers, [&](const distckpt::SafetensorsHeader& header) {
        return fits(header, model);
      });
  if (keep) return;
  form.headers.clear();
  form.index_text.reset();
}

Checkpoint checkpoint_in_memory(const Checkpoint& like, const std::vector<NamedMemory>& tensors) {
  require_hf_form(like);
  require(!tensors.empty(), ErrorKind::kUsage, "there are no tensors to save");
  Stored stored{.hf = like.hf};
  const FileNames names(like);
  for (const auto& tensor : tensors) {
    const auto bytes = tensor.shape.product() * size_of(tensor.dtype);
    const auto storage =
        stored.layout.add_storage(distckpt::MemoryStorage{.data = tensor.data, .size = bytes});
    stored.layout.add_tensor({.name = names.of(tensor.name),
                              .dtype = tensor.dtype,
                              .shape = tensor.shape,
                              .shards = {distckpt::packed_shard(distckpt::Box::whole(tensor.shape),
                                                                tensor.dtype, storage, 0)}});
  }
  auto location = like.location;
  location.format = Format::kHuggingFace;
  location.iteration.reset();
  auto made = open_huggingface(location, std::move(stored), {});
  if (like.map.chosen.empty())
    separate_experts(made, made.tensors);  // state_dict() has them together
  adapt_form(like, made, *made.hf);
  made.files = std::make_shared<distckpt::SourceFiles>();
  return made;
}

}  // namespace ferry::converter
