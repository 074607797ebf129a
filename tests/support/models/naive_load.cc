#include "tests/support/models/naive_load.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "converter/families/megatron_links.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/file_box_io.h"

namespace ferry::support {
namespace {

at::Tensor read_tensor(const converter::Checkpoint& checkpoint,
                       distckpt::FileSource& source,
                       const std::string& name) {
  const auto index = checkpoint.layout.find(name);
  require(index.has_value(), ErrorKind::kNotFound, "no {}", name);
  const auto& tensor = checkpoint.layout.tensor(*index);
  require(tensor.shards.size() == 1, ErrorKind::kBug, "{} is not of one piece", name);
  auto whole = at::empty(at::IntArrayRef(tensor.shape.begin(), tensor.shape.end()),
                         models::scalar_type(tensor.dtype));
  std::vector<distckpt::ChecksumPart> unused;
  source.read(
      {.at = tensor.shards[0].at, .size = tensor.shape, .element_size = size_of(tensor.dtype)},
      std::span(static_cast<std::byte*>(whole.mutable_data_ptr()),
                static_cast<std::size_t>(tensor.num_bytes())),
      unused);
  return whole;
}

at::Tensor part_of(at::Tensor tensor, const distckpt::Box& box) {
  for (int d = 0; d < box.rank(); ++d) tensor = tensor.narrow(d, box.offset[d], box.size[d]);
  return tensor;
}

// Moves the dimensions `axes` behind the others.
at::Tensor in_the_order_of(const distckpt::Dims& axes, const at::Tensor& tensor) {
  std::vector<std::int64_t> order;
  for (std::int64_t d = 0; d < tensor.dim(); ++d)
    if (std::find(axes.begin(), axes.end(), d) == axes.end()) order.push_back(d);
  order.insert(order.end(), axes.begin(), axes.end());
  return tensor.permute(order);
}

}  // namespace

models::TransformerConfig read_config(const std::filesystem::path& hf_folder) {
  return converter::open(hf_folder).map.config;
}

std::vector<at::Tensor> naive_parts(
    const models::GPTModel& model,
    const std::filesystem::path& hf_folder,
    const std::function<at::Tensor(const std::string& name)>& read) {
  const auto map = converter::open(hf_folder).map;
  std::map<std::string, const converter::MegatronTensor*> by_key;
  for (const auto& tensor : map.megatron) by_key.emplace(single_key(tensor), &tensor);
  std::vector<at::Tensor> all;
  for (const auto& parameter : model.parameters().all()) {
    const auto& spec = parameter.spec;
    const auto found = by_key.find(spec.key);
    require(found != by_key.end(), ErrorKind::kNotFound, "the table has no {}", spec.key);
    auto whole =
        at::zeros(at::IntArrayRef(spec.global_shape.begin(), spec.global_shape.end()), at::kDouble);
    bool complete = true;
    for (const auto& part : found->second->parts) {
      const auto tensor = read(map.tensors[part.model].name);
      complete = complete && tensor.defined();
      if (!complete) break;
      auto into = part_of(whole, part.box);
      const auto grid = map.tensors[part.model].grid();
      const auto piece =
          part_of(tensor.view(at::IntArrayRef(grid.begin(), grid.end())), part.model_box);
      into.copy_(in_the_order_of(part.axes, piece).reshape(into.sizes()));
    }
    if (!complete) {
      all.emplace_back();
      continue;
    }
    std::vector<at::Tensor> mine;
    for (const auto& box : spec.boxes) mine.push_back(part_of(whole, box));
    all.push_back(at::cat(mine));
  }
  return all;
}

void naive_load(models::GPTModel& model, const std::filesystem::path& hf_folder) {
  const auto checkpoint = converter::open(hf_folder);
  const auto source = checkpoint.source();
  const auto parts = naive_parts(model, hf_folder, [&](const std::string& name) {
    return read_tensor(checkpoint, *source, name);
  });
  std::set<std::string> less_one;
  for (const auto& tensor : checkpoint.map.megatron)
    if (tensor.less_one) less_one.insert(single_key(tensor));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    require(parts[i].defined(), ErrorKind::kNotFound, "nothing for {}",
            model.parameters().all()[i].spec.key);
    const auto& [spec, value] = model.parameters().all()[i];
    value.copy_(less_one.contains(spec.key) ? parts[i] - 1 : parts[i]);
  }
}

}  // namespace ferry::support
