#include "cli/torch/commands.h"
#include "distckpt/error.h"

namespace ferry::cli {

void add_mesh(CLI::App& command, MeshFlags& flags) {
  auto& parallel = flags.parallel;
  const auto size = [&](const char* names, int& value, const char* what) {
    command.add_option(names, value, what)->check(CLI::Range(1, 1 << 16));
  };
  size("--tp,--tensor-model-parallel-size", parallel.tensor_model_parallel_size,
       "Ranks that share each layer");
  size("--pp,--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size,
       "Stages of layers");
  size("--cp,--context-parallel-size", parallel.context_parallel_size,
       "Ranks that share each sequence");
  size("--ep,--expert-model-parallel-size", parallel.expert_model_parallel_size,
       "Ranks that share the experts");
  size("--etp,--expert-tensor-parallel-size", flags.expert_tensor_parallel_size,
       "Ranks that share each expert. Default: as --tp");
  command.add_option("--pipeline-model-parallel-layout", parallel.pipeline_model_parallel_layout,
                     "Layers per stage, as Megatron-Core writes it: Et*3|(tt|)*2,L");
  command.add_flag("--sp,--sequence-parallel", flags.sequence_parallel,
                   "Tensor parallel ranks share the tokens between layers");
  command.add_option("--alignment", flags.alignment,
                     "bitwise: one function of weights and tokens, on any mesh; fast: Megatron's way")
      ->check(CLI::IsMember({"bitwise", "fast"}))
      ->capture_default_str();
  command.add_option("--device", flags.device, "cpu, or cuda: one GPU for each rank")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--timeout", flags.timeout_seconds,
                     "Seconds after which ranks that wait for another give up")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

models::Alignment alignment_of(const MeshFlags& flags) {
  return flags.alignment == "fast" ? models::Alignment::kFast : models::Alignment::kBitwise;
}

models::World::Options world_options(const MeshFlags& flags) {
  return {.device = flags.device == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
          .timeout = std::chrono::seconds(flags.timeout_seconds)};
}

}  // namespace ferry::cli
