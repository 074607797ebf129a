#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <numeric>

#include "cli/commands.h"
#include "cli/torch/commands.h"
#include "cli/torch/library_error.h"
#include "distckpt/base/error.h"
#include "distckpt/base/foreign_error.h"
#include "models/distributed/failure_board.h"

namespace ferry::cli {

namespace {

void add_size(CLI::App& command, const char* names, int& value, const char* what) {
  command.add_option(names, value, what)->check(CLI::Range(1, 1 << 16));
}

// Ranks of the smallest mesh of these sizes.
int fewest_ranks(const models::ParallelConfig& parallel) {
  return std::lcm(parallel.tensor_model_parallel_size * parallel.context_parallel_size,
                  parallel.expert_tensor_parallel() * parallel.expert_model_parallel_size) *
         parallel.pipeline_model_parallel_size;
}

// Ends the run with this rank: it says why, and so do the others, before a launcher ends them all.
// On GPUs the process ends at once: kernels of NCCL that wait for other ranks never do, and pinned
// memory takes long to be given back.
[[noreturn]] void end_rank(const models::World& world, Error error) {
  error.add_context(fmt::format("running as rank {} of {}", world.rank(), world.size()));
  std::fputs(error.report().c_str(), stderr);
  models::announce_failure(world, error);
  models::wait_for_failures(world);
  if (world.device().is_cuda()) std::_Exit(kTrouble);
  throw CLI::RuntimeError(kTrouble);
}

}  // namespace

void run_rank(const models::World& world, const std::function<void()>& body) {
  if (world.size() == 1) return body();
  try {
    body();
  } catch (const CLI::RuntimeError&) {  // of end_rank()
    throw;
  } catch (const c10::Error& error) {  // what() has a backtrace
    end_rank(world, library_error(error));
  } catch (const std::exception& error) {
    end_rank(world, as_error(error));
  }
}

void add_mesh(CLI::App& command, MeshFlags& flags) {
  auto& parallel = flags.parallel;
  const auto size = [&](const char* names, int& value, const char* what) {
    add_size(command, names, value, what);
  };
  size("--pp,--pipeline-model-parallel-size", parallel.pipeline_model_parallel_size,
       "Stages of layers");
  size("--cp,--context-parallel-size", parallel.context_parallel_size,
       "Ranks that share each sequence");
  command.add_option("--pipeline-model-parallel-layout", parallel.pipeline_model_parallel_layout,
                     "Layers per stage, as Megatron-Core writes it: Et*3|(tt|)*2,L");
  command.add_flag("--sp,--sequence-parallel", flags.sequence_parallel,
                   "Tensor parallel ranks share the tokens between layers");
  add_rollout_mesh(command, flags);
}

void add_rollout_mesh(CLI::App& command, MeshFlags& flags) {
  add_size(command, "--tp,--tensor-model-parallel-size", flags.parallel.tensor_model_parallel_size,
           "Ranks that share each layer");
  add_size(command, "--ep,--expert-model-parallel-size", flags.parallel.expert_model_parallel_size,
           "Ranks that share the experts");
  add_size(command, "--etp,--expert-tensor-parallel-size", flags.expert_tensor_parallel_size,
           "Ranks that share each expert. Default: as --tp");
  command
      .add_option("--alignment", flags.alignment,
                  "bitwise: one function of weights and tokens, on any mesh; fast: Megatron's way")
      ->check(CLI::IsMember({"bitwise", "fast"}))
      ->capture_default_str();
  command.add_option("--device", flags.device, "cpu, or cuda: one GPU for each rank")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command
      .add_option("--timeout", flags.timeout_seconds,
                  "Seconds after which ranks that wait for another give up")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
}

models::ParallelConfig parallel_of(const MeshFlags& flags) {
  auto parallel = flags.parallel;
  if (flags.expert_tensor_parallel_size > 0)
    parallel.expert_tensor_parallel_size = flags.expert_tensor_parallel_size;
  return parallel;
}

models::Alignment alignment_of(const MeshFlags& flags) {
  return flags.alignment == "fast" ? models::Alignment::kFast : models::Alignment::kBitwise;
}

models::World::Options world_options(const MeshFlags& flags) {
  return {.device = flags.device == "cuda" ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU),
          .timeout = std::chrono::seconds(flags.timeout_seconds)};
}

void run_mesh(const MeshFlags& flags,
              int data_parallel_size,
              const std::function<void(models::World&)>& body) {
  const auto parallel = parallel_of(flags);
  const auto stages = parallel.context_parallel_size * parallel.pipeline_model_parallel_size;
  const auto ranks = std::lcm(fewest_ranks(parallel), parallel.tensor_model_parallel_size * stages *
                                                          std::max(data_parallel_size, 1));
  auto world = models::World::from_environment(world_options(flags));
  if (world.size() > 1 || ranks == 1) return body(world);
  require(flags.device == "cpu", ErrorKind::kUsage,
          "the mesh has {} ranks, and this is one process", ranks);
  models::run_ranks(ranks, world_options(flags), body);
}

}  // namespace ferry::cli
