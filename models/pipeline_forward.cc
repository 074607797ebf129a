#include "models/pipeline_forward.h"

#include <ATen/ops/empty.h>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/world.h"

namespace ferry::models {

Neighbours neighbours(const ParallelState& mesh, std::size_t chunk, std::size_t num_chunks) {
  const int stage = mesh.coordinates().pp;
  const int stages = mesh.shape().pp();
  const int at = static_cast<int>(chunk) * stages + stage;
  const int end = static_cast<int>(num_chunks) * stages;
  return {.before = at == 0 ? -1 : (stage + stages - 1) % stages,
          .behind = at + 1 == end ? -1 : (stage + 1) % stages};
}

at::Tensor empty_hidden(const GPTModel& model, const SequencePartition& batch) {
  const auto parts = model.options().sequence_parallel ? model.mesh().shape().tp() : 1;
  return at::empty({batch.tokens().size(0) / parts, model.config().hidden_size},
                   at::TensorOptions()
                       .dtype(scalar_type(model.options().dtype))
                       .device(model.mesh().world().device()));
}

std::vector<std::unique_ptr<GPTModel>> make_stage(const TransformerConfig& config,
                                                  const ParallelState& mesh,
                                                  const ModelOptions& options,
                                                  const std::string& sizes) {
  check_fits(config, mesh.shape());
  auto stages = stage_chunks(config, mesh.shape().parallel(), mesh.coordinates().pp);
  std::int64_t needed = 0;
  for (const auto& stage : stages) {
    for (const auto& spec :
         parameter_layout(config, mesh.shape(), mesh.coordinates(), stage, options.layout()))
      needed += spec.shape.product() * size_of(spec.dtype);
  }
  const auto room = free_memory(mesh.world().device());
  if (room && needed > *room) {
    throw Error(ErrorKind::kDevice,
                fmt::format("rank {} has {} MiB of parameters, and its device {} MiB free",
                            mesh.world().rank(), needed >> 20, *room >> 20),
                fmt::format("share the model over more ranks: {}", sizes));
  }
  std::vector<std::unique_ptr<GPTModel>> chunks;
  for (auto& stage : stages)
    chunks.push_back(std::make_unique<GPTModel>(config, mesh, std::move(stage), options));
  return chunks;
}

at::Tensor pipeline_forward(const std::vector<std::unique_ptr<GPTModel>>& chunks,
                            const SequencePartition& batch,
                            const Observer& observe,
                            std::vector<at::Tensor>* received,
                            std::vector<at::Tensor>* sent) {
  const auto& mesh = chunks.front()->mesh();
  at::Tensor result;
  at::Tensor handed;  // from one chunk to the next, where there is one stage
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    const auto& model = *chunks[i];
    const auto [before, behind] = neighbours(mesh, i, chunks.size());
    at::Tensor input;
    if (before == mesh.coordinates().pp) {
      input = handed.detach();
    } else if (before >= 0) {
      input = empty_hidden(model, batch);
      mesh.pp().receive(input, before);
    }
    if (input.defined() && received != nullptr) input.requires_grad_();
    const auto output = model.forward(batch, input, observe);
    if (behind == mesh.coordinates().pp) {
      handed = output;
    } else if (behind >= 0) {
      mesh.pp().send(output.detach(), behind);
    } else {
      result = output;
    }
    if (received != nullptr) received->push_back(input);
    if (sent != nullptr) sent->push_back(output);
  }
  return result;
}

}  // namespace ferry::models
