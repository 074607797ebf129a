#include "models/vision/vision_model.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>

#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/kernels/product/linear.h"
#include "models/spec/sharding.h"
#include "models/transformer/recompute.h"
#include "models/vision/vision_functions.h"

namespace ferry::models {

// Row and column of each patch, in the order of the patches: those of a token are neighbours.
struct PatchPlaces {
  at::Tensor row{}, column{};    // [patches], int64
  at::Tensor height{}, width{};  // [patches], int64: of the patch's image
};

// The angles of each patch: [patches, 1, channels], fp32.
struct Rotation {
  at::Tensor cos{}, sin{};
};

namespace {

constexpr double kNormEpsilon = 1e-6;
// Patches that attend at a time, or up to one less than twice as many: products of so many rows
// have the bits of those of all, and scores take heads x rows x patches of memory.
constexpr std::int64_t kQueryRows = 256;
constexpr std::int64_t kFlashChannels = 8;  // flash takes heads of multiples of so many channels

PatchPlaces places_of(std::span<const ImageGrid> grids, std::int64_t merge, at::Device device) {
  std::vector<at::Tensor> rows, columns, heights, widths;
  for (const auto& grid : grids) {
    const auto in_blocks = [&](const at::Tensor& of_patches) {
      return of_patches.expand({grid.height, grid.width})
          .reshape({grid.height / merge, merge, grid.width / merge, merge})
          .transpose(1, 2)
          .flatten()
          .repeat({grid.frames});
    };
    rows.push_back(in_blocks(at::arange(grid.height, at::kLong).unsqueeze(1)));
    columns.push_back(in_blocks(at::arange(grid.width, at::kLong).unsqueeze(0)));
    heights.push_back(at::full({grid.num_patches()}, grid.height, at::kLong));
    widths.push_back(at::full({grid.num_patches()}, grid.width, at::kLong));
  }
  return {.row = at::cat(rows).to(device),
          .column = at::cat(columns).to(device),
          .height = at::cat(heights).to(device),
          .width = at::cat(widths).to(device)};
}

// The two places of a grid of `side` between which each index of an axis lies, and their weights,
// ends meeting ends (get_vision_interpolation_indices_and_weights of transformers).
struct Taps {
  at::Tensor places{};   // [patches, 2], int64
  at::Tensor weights{};  // [patches, 2], fp32
};

Taps taps_of(const at::Tensor& index, const at::Tensor& size, std::int64_t side) {
  const auto source =
      index.to(at::kFloat) * (side - 1) / at::clamp(size - 1, /*min=*/at::Scalar(1));
  const auto floor = at::floor(source);
  const auto offsets = at::arange(0, 2, index.options());
  const auto places = (floor.to(at::kLong).unsqueeze(1) + offsets).clamp(0, side - 1);
  const auto distance = (source.unsqueeze(1) - floor.unsqueeze(1) - offsets).abs();
  return {.places = places, .weights = (1 - distance).clamp_min(0)};
}

// A rotation in fp32 of x [patches, heads, dim], rounded once.
at::Tensor rotate(const at::Tensor& x, const Rotation& by) {
  const auto wide = x.to(at::kFloat);
  const auto half = wide.size(-1) / 2;
  const auto turned = at::cat({-wide.slice(-1, half), wide.slice(-1, 0, half)}, -1);
  return (wide * by.cos + turned * by.sin).to(x.scalar_type());
}

// Attention of a frame's patches [1, heads, patches, dim] to each other, which is added to
// `attended` as [1, rows, heads, dim].
void attend_frame(const at::Tensor& query,
                  const at::Tensor& key,
                  const at::Tensor& value,
                  Alignment alignment,
                  std::vector<at::Tensor>& attended) {
  const auto dim = query.size(-1);
  const auto scale = std::pow(static_cast<double>(dim), -0.5);
  if (query.is_cuda() && query.scalar_type() == at::kBFloat16 && dim % kFlashChannels == 0) {
    attended.push_back(flash_attention_of_frame(query, key, value, scale));
    return;
  }
  const auto chunks = std::max<std::int64_t>(1, query.size(2) / kQueryRows);
  for (const auto& rows : query.tensor_split(chunks, 2))
    attended.push_back(eager_attention_of_frame(rows, key, value, scale, alignment));
}

}  // namespace

VisionModel::VisionModel(const TransformerConfig& config,
                         const ParallelState& mesh,
                         distckpt::DType dtype,
                         Alignment alignment)
    : VisionModel(config,
                  mesh,
                  alignment,
                  make_parameters(config, mesh, {.alignment = alignment, .dtype = dtype})) {
  own_->check_all_taken();
}

VisionModel::VisionModel(const TransformerConfig& config,
                         const ParallelState& mesh,
                         Alignment alignment,
                         Parameters& parameters)
    : config_(config), mesh_(mesh), alignment_(alignment) {
  take_all(parameters);
}

VisionModel::VisionModel(const TransformerConfig& config,
                         const ParallelState& mesh,
                         Alignment alignment,
                         std::unique_ptr<Parameters> own)
    : VisionModel(config, mesh, alignment, *own) {
  own_ = std::move(own);
}

std::unique_ptr<Parameters> VisionModel::make_parameters(const TransformerConfig& config,
                                                         const ParallelState& mesh,
                                                         const LayoutOptions& options) {
  return std::make_unique<Parameters>(
      vision_layout(config, mesh.shape(), mesh.coordinates(), options), mesh.world().device());
}

void VisionModel::take_all(Parameters& parameters) {
  const auto& config = config_;
  require(config.vision.has_value(), ErrorKind::kLayout,
          "models of the family {} have no vision tower that is computed", config.family);
  const auto& vision = *config.vision;
  require(vision.problem.empty(), ErrorKind::kLayout, "{}", vision.problem);
  const auto side = std::llround(std::sqrt(static_cast<double>(vision.num_position_embeddings)));
  require(side * side == vision.num_position_embeddings && vision.hidden_size > 0 &&
              vision.hidden_size % (4 * vision.num_heads) == 0 &&
              vision.out_hidden_size == config.hidden_size,
          ErrorKind::kLayout,
          "vision_config: {} channels in {} heads, {} places and {} channels of a token do not fit "
          "together or the language model's {}",
          vision.hidden_size, vision.num_heads, vision.num_position_embeddings,
          vision.out_hidden_size, config.hidden_size);
  const std::string base(kVisionModel);
  patch_embed_ = take_linear(parameters, base + "patch_embed.proj");
  pos_embed_ = parameters.take(base + "pos_embed.weight");
  for (std::int64_t i = 0; i < vision.depth; ++i) {
    const auto prefix = fmt::format("{}{}{}.", base, kDecoderLayers, i);
    blocks_.push_back(
        {.norm1 = take_norm(parameters, prefix + "self_attention.linear_qkv.layer_norm", "_"),
         .norm2 = take_norm(parameters, prefix + "mlp.linear_fc1.layer_norm", "_"),
         .qkv = take_linear(parameters, prefix + "self_attention.linear_qkv"),
         .proj = take_linear(parameters, prefix + "self_attention.linear_proj"),
         .fc1 = take_linear(parameters, prefix + "mlp.linear_fc1"),
         .fc2 = take_linear(parameters, prefix + "mlp.linear_fc2")});
  }
  merger_ = take_merger(parameters, base + "merger.", false);
  for (std::size_t i = 0; i < vision.deepstack_visual_indexes.size(); ++i)
    deepstack_.push_back(
        take_merger(parameters, fmt::format("{}decoder.deepstack_merger_list.{}.", base, i), true));
}

VisionModel::Linear VisionModel::take_linear(Parameters& parameters, const std::string& name) {
  return {.weight = parameters.take(name + ".weight"), .bias = parameters.take(name + ".bias")};
}

VisionModel::Norm VisionModel::take_norm(Parameters& parameters,
                                         const std::string& name,
                                         const char* separator) {
  return {.weight = parameters.take(name + separator + "weight"),
          .bias = parameters.take(name + separator + "bias")};
}

VisionModel::Merger VisionModel::take_merger(Parameters& parameters,
                                             const std::string& prefix,
                                             bool over_token) {
  return {.norm = take_norm(parameters, prefix + "patch_norm", "."),
          .fc1 = take_linear(parameters, prefix + "linear_fc1"),
          .fc2 = take_linear(parameters, prefix + "linear_fc2"),
          .over_token = over_token};
}

at::Tensor VisionModel::apply(const at::Tensor& x, const Linear& layer) const {
  return linear(x, layer.weight, layer.bias, alignment_);
}

// The grid of learnt embeddings, stretched over each image: [patches, hidden], fp32.
at::Tensor VisionModel::position_embeddings(const PatchPlaces& places) const {
  const auto& vision = *config_.vision;
  const auto side = std::llround(std::sqrt(static_cast<double>(vision.num_position_embeddings)));
  const auto rows = taps_of(places.row, places.height, side);
  const auto columns = taps_of(places.column, places.width, side);
  const auto indices = (rows.places.unsqueeze(2) * side + columns.places.unsqueeze(1)).flatten(1);
  const auto weights = (rows.weights.unsqueeze(2) * columns.weights.unsqueeze(1)).flatten(1);
  // In fp32, too, so that the gradient of a place is added up and then rounded.
  return (at::embedding(pos_embed_.to(at::kFloat), indices) * weights.unsqueeze(2)).sum(1);
}

// Each frame of each image by itself.
at::Tensor VisionModel::attend(const Block& block,
                               const at::Tensor& normed,
                               const Rotation& rotation,
                               std::span<const ImageGrid> grids) const {
  const auto heads = config_.vision->num_heads;
  const auto patches = normed.size(0);
  const auto parts = apply(normed, block.qkv).reshape({patches, 3, heads, -1}).unbind(1);
  const auto by_heads = [](const at::Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };
  const auto query = by_heads(rotate(parts[0], rotation));
  const auto key = by_heads(rotate(parts[1], rotation));
  const auto value = by_heads(parts[2]);
  std::vector<at::Tensor> attended;
  std::int64_t begin = 0;
  for (const auto& grid : grids) {
    const auto count = grid.height * grid.width;
    for (std::int64_t frame = 0; frame < grid.frames; ++frame, begin += count) {
      const auto part = [&](const at::Tensor& x) { return x.narrow(2, begin, count); };
      attend_frame(part(query), part(key), part(value), alignment_, attended);
    }
  }
  return apply(at::cat(attended, 1).reshape({patches, -1}).contiguous(), block.proj);
}

at::Tensor VisionModel::merge(const at::Tensor& x, const Merger& merger) const {
  const auto merged = config_.vision->merged_size();
  const auto joined = merger.over_token ? x.view({-1, merged}) : x;
  const auto normed =
      at::layer_norm(joined, {joined.size(1)}, merger.norm.weight, merger.norm.bias, kNormEpsilon)
          .view({-1, merged});
  return apply(at::gelu(apply(normed, merger.fc1)), merger.fc2);
}

at::Tensor VisionModel::run_block(const Block& block,
                                  const at::Tensor& x,
                                  const Rotation& rotation,
                                  std::span<const ImageGrid> grids) const {
  const auto norm = [&](const at::Tensor& of, const Norm& layer) {
    return at::layer_norm(of, {of.size(1)}, layer.weight, layer.bias, kNormEpsilon);
  };
  const auto y = x + attend(block, norm(x, block.norm1), rotation, grids);
  return y + apply(at::gelu(apply(norm(y, block.norm2), block.fc1), "tanh"), block.fc2);
}

ImageFeatures VisionModel::forward(const at::Tensor& pixel_values,
                                   std::span<const ImageGrid> grids) const {
  const at::AutoGradMode grad(at::GradMode::is_enabled() && own_ == nullptr);
  const auto& vision = *config_.vision;
  std::int64_t patches = 0;
  for (const auto& grid : grids) {
    require(grid.frames > 0 && grid.height > 0 && grid.width > 0 &&
                grid.height % vision.spatial_merge_size == 0 &&
                grid.width % vision.spatial_merge_size == 0,
            ErrorKind::kUsage, "an image of {} x {} x {} patches cannot be merged by {}",
            grid.frames, grid.height, grid.width, vision.spatial_merge_size);
    patches += grid.num_patches();
  }
  const auto size = vision.patch_size;
  const auto frames = vision.temporal_patch_size;
  require(pixel_values.dim() == 2 && pixel_values.size(0) == patches &&
              pixel_values.size(1) == vision.in_channels * frames * size * size,
          ErrorKind::kUsage, "pixel_values are {} x {}, expected {} patches of {}",
          pixel_values.size(0), pixel_values.dim() > 1 ? pixel_values.size(1) : 0, patches,
          vision.in_channels * frames * size * size);
  auto x = patch_embed(pixel_values.to(pos_embed_.device(), pos_embed_.scalar_type())
                           .view({-1, vision.in_channels, frames, size, size}),
                       patch_embed_.weight, patch_embed_.bias, alignment_);
  const auto places = places_of(grids, vision.spatial_merge_size, x.device());
  x = x + position_embeddings(places).to(x.scalar_type());
  const auto dim = vision.hidden_size / vision.num_heads / 2;  // of each of both axes
  const auto inv_freq =
      at::reciprocal(
          at::pow(vision.rotary_base, at::arange(0, dim, 2, at::kFloat) / static_cast<double>(dim)))
          .to(x.device());
  const auto angles = [&](const at::Tensor& place) {
    return place.to(at::kFloat).unsqueeze(1) * inv_freq;
  };
  const auto of_both = at::cat({angles(places.row), angles(places.column)}, 1);
  const auto all = at::cat({of_both, of_both}, 1).unsqueeze(1);  // [patches, 1, channels]
  const Rotation rotation{.cos = all.cos(), .sin = all.sin()};

  ImageFeatures features;
  const auto& deep = vision.deepstack_visual_indexes;
  const std::vector<ImageGrid> of_images(grids.begin(), grids.end());
  for (std::size_t i = 0; i < blocks_.size(); ++i) {
    x = recompute(
            [this, i, rotation, of_images](const std::vector<at::Tensor>& inputs) {
              return std::vector{run_block(blocks_[i], inputs[0], rotation, of_images)};
            },
            {x})
            .front();
    const auto found = std::ranges::find(deep, static_cast<std::int64_t>(i));
    if (found != deep.end())
      features.deepstack.push_back(
          merge(x, deepstack_[static_cast<std::size_t>(found - deep.begin())]));
  }
  features.embeddings = merge(x, merger_);
  return features;
}

}  // namespace ferry::models
