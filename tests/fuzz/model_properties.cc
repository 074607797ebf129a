#include "tests/fuzz/model_properties.h"

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "converter/families/megatron_args.h"
#include "converter/families/megatron_links.h"
#include "converter/families/model_map.h"
#include "converter/optimizer/common_state.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "distckpt/formats/torch_save/pickle_writer.h"
#include "distckpt/plan/coverage.h"
#include "distckpt/plan/layout.h"
#include "tests/fuzz/property.h"

namespace ferry::fuzz {
namespace {

using converter::ModelMap;
using distckpt::Box;
using models::TransformerConfig;

// Rules take time for each tensor; a few of each kind say it all.
bool is_small(const TransformerConfig& config) {
  const auto experts = std::max<std::int64_t>(config.num_moe_experts, 1);
  return (config.num_layers + config.mtp_num_layers) * experts <= 64 &&
         config.num_query_groups <= 64;
}

// A checkpoint as Megatron would hold it, each tensor whole and stacked where its kind is.
distckpt::Layout stored(const ModelMap& map) {
  distckpt::Layout layout;
  for (const auto& tensor : map.megatron) {
    const auto& key = map.written_key(tensor);
    if (layout.find(key)) continue;
    auto shape = tensor.shape;
    if (tensor.expert) shape.push_front(map.config.num_moe_experts);
    if (key == tensor.stacked_key) shape.push_front(map.config.num_layers);
    layout.add_tensor({.name = key, .shape = shape});
  }
  return layout;
}

}  // namespace

void expect_sound(const TransformerConfig& config) {
  expect(config.num_query_groups >= 1 && config.num_attention_heads % config.num_query_groups == 0,
         "{} heads in {} groups", config.num_attention_heads, config.num_query_groups);
  if (!is_small(config)) return;
  ModelMap map;
  if (!accepts([&] { map = converter::make_model_map(config); })) return;
  std::int64_t elements = 0;
  for (const auto& tensor : map.tensors) {
    const auto volume = checked_volume(tensor.shape);
    expect(volume && !__builtin_add_overflow(elements, *volume, &elements),
           "{}: the shape {} overflows", tensor.name, to_string(tensor.shape));
  }
  const auto layout = stored(map);
  const auto links = link_megatron(map, layout);
  std::vector<std::vector<Box>> of_model(map.tensors.size());
  std::vector<std::vector<Box>> of_stored(layout.tensors().size());
  for (const auto& link : links.links) {
    of_model[link.model].push_back(link.model_box);
    of_stored[link.stored].push_back(link.stored_box);
  }
  for (std::size_t i = 0; i < of_model.size(); ++i) {
    expect(!distckpt::find_coverage_defect(map.tensors[i].shape, of_model[i]),
           "{} is not mapped once", map.tensors[i].name);
  }
  for (std::uint32_t i = 0; i < of_stored.size(); ++i) {
    expect(!distckpt::find_coverage_defect(layout.tensor(i).shape, of_stored[i]),
           "{} is not mapped once", layout.tensor(i).name);
  }
}

void expect_args_alike(const TransformerConfig& config) {
  distckpt::PickleWriter pickle;
  converter::write_common_state(pickle, config, {}, {}, std::nullopt);
  constexpr std::string_view kGlobals[] = {"argparse.Namespace"};
  const auto common =
      distckpt::Pickle::parse(pickle.finish(), {.source = "args", .allowed_globals = kGlobals});
  const auto args = converter::read_args(common.root());
  expect(args.has_value(), "the arguments are not found");
  converter::require_same_model(*args, config, "args", "fuzz");
}

}  // namespace ferry::fuzz
