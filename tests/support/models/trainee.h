// A tiny model on its mesh with all that trains it, its weights those of fill_parameters().
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/tiny_training.h"
#include "trainer/engine/pipeline/pipeline_schedule.h"
#include "trainer/optimizer/distributed_optimizer.h"

namespace ferry::support {

struct Trainee {
  // Called by all ranks of the mesh; `name` tells trainees of a world apart.
  Trainee(models::World& world,
          models::ParallelConfig parallel,
          const models::TransformerConfig& config,
          models::ModelOptions options,
          const std::string& name = "actor",
          const std::vector<int>& ranks = {}) {
    parallel.make_vocab_size_divisible_by = 2;
    mesh = std::make_unique<models::ParallelState>(world, parallel, name, ranks);
    chunks = models::make_stage(config, *mesh, options);
    for (const auto& chunk : chunks) {
      fill_parameters(*chunk, 5);
      pointers.push_back(chunk.get());
    }
    ddp = std::make_unique<trainer::DistributedDataParallel>(
        pointers, trainer::DistributedDataParallelConfig{});
    optimizer = std::make_unique<trainer::DistributedOptimizer>(*ddp, trainer::OptimizerConfig{});
    p2p =
        std::make_unique<trainer::P2PCommunicator>(world, *mesh, name + "/p2p", chunks.size() > 1);
  }
  trainer::Pipeline pipeline() const {
    return {.chunks = pointers, .p2p = p2p.get(), .ddp = ddp.get()};
  }

  // Every dp-th sample: those of this data parallel rank.
  template <typename T>
  std::vector<T> mine(const std::vector<T>& all) const {
    std::vector<T> chosen;
    for (auto i = static_cast<std::size_t>(mesh->coordinates().dp); i < all.size();
         i += static_cast<std::size_t>(mesh->shape().dp()))
      chosen.push_back(all[i]);
    return chosen;
  }

  std::unique_ptr<models::ParallelState> mesh;
  std::vector<std::unique_ptr<models::GPTModel>> chunks;
  std::vector<models::GPTModel*> pointers;
  std::unique_ptr<trainer::DistributedDataParallel> ddp;
  std::unique_ptr<trainer::DistributedOptimizer> optimizer;
  std::unique_ptr<trainer::P2PCommunicator> p2p;
};

}  // namespace ferry::support
