// A worker of one role: a model on its mesh (verl's MegatronWorker), what the calls of all roles
// have in common, and what rank 0 is told of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "models/distributed/world.h"
#include "trainer/config/ppo_config.h"
#include "trainer/engine/megatron_engine.h"
#include "trainer/update/answer_batches.h"
#include "trainer/update/data_proto.h"
#include "trainer/workers/worker_group.h"

namespace ferry::trainer {

class MegatronWorker {
 public:
  // Called by the ranks of the role's mesh. `resting` lies on the host while no call needs it.
  MegatronWorker(models::World& world, MegatronEngineOptions options, OffloadFlags resting);
  MegatronWorker(const MegatronWorker&) = delete;
  MegatronWorker& operator=(const MegatronWorker&) = delete;

  Dispatch dispatch() const { return megatron_compute_proto(engine_->mesh()); }
  MegatronEngine& engine() const { return *engine_; }

  // meta_info: "global_step", "caller", an object of texts that goes on with the run, and "async":
  // whether it is written in the background.
  DataProto save_checkpoint(const DataProto& call);
  // Of what is written in the background: -> meta_info.saved, whether there was something, and it
  // is done. meta_info.wait: waits until it is. (verl: async_calls_finalize_fn_exec)
  DataProto finish_save(const DataProto& call);
  // meta_info: "global_step", and "root", a folder of another run's, or "". -> meta_info.caller.
  DataProto load_checkpoint(const DataProto& call);

  // What of this rests is on the device until the object ends.
  class Awake {
   public:
    Awake(const MegatronWorker& worker, OffloadFlags needed);
    ~Awake();
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    Offload& offload_;
    OffloadFlags which_;
  };

  std::vector<Partition> micro_batches(const std::vector<AnsweredPrompt>& answers,
                                       const MicroBatchSize& size,
                                       std::int64_t longest_sequence) const;
  // `learn` of each mini-batch's rows of this rank, which follow each other, then the optimizer;
  // over all epochs: with shuffle the rows are those of all epochs, as shuffled_epochs() gives
  // them, and are met once. Returns
  // the means of the metrics over the updates, with <role>/grad_norm and <role>/lr, and
  // <role>/skipped, if there were, updates that were not made: for a gradient that is not finite,
  // or a mini-batch without a token that counts, of which `learn` returns nothing; whose gradient
  // was not finite; and the bytes that LibTorch had allocated and reserved at most, of any rank.
  nlohmann::json update(std::int64_t rows,
                        const MiniBatches& batches,
                        const std::function<std::map<std::string, double>(
                            const std::vector<std::int64_t>& rows, double grad_scale)>& learn);

 private:
  models::World& world_;
  std::unique_ptr<MegatronEngine> engine_;
  OffloadFlags resting_;
};

}  // namespace ferry::trainer
