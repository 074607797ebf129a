// The images of tests/interop/rollout/test_images.py as Ferry reads them, and what the vision tower
// makes of them together.
//   vision_tool CHECKPOINT bfloat16|float32 FOLDER IMAGE...
// Writes the elements of each tensor into a file of FOLDER, and prints one JSON object {name:
// shape}: image.I, pixel_values.I, embeddings, deepstack.J. Lines of standard input are sequences,
// {"tokens": [...], "images": how many of the images}; logits.K are those of the model that trains,
// of all sequences in one pack.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cstdio>
#include <filesystem>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "models/pipeline_forward.h"
#include "models/vision/vision_model.h"
#include "rollout/vision/image_file.h"
#include "rollout/vision/image_processor.h"
#include "rollout/vision/vision_encoder.h"
#include "rollout/vision/visual_prompt.h"
#include "trainer/engine/micro_batches.h"
#include "trainer/engine/visual_inputs.h"

namespace ferry {
namespace {

using std::filesystem::path;

class Output {
 public:
  explicit Output(path folder) : folder_(std::move(folder)) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto packed = tensor.contiguous();
    distckpt::write_text(folder_ / name,
                         std::string(static_cast<const char*>(packed.const_data_ptr()),
                                     static_cast<std::size_t>(packed.nbytes())));
    shapes_[name] = packed.sizes().vec();
  }
  void print() const { std::printf("%s\n", shapes_.dump().c_str()); }

 private:
  path folder_;
  nlohmann::json shapes_ = nlohmann::json::object();
};

using Sequences = std::vector<std::pair<std::vector<std::int64_t>, std::size_t>>;

Sequences read_sequences() {
  Sequences sequences;
  for (std::string line; std::getline(std::cin, line);) {
    const auto one = nlohmann::json::parse(line);
    sequences.emplace_back(one["tokens"].get<std::vector<std::int64_t>>(),
                           one["images"].get<std::size_t>());
  }
  return sequences;
}

void add_logits(const converter::Checkpoint& checkpoint,
                const models::ParallelState& mesh,
                distckpt::DType dtype,
                rollout::VisionEncoder& encoder,
                const std::vector<rollout::ProcessedImage>& images,
                Output& output) {
  const auto& config = checkpoint.map.config;
  const auto stage =
      models::make_stage(config, mesh, {.alignment = models::Alignment::kBitwise, .dtype = dtype});
  converter::load_model(stage, checkpoint, {.round = true});
  std::vector<at::Tensor> tokens;
  trainer::VisualInputs visual{.vision = &encoder};
  trainer::Partition all;
  auto next = images.begin();
  for (const auto& [ids, count] : read_sequences()) {
    const auto end = next + static_cast<std::ptrdiff_t>(count);
    visual.sequences.push_back(
        count == 0 ? nullptr : rollout::make_visual_prompt(*config.vision, ids, {next, end}));
    next = end;
    all.push_back(tokens.size());
    tokens.push_back(at::tensor(ids, at::kLong));
  }
  if (tokens.empty()) return;
  const std::vector<trainer::Partition> parts{all};
  const std::vector chunks{stage.front().get()};
  const auto batches = trainer::pack_micro_batches(tokens, parts, mesh, {}, {}, visual.sequences);
  const auto rows = trainer::visual_function(visual, chunks, batches, parts);
  const auto& model = *chunks.front();
  const at::NoGradGuard no_grad;
  const auto logits = model.all_logits(
      model.forward(batches[0], {}, {}, {}, rows ? rows(0, 0) : models::VisualRows{}), batches[0]);
  std::int64_t begin = 0;
  for (std::size_t i = 0; i < tokens.size(); begin += tokens[i++].size(0))
    output.add(fmt::format("logits.{}", i), logits.narrow(0, begin, tokens[i].size(0)));
}

int run_tool(const std::vector<std::string>& arguments) {
  const path checkpoint = arguments.at(0);
  const auto dtype = arguments.at(1) == "bfloat16" ? distckpt::DType::kBF16 : distckpt::DType::kF32;
  Output output(arguments.at(2));
  const auto config = rollout::parse_image_processor(
      distckpt::read_text(checkpoint / "preprocessor_config.json"), "preprocessor_config.json");
  std::vector<at::Tensor> pixels;
  std::vector<models::ImageGrid> grids;
  std::vector<rollout::ProcessedImage> images;
  for (std::size_t i = 3; i < arguments.size(); ++i) {
    const auto bytes = distckpt::read_text(path(arguments[i]));
    const auto image = rollout::decode_image(std::as_bytes(std::span(bytes)), arguments[i]);
    const auto processed = rollout::process_image(image, config);
    output.add(fmt::format("image.{}", i - 3), image);
    pixels.push_back(rollout::pixel_values(processed, config));
    output.add(fmt::format("pixel_values.{}", i - 3), pixels.back());
    grids.push_back(processed.grid);
    images.push_back(processed);
  }
  const auto opened = converter::open(checkpoint);
  models::World world(models::World::Options{});
  const models::ParallelState mesh(world, {}, "test");
  const auto load = [&] {
    return converter::make_vision_model(opened.map.config, mesh, dtype, models::Alignment::kBitwise,
                                        opened);
  };
  const auto features = load()->forward(at::cat(pixels), grids);
  output.add("embeddings", features.embeddings);
  for (std::size_t i = 0; i < features.deepstack.size(); ++i)
    output.add(fmt::format("deepstack.{}", i), features.deepstack[i]);
  rollout::VisionEncoder encoder(load, config, /*cached_tokens=*/0);
  add_logits(opened, mesh, dtype, encoder, images, output);
  output.print();
  return 0;
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  try {
    return ferry::run_tool({argv + 1, argv + argc});
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
}
