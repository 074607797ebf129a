#include "converter/stored/stored.h"

#include <algorithm>
#include <map>

#include "distckpt/base/error.h"
#include "distckpt/elements/cast.h"

namespace ferry::converter {

void require_weight_dtype(const std::string& name, distckpt::DType dtype) {
  require(distckpt::can_cast(dtype, distckpt::DType::kF32), ErrorKind::kLayout,
          "{}: is of dtype {}, weights of fp16, bf16, fp32 or fp64 are expected", name,
          short_name(dtype));
}

void link_replicas(std::vector<Replica> replicas,
                   distckpt::Layout& layout,
                   distckpt::TensorMap& map) {
  if (replicas.empty()) return;
  std::multimap<std::uint32_t, distckpt::BoxLink> links;
  std::map<std::uint32_t, int> num_copies;  // of each model tensor, beside the first
  for (const auto& link : map.links) {
    links.emplace(link.stored, link);
    auto& num = num_copies[link.model];
    num = std::max(num, link.copy);
  }
  const auto paddings = map.padding;
  for (auto& replica : replicas) {
    const auto of = layout.find(replica.of);
    require(of.has_value(), ErrorKind::kBug, "{}: is a replica of nothing", replica.of);
    const auto stored = layout.add_tensor(std::move(replica.tensor));
    std::map<std::uint32_t, int> copies;
    for (auto [at, end] = links.equal_range(*of); at != end; ++at) {
      auto link = at->second;
      const auto [copy, added] = copies.try_emplace(link.model, 0);
      if (added) copy->second = ++num_copies[link.model];
      link.stored = stored;
      link.copy = copy->second;
      map.links.push_back(link);
    }
    for (const auto& padding : paddings) {
      if (padding.stored == *of)
        map.padding.push_back({.stored = stored, .box = padding.box, .ones = padding.ones});
    }
  }
}

}  // namespace ferry::converter
