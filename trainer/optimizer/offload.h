// Memory of a model that rests on the host while something else needs the device: parameters and
// gradients, each by itself (verl's param_offload, grad_offload; an optimizer's state that is
// offloaded never lies on the device: OptimizerConfig::offload). Storages are emptied and filled
// again in place: every tensor that looks at one stays what it was, to modules, buffers and sharded
// state dicts.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "models/gpt_model.h"
#include "trainer/optimizer/distributed_data_parallel.h"

namespace ferry::trainer {

// A storage's bytes into `copy` [bytes], of models::host_bytes(); begun, in the order of the
// stream.
void copy_to_host(const c10::Storage& storage, const at::Tensor& copy);

// Storages that come and go together.
class OffloadableMemory {
 public:
  // Takes the storages of these tensors, each once. `keep`: their values survive; else they come
  // back as zeros.
  OffloadableMemory(const std::vector<at::Tensor>& tensors, bool keep);

  // Copies to pinned host memory, which stays for the next time, and gives the device's back.
  // Nothing may use the tensors until to_device(). Called twice, it does nothing.
  void to_host();
  void to_device();

  std::int64_t device_bytes() const;
  std::int64_t host_bytes() const;  // that rest there now

 private:
  struct Block {
    c10::Storage storage;
    std::size_t size = 0;  // in bytes
    at::Tensor on_host{};  // [size], once it has rested
  };

  std::vector<Block> blocks_;
  bool keep_;
  bool resting_ = false;
};

struct OffloadFlags {
  bool param = false;
  bool grad = false;
};

class Offload {
 public:
  // Takes a model in training; or one that only computes (a reference model), without gradients.
  explicit Offload(const std::vector<models::GPTModel*>& chunks,
                   const DistributedDataParallel* ddp = nullptr);

  void to_host(OffloadFlags which);
  void to_device(OffloadFlags which);

  const OffloadableMemory& params() const { return params_; }
  const OffloadableMemory& grads() const { return grads_; }

 private:
  at::Device device_;
  OffloadableMemory params_, grads_;
};

}  // namespace ferry::trainer
