#include "converter/optimizer/optimizer_records.h"

#include <charconv>

#include "distckpt/base/error.h"
#include "distckpt/formats/torch_save/torch_tensor.h"
#include "distckpt/formats/torch_save/torch_zip.h"
#include "distckpt/storage/file_io.h"

namespace ferry::converter {
namespace {

using distckpt::DType;
using distckpt::PickleKind;

constexpr std::string_view kGroup = "optimizer.distributed.dp_group_idx_";

// The number after `mark` at the beginning of `key`, both taken off.
std::optional<int> take_number(std::string_view& key, std::string_view mark) {
  if (!key.starts_with(mark)) return std::nullopt;
  int number = 0;
  const auto* const end = key.data() + key.size();
  const auto [stop, error] = std::from_chars(key.data() + mark.size(), end, number);
  if (error != std::errc() || number < 0) return std::nullopt;
  key = {stop, static_cast<std::size_t>(end - stop)};
  return number;
}

std::optional<GroupKey> take_group(std::string_view& key) {
  const int optimizer = strip_chain(key);
  const auto rank = take_number(key, kGroup);
  if (!rank || !key.starts_with('.')) return std::nullopt;
  key.remove_prefix(1);
  return GroupKey{.optimizer = optimizer, .rank = *rank};
}

}  // namespace

int strip_chain(std::string_view& key) {
  auto rest = key;
  const auto index = take_number(rest, "chained_");
  if (!index || !rest.starts_with('.')) return 0;
  key = rest.substr(1);
  return *index;
}

std::optional<GroupKey> parse_group_key(std::string_view key, std::string_view name) {
  const auto group = take_group(key);
  if (!group || key != fmt::format("{}/shard_0_1", name)) return std::nullopt;
  return group;
}

std::optional<BucketKey> parse_bucket_key(std::string_view key) {
  constexpr std::string_view kBucket = ".bucket_idx_";
  const auto group = take_group(key);
  const auto buffer = group ? take_number(key, "gbuf_idx_") : std::nullopt;
  if (!buffer || !key.starts_with(".dtype_(")) return std::nullopt;
  const auto at = key.rfind(kBucket);
  if (at == std::string_view::npos) return std::nullopt;
  key.remove_prefix(at);
  const auto bucket = take_number(key, kBucket);
  if (!bucket || !key.starts_with('.')) return std::nullopt;
  return BucketKey{
      .group = *group, .buffer = *buffer, .bucket = *bucket, .kind = std::string(key.substr(1))};
}

// [{"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {"param": tensor, ...,
// "numel_unpadded": n}}, 1: ...}]
std::vector<GatheredBuffer> read_gathered_buffers(const distckpt::TorchDistCheckpoint& checkpoint,
                                                  const distckpt::TorchDistObject& object) {
  const distckpt::ReadFile file(checkpoint.files[object.item.file].path);
  const auto archive = distckpt::read_torch_archive(file, object.item.offset, object.item.length);
  const auto pickle = distckpt::read_object(checkpoint, object);
  const auto root = pickle.root();
  require(
      root.kind() == PickleKind::kList && root.size() == 1 && root[0].kind() == PickleKind::kDict,
      ErrorKind::kCorrupt, "{}: holds {}, not the state of an optimizer", object.key,
      root.describe());
  require(root[0].find("buckets_coalesced").has_value(), ErrorKind::kLayout,
          "{}: is of the form from before 2024, which is not converted", object.key);
  std::vector<GatheredBuffer> found;
  for (const auto& [index, dtypes] : root[0].items()) {
    if (index.kind() != PickleKind::kInt) continue;
    require(dtypes.kind() == PickleKind::kDict && dtypes.size() == 1, ErrorKind::kLayout,
            "{}: buffer {} holds several dtypes", object.key, index.as_int());
    for (const auto& [_, state] : dtypes.items()) {
      GatheredBuffer buffer{.buffer = static_cast<int>(index.as_int()),
                            .size = state.at("numel_unpadded").as_int()};
      for (const auto& [kind, value] : state.items()) {
        if (kind.as_string() == "numel_unpadded") continue;
        const auto item = distckpt::parse_tensor(value, archive);
        require(item.dtype == DType::kF32 && item.contiguous &&
                    item.shape == distckpt::Shape{buffer.size},
                ErrorKind::kLayout, "{}: {} of buffer {} is {} {}, expected a row of {} of fp32",
                object.key, kind.as_string(), buffer.buffer, short_name(item.dtype),
                to_string(item.shape), buffer.size);
        buffer.kinds.emplace(kind.as_string(), GatheredBuffer::At{.storage = object.item.file,
                                                                  .offset = item.payload_offset});
      }
      found.push_back(std::move(buffer));
    }
  }
  return found;
}

}  // namespace ferry::converter
