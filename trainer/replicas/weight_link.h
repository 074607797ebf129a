// The weights of a rank's rollout for one replica: a world of the two processes, over Gloo, and the
// plan between their models.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "models/distributed/world.h"
#include "models/gpt_model.h"
#include "models/reshard/resharder.h"

namespace ferry::trainer {

class WeightLink {
 public:
  enum class Side { kGives, kTakes };

  // Called by both processes with the same file, which is new, and removed in the end. The model
  // outlives this. Throws Error if the other does not come within `timeout`, or has another model.
  WeightLink(const std::filesystem::path& file,
             Side side,
             models::GPTModel& model,
             std::chrono::milliseconds timeout);

  ~WeightLink();
  WeightLink(const WeightLink&) = delete;
  WeightLink& operator=(const WeightLink&) = delete;

  // Called by both. `verify`: also compares the digest of every message. Throws Error where the
  // other one ends, or hangs.
  void move(bool verify);

 private:
  std::filesystem::path file_;
  Side side_;
  models::GPTModel& model_;
  models::World world_;
  models::Resharder resharder_;
};

}  // namespace ferry::trainer
