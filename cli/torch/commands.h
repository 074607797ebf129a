// The subcommands that need LibTorch, in a program of its own: `ferry` runs it with the same
// arguments. Its exit status is ferry's.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "models/alignment.h"
#include "models/world.h"
#include "distckpt/parallel_config.h"

namespace ferry::cli {

// verify --logits, verify --numerics
void add_verify_models(CLI::App& app);
// train sft
void add_train(CLI::App& app);

// Options of a mesh that several subcommands have.
struct MeshFlags {
  distckpt::ParallelConfig parallel{};
  int expert_tensor_parallel_size = 0;  // 0: as tensor parallel
  bool sequence_parallel = false;
  std::string alignment = "bitwise";
  std::string device = "cpu";
  int timeout_seconds = 600;
};
void add_mesh(CLI::App& command, MeshFlags& flags);
models::Alignment alignment_of(const MeshFlags& flags);
models::World::Options world_options(const MeshFlags& flags);

}  // namespace ferry::cli
