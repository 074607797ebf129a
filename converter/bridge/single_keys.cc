#include "converter/bridge/single_keys.h"

#include <cctype>
#include <string>
#include <string_view>
#include <unordered_map>

namespace ferry::converter {
namespace {

// The places in a key behind which a number stands if it is not counted by an axis.
constexpr std::string_view kCounted[] = {models::kDecoderLayers, ".experts.experts."};

// Finds where the number of the first leading axis belongs.
std::size_t place_of_number(std::string_view key) {
  for (const auto name : kCounted) {
    const auto at = key.find(name);
    if (at == std::string_view::npos) continue;
    const auto behind = at + name.size();
    if (behind < key.size() && std::isdigit(static_cast<unsigned char>(key[behind])) == 0)
      return behind;
  }
  return std::string_view::npos;
}

}  // namespace

std::vector<distckpt::LocalShard> with_single_keys(const ModelMap& map,
                                                   std::vector<distckpt::LocalShard> shards) {
  std::unordered_map<std::string_view, const MegatronTensor*> other_names;
  for (const auto& tensor : map.megatron) {
    if (tensor.expert) continue;
    for (const auto& name : tensor.also) other_names.emplace(name, &tensor);
  }
  for (auto& shard : shards) {
    auto& tensor = shard.tensor;
    tensor.key = models::strip_wrappers(tensor.key);
    while (tensor.prepend_axis_num > 0) {
      const auto at = place_of_number(tensor.key);
      if (at == std::string::npos) break;
      tensor.key.insert(at, std::to_string(tensor.global_offset[0]) + ".");
      tensor.global_shape = tensor.global_shape.drop_front(1);
      tensor.global_offset = tensor.global_offset.drop_front(1);
      --tensor.prepend_axis_num;
    }
    const auto other = other_names.find(tensor.key);
    if (other != other_names.end()) tensor.key = single_key(*other->second);
  }
  return shards;
}

}  // namespace ferry::converter
