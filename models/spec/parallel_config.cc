#include "models/spec/parallel_config.h"

#include "distckpt/base/error.h"
#include "distckpt/base/integers.h"

namespace ferry::models {

std::int64_t ParallelConfig::padded_vocab_size(std::int64_t vocab_size) const {
  const auto multiple =
      static_cast<std::int64_t>(make_vocab_size_divisible_by) * tensor_model_parallel_size;
  return distckpt::round_up(vocab_size, multiple);
}

std::vector<int> ParallelConfig::layers_per_stage(int num_layers) const {
  const int stages = pipeline_model_parallel_size;
  std::vector<int> layers(static_cast<std::size_t>(stages), 0);
  int rest = num_layers;
  int even_stages = stages;
  const auto take = [&](std::optional<int> count, int stage, const char* flag) {
    if (!count) return;
    require(stages > 1 || *count == rest, ErrorKind::kUsage,
            "{} is {}, but the one stage has all {} layers", flag, *count, num_layers);
    require(*count >= 1 && *count <= rest, ErrorKind::kUsage,
            "{} is {}, but the model has {} layers", flag, *count, num_layers);
    layers[static_cast<std::size_t>(stage)] = *count;
    rest -= *count;
    --even_stages;
  };
  take(num_layers_in_first_pipeline_stage, 0, "--num-layers-in-first-pipeline-stage");
  take(num_layers_in_last_pipeline_stage, stages - 1, "--num-layers-in-last-pipeline-stage");
  if (even_stages == 0) {
    require(rest == 0, ErrorKind::kUsage,
            "{} of {} layers are left over by the two pipeline stages", rest, num_layers);
    return layers;
  }
  if (rest % even_stages != 0 || rest == 0) {
    throw Error(
        ErrorKind::kUsage,
        fmt::format("{} of {} layers cannot be shared out evenly over {} pipeline stages", rest,
                    num_layers, even_stages),
        "choose another --pp, or give the first or last stage another number of layers with "
        "--num-layers-in-first-pipeline-stage or --num-layers-in-last-pipeline-stage");
  }
  for (auto& count : layers) {
    if (count == 0) count = rest / even_stages;
  }
  return layers;
}

}  // namespace ferry::models
