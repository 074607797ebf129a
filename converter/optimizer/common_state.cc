#include "converter/optimizer/common_state.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <string_view>

#include "distckpt/formats/torch_save/pickle_copy.h"

namespace ferry::converter {
namespace {

using distckpt::PickleValue;
using distckpt::PickleWriter;

constexpr std::string_view kFullyReshardable = "fully_reshardable";

// The keys that are not carried over: they are written anew here, or belong to the ranks of one
// run.
constexpr std::array<std::string_view, 7> kOwn{
    "args",      "checkpoint_version", "iteration", "optimizer", "content_metadata",
    "rng_state", "rerun_state_machine"};

// Megatron-Core's content_metadata chooses the names of keys: sharded_state_dict(metadata).
void write_content_metadata(PickleWriter& pickle, bool optimizer) {
  pickle.begin_dict();
  pickle.string("singleton_local_shards").boolean(false);
  pickle.string("chained_optim_avoid_prefix").boolean(true);
  if (optimizer) {
    pickle.string("distrib_optim_sharding_type").string(kFullyReshardable);
    pickle.string("distrib_optim_fully_reshardable_mem_efficient").boolean(false);
  }
  pickle.end_dict();
}

// DistributedOptimizer.state_dict(): parameter groups; the tensors are sharded ones.
void write_optimizer(PickleWriter& pickle, PickleValue state) {
  pickle.begin_dict().string("optimizer").begin_dict();
  pickle.string("param_groups");
  distckpt::write_value(pickle, state.at("param_groups"));
  pickle.end_dict();
  pickle.string("param_state_sharding_type").string(kFullyReshardable);
  pickle.end_dict();
}

void write_optimizers(PickleWriter& pickle, const std::vector<PickleValue>& states) {
  if (states.size() == 1) return write_optimizer(pickle, states.front());
  pickle.begin_dict();
  std::int64_t index = 0;
  for (const auto& state : states) {
    pickle.integer(index++);
    write_optimizer(pickle, state);
  }
  pickle.end_dict();
}

}  // namespace

void write_common_state(PickleWriter& pickle,
                        const models::TransformerConfig& config,
                        const models::ParallelConfig& parallel,
                        const WrittenState& written,
                        const std::optional<CarriedState>& carried) {
  pickle.begin_dict();
  pickle.string("args");
  write_args(pickle, config, parallel, written,
             carried ? find_args(carried->common) : std::nullopt);
  pickle.string("checkpoint_version").real(3.0);
  pickle.string("iteration").integer(written.iteration);
  pickle.string("content_metadata");
  write_content_metadata(pickle, written.optimizer);
  if (!carried) {
    pickle.string("num_floating_point_operations_so_far").integer(0);
  } else {
    for (const auto& [key, value] : carried->common.items()) {
      const auto name = key.as_string();
      if (std::ranges::find(kOwn, name) != kOwn.end() || name.starts_with("model")) continue;
      if (name == "opt_param_scheduler" && !written.optimizer) continue;
      pickle.string(name);
      distckpt::write_value(pickle, value);
    }
  }
  if (written.optimizer) {
    pickle.string("optimizer");
    write_optimizers(pickle, carried->optimizers);
  }
  pickle.end_dict();
}

}  // namespace ferry::converter
