// The training run in a Megatron checkpoint beside the model: masters and moments of the optimizer,
// its parameter groups, the RNG of each rank. It is carried to another layout; the parts that
// cannot be are named. A trainer's own objects ("trainer.data_cursor/shard_0_1") go along too;
// Megatron does not ask for them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "converter/optimizer/optimizer_tensors.h"
#include "distckpt/formats/torch_dist_writer.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "models/spec/parallel_config.h"

namespace ferry::converter {

struct Checkpoint;

struct TrainingState {
  models::ParallelConfig parallel{};  // of the run
  OptimizerTensors optimizer{};       // no kinds: there is no state of the optimizer
  std::uint32_t first_tensor = 0;     // of the optimizer, in Checkpoint::tensors
  // Dicts with the `param_groups` of its optimizer, or of its dense and its expert optimizer, in
  // `pickles` or in the common state.
  std::vector<distckpt::PickleValue> param_groups{};
  std::vector<distckpt::StoredObject> rng{};      // "rng_state/shard_0.1_1.2": of the ranks
  std::vector<distckpt::StoredObject> objects{};  // "trainer.": whatever the layout is
  std::vector<std::string> notes{};               // what is not carried, and why; what looks wrong
  std::vector<std::shared_ptr<const distckpt::Pickle>> pickles{};
};

// Dicts with the `param_groups` of the optimizers in a common state's "optimizer": of one, or of
// the dense one and that of experts.
std::vector<distckpt::PickleValue> param_groups_of_common(distckpt::PickleValue optimizer);

// True if a checkpoint holds state of an optimizer, as far as its keys tell.
bool has_optimizer(const Checkpoint& checkpoint);

// Adds the state of a torch_dist checkpoint, if it has any: Checkpoint::training, and the tensors,
// layout and links of the optimizer. Throws Error(kLayout | kCorrupt), also where masters out of
// buckets are not those of the weights: then parameters lie there in another order than is known.
// Where the checkpoint itself says which is which, that is a note.
void add_training_state(Checkpoint& checkpoint);

}  // namespace ferry::converter
