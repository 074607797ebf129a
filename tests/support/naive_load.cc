#include "tests/support/naive_load.h"

#include <ATen/ATen.h>

#include <map>
#include <string>
#include <vector>

#include "converter/checkpoint.h"
#include "converter/megatron_links.h"
#include "distckpt/error.h"
#include "distckpt/file_box_io.h"

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
  source.read({.at = tensor.shards[0].at, .size = tensor.shape, .element_size = size_of(tensor.dtype)},
              std::span(static_cast<std::byte*>(whole.mutable_data_ptr()),
                        static_cast<std::size_t>(tensor.num_bytes())),
              unused);
  return whole;
}

at::Tensor part_of(at::Tensor tensor, const distckpt::Box& box) {
  for (int d = 0; d < box.rank(); ++d) tensor = tensor.narrow(d, box.offset[d], box.size[d]);
  return tensor;
}

}  // namespace

distckpt::TransformerConfig read_config(const std::filesystem::path& hf_folder) {
  return converter::open(hf_folder).map.config;
}

void naive_load(models::GPTModel& model, const std::filesystem::path& hf_folder) {
  const auto checkpoint = converter::open(hf_folder);
  const auto source = checkpoint.source();
  std::map<std::string, const converter::MegatronTensor*> by_key;
  for (const auto& tensor : checkpoint.map.megatron)
    by_key.emplace(converter::single_key(tensor), &tensor);
  for (const auto& parameter : model.parameters().all()) {
    const auto& spec = parameter.spec;
    const auto found = by_key.find(spec.key);
    require(found != by_key.end(), ErrorKind::kNotFound, "the table has no {}", spec.key);
    const auto& megatron = *found->second;
    auto whole = at::zeros(at::IntArrayRef(spec.global_shape.begin(), spec.global_shape.end()),
                           at::kFloat);
    for (const auto& part : megatron.parts) {
      const auto from =
          part_of(read_tensor(checkpoint, *source, checkpoint.map.tensors[part.model].name),
                  part.model_box)
              .to(at::kFloat);
      auto into = part_of(whole, part.box);
      into.copy_(from.reshape(into.sizes()));
    }
    std::int64_t row = 0;
    for (const auto& box : spec.boxes) {
      parameter.value.narrow(0, row, box.size[0]).copy_(part_of(whole, box));
      row += box.size[0];
    }
  }
}

}  // namespace ferry::support
