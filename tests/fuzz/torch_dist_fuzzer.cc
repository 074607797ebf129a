#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <tuple>
#include <vector>

#include "distckpt/formats/torch_dist.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/sharded_tensor.h"
#include "distckpt/storage/filenames.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"
#include "tests/support/temp_dir.h"

namespace ferry::fuzz {
namespace {

using distckpt::TorchDistCheckpoint;
using distckpt::TorchDistItem;

// A checkpoint whose files are one hole each, so that .metadata decides everything.
class Folder {
 public:
  Folder() {
    write(distckpt::kTorchDistConfig, R"({"sharded_backend": "torch_dist",
"sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1})");
    for (const auto* name : {"__0_0.distcp", "__0_1.distcp", "__1_0.distcp", "__1_1.distcp",
                             "__2_0.distcp", "__3_0.distcp"}) {
      write(name, "");
      std::filesystem::resize_file(folder_ / name, 1 << 20);
    }
  }
  const std::filesystem::path& path() const { return folder_.path(); }
  void write(std::string_view name, std::string_view text) const {
    std::ofstream(folder_ / name, std::ios::binary) << text;
  }

 private:
  support::TempDir folder_;
};

void expect_sound(const TorchDistCheckpoint& checkpoint) {
  std::vector<TorchDistItem> items;
  distckpt::Layout layout;
  for (const auto& file : checkpoint.files) {
    expect(file.path.parent_path() == checkpoint.folder, "{} is elsewhere", file.path.string());
    layout.add_storage(file);
  }
  for (const auto& tensor : checkpoint.tensors) {
    distckpt::TensorLayout one{.name = tensor.key, .dtype = tensor.dtype, .shape = tensor.shape};
    for (const auto& chunk : tensor.chunks) {
      items.push_back(chunk.item);
      one.shards.push_back(
          distckpt::packed_shard(chunk.box, tensor.dtype, chunk.item.file, chunk.item.offset));
    }
    layout.add_tensor(std::move(one));
  }
  check_layout(layout);
  for (const auto& object : checkpoint.objects) {
    items.push_back(object.item);
    distckpt::parse_unique_key(object.key);
  }
  if (checkpoint.common_item) items.push_back(*checkpoint.common_item);
  const auto place = [](const TorchDistItem& item) {
    return std::tuple(item.file, item.offset, item.length);
  };
  std::ranges::sort(items, {}, place);
  for (std::size_t i = 0; i < items.size(); ++i) {
    const auto& item = items[i];
    const auto size = checkpoint.files.at(item.file).size;
    expect(item.offset >= 0 && item.length >= 0 && item.offset <= size &&
               item.length <= size - item.offset,
           "an item at byte {} leaves its file", item.offset);
    expect(i == 0 || items[i - 1].file != item.file ||
               items[i - 1].offset + items[i - 1].length <= item.offset,
           "two items share byte {}", item.offset);
  }
  expect(std::ranges::is_sorted(checkpoint.tensors, {}, &distckpt::TorchDistTensor::key) &&
             std::ranges::is_sorted(checkpoint.objects, {}, &distckpt::TorchDistObject::key),
         "the keys are not sorted");
}

}  // namespace

void torch_dist(std::string_view input) {
  static const Folder folder;
  folder.write(distckpt::kTorchDistMetadata, input);
  TorchDistCheckpoint checkpoint;
  if (!accepts([&] { checkpoint = distckpt::read_torch_dist(folder.path()); })) return;
  expect_sound(checkpoint);
}

}  // namespace ferry::fuzz
