// Tensors beside a model, a vision tower's. Files of the checkpoint that the model was loaded from
// give those that no rank of a mesh holds; a tower that is trained lies on ranks, as well.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/execute/file_box_io.h"
#include "distckpt/plan/box_io.h"
#include "distckpt/plan/layout.h"
#include "distckpt/plan/tensor_map.h"
#include "models/spec/transformer_config.h"

namespace ferry::converter {

// True if ranks hold a tower, since it is trained.
bool holds_tower(const distckpt::Layout& mesh);

// Adds that tower's tensors to those of the model, and links them to the ranks' memory. Throws as
// link_megatron does.
void add_held_tower(const models::TransformerConfig& config,
                    const distckpt::Layout& mesh,
                    std::vector<distckpt::ModelTensor>& tensors,
                    distckpt::TensorMap& links);

// Adds the carried tensors of `origin` that a model in memory lacks, and the storages of `origin`
// behind its own. Throws Error(kUsage) for one that is quantised.
void add_carried_tensors(const Checkpoint& origin, Checkpoint& model);

// Reads storages below `num_in_memory` out of `memory`, those behind them out of the files of
// `origin`. All outlive it.
class CarriedSource : public distckpt::BoxSource {
 public:
  CarriedSource(distckpt::BoxSource& memory, std::size_t num_in_memory, const Checkpoint& origin)
      : memory_(memory),
        num_in_memory_(static_cast<distckpt::StorageId>(num_in_memory)),
        files_(origin.source()) {}

  void read(const distckpt::Region& region,
            std::span<std::byte> packed,
            std::vector<distckpt::ChecksumPart>& parts) override;
  void commit(std::span<const distckpt::ChecksumPart> parts) override;
  std::string name_of(distckpt::StorageId storage) const override;

  // Throws Error as FileSource does, after everything was read.
  void verify() { files_->verify_checksums(); }

 private:
  distckpt::BoxSource& memory_;
  distckpt::StorageId num_in_memory_;
  std::unique_ptr<distckpt::FileSource> files_;
};

}  // namespace ferry::converter
