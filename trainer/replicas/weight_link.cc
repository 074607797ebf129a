#include "trainer/replicas/weight_link.h"

#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <utility>
#include <vector>

#include "models/pipeline_forward.h"

namespace ferry::trainer {
namespace {

std::vector<distckpt::LocalShard> shards_if(bool wanted, models::GPTModel& model) {
  return wanted ? model.sharded_state_dict() : std::vector<distckpt::LocalShard>();
}

}  // namespace

WeightLink::WeightLink(const std::filesystem::path& file,
                       Side side,
                       models::GPTModel& model,
                       std::chrono::milliseconds timeout)
    : file_(file),
      side_(side),
      model_(model),
      world_({.device = at::kCPU, .timeout = timeout},
             side == Side::kGives ? 0 : 1,
             2,
             c10::make_intrusive<c10d::FileStore>(file.string(), 2)),
      resharder_(world_,
                 "weights of a replica",
                 shards_if(side == Side::kGives, model),
                 shards_if(side == Side::kTakes, model)) {}

WeightLink::~WeightLink() {
  std::error_code gone;
  std::filesystem::remove(file_, gone);
}

void WeightLink::move(bool verify) {
  const auto addresses = model_.parameters().owner_addresses();
  const std::vector<std::byte*> none;
  resharder_.set_memory(side_ == Side::kGives ? addresses : none,
                        side_ == Side::kTakes ? addresses : none);
  (void)(verify ? resharder_.run_and_verify() : resharder_.run());
}

}  // namespace ferry::trainer
