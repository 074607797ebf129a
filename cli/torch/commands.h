// The subcommands that need LibTorch, in a program of its own: `ferry` runs it with the same
// arguments. Its exit status is ferry's.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "models/distributed/world.h"
#include "models/spec/alignment.h"
#include "models/spec/parallel_config.h"

namespace ferry::cli {

// verify --logits, verify --numerics
void add_verify_models(CLI::App& app);
// train sft
void add_train(CLI::App& app);
void add_generate(CLI::App& app);
void add_serve(CLI::App& app);
// bench rollout
void add_bench(CLI::App& app);

// Options of a mesh that several subcommands have.
struct MeshFlags {
  models::ParallelConfig parallel{};
  int expert_tensor_parallel_size = 0;  // 0: as tensor parallel
  bool sequence_parallel = false;
  std::string alignment = "bitwise";
  std::string device = "cpu";
  int timeout_seconds = 600;
};
void add_mesh(CLI::App& command, MeshFlags& flags);
void add_rollout_mesh(CLI::App& command, MeshFlags& flags);  // tensor and expert parallel alone
models::ParallelConfig parallel_of(const MeshFlags& flags);
models::Alignment alignment_of(const MeshFlags& flags);
models::World::Options world_options(const MeshFlags& flags);

// Runs `body` as every rank: those that a launcher started, or threads of this process.
void run_mesh(const MeshFlags& flags,
              int data_parallel_size,
              const std::function<void(models::World&)>& body);

// Runs `body` as a process among others: if it throws, the process says why, tells the others,
// waits until they have spoken, and ends with status 2.
void run_rank(const models::World& world, const std::function<void()>& body);

}  // namespace ferry::cli
