// Parts of a checkpoint for readers of single tensors: each is a small checkpoint, made and planned
// without a look at the rest of the model.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "converter/open/checkpoint.h"

namespace ferry::converter {

class CheckpointParts {
 public:
  explicit CheckpointParts(std::shared_ptr<const Checkpoint> whole) : whole_(std::move(whole)) {}

  const std::shared_ptr<const Checkpoint>& whole() const { return whole_; }

  // The tensors that share a parameter of Megatron-Core with the one of that name (a Hugging Face
  // name, or a key of Megatron-Core's modules), and their files; it carries no files of the Hugging
  // Face form. Nothing is in it where the model lacks the name. The first call makes an index of
  // the model; others take as long as the tensor has pieces. Thread-safe.
  std::shared_ptr<const Checkpoint> part_with(const std::string& name) const;

 private:
  using Indices = std::vector<std::uint32_t>;

  struct Index {
    std::unordered_map<std::string, std::uint32_t> tensors{};  // by name
    std::unordered_map<std::string, std::uint32_t> keys{};     // of map.megatron
    std::vector<Indices> megatron{};                           // by tensor: of map.megatron
    std::vector<Indices> links{};                              // by tensor: of links.links
    std::vector<Indices> stored_links{};                       // by stored tensor
    std::vector<Indices> padding{};                            // likewise: of links.padding
    std::vector<Indices> left_out{};                           // likewise: of links.left_out
    std::vector<Indices> checksums{};                          // by storage
  };

  void make_index() const;
  Indices tensors_with(const std::string& name, Indices& megatron) const;

  std::shared_ptr<const Checkpoint> whole_;
  mutable std::once_flag indexed_;
  mutable Index index_;
};

}  // namespace ferry::converter
