// The weights of a rank's rollout for its replicas: a copy in memory of the host that has no name
// and that nobody may change, whose descriptor goes to each of them. The rank waits for none: a
// replica reads when it can, and one that ends or hangs meanwhile holds up nobody. Weights of a GPU
// come from it, and go to it, in pieces.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "distckpt/storage/file_io.h"
#include "models/gpt_model.h"

namespace ferry::trainer {

class WeightImage {
 public:
  static constexpr std::int64_t kPieceBytes = std::int64_t{64} << 20;

  // Copies the weights. `digests`: also notes the digest of each piece of a tensor. Throws
  // Error(kIo).
  WeightImage(const models::GPTModel& model, bool digests, std::int64_t piece_bytes = kPieceBytes);

  // The description that another process needs to read it.
  const nlohmann::json& packet() const { return packet_; }
  // Throws Error(kIo).
  distckpt::Descriptor memory() const;

 private:
  nlohmann::json packet_;
  distckpt::Descriptor memory_;
};

// Reads the weights of another process into a model of the same parameters, wherever that is;
// compares digests where there are some. Throws Error(kLayout) if the parameters are others,
// Error(kCorrupt) if bytes are.
void read_weights(const nlohmann::json& packet,
                  const distckpt::Descriptor& memory,
                  const models::GPTModel& model);

}  // namespace ferry::trainer
