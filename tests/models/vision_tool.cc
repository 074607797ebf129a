// The images of tests/interop/rollout/test_images.py as Ferry reads them, and what the vision tower
// makes of them together.
//   vision_tool CHECKPOINT bfloat16|float32 FOLDER IMAGE...
// Writes the elements of each tensor into a file of FOLDER, and prints one JSON object {name:
// shape}: image.I, pixel_values.I, embeddings, deepstack.J.
#include <ATen/ATen.h>

#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "converter/alignment/model_files.h"
#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "distckpt/storage/file_io.h"
#include "models/distributed/world.h"
#include "models/vision/vision_model.h"
#include "rollout/vision/image_file.h"
#include "rollout/vision/image_processor.h"

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

int run_tool(const std::vector<std::string>& arguments) {
  const path checkpoint = arguments.at(0);
  const auto dtype = arguments.at(1) == "bfloat16" ? distckpt::DType::kBF16 : distckpt::DType::kF32;
  Output output(arguments.at(2));
  const auto config = rollout::parse_image_processor(
      distckpt::read_text(checkpoint / "preprocessor_config.json"), "preprocessor_config.json");
  std::vector<at::Tensor> pixels;
  std::vector<models::ImageGrid> grids;
  for (std::size_t i = 3; i < arguments.size(); ++i) {
    const auto bytes = distckpt::read_text(path(arguments[i]));
    const auto image = rollout::decode_image(std::as_bytes(std::span(bytes)), arguments[i]);
    const auto processed = rollout::process_image(image, config);
    output.add(fmt::format("image.{}", i - 3), image);
    pixels.push_back(rollout::pixel_values(processed, config));
    output.add(fmt::format("pixel_values.{}", i - 3), pixels.back());
    grids.push_back(processed.grid);
  }
  const auto opened = converter::open(checkpoint);
  models::World world(models::World::Options{});
  const models::ParallelState mesh(world, {}, "test");
  const auto vision = converter::make_vision_model(opened.map.config, mesh, dtype,
                                                   models::Alignment::kBitwise, opened);
  const auto features = vision->forward(at::cat(pixels), grids);
  output.add("embeddings", features.embeddings);
  for (std::size_t i = 0; i < features.deepstack.size(); ++i)
    output.add(fmt::format("deepstack.{}", i), features.deepstack[i]);
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
