// The gradients of our models beside Hugging Face's, for tests/interop/rollout/test_gradients.py.
// Prints one JSON object a parameter: the error of both against gradients in fp64, relative to
// their norm.
//   gradient_tool CHECKPOINT REFERENCE FP64_REFERENCE ALIGNMENT tp sp pp cp ep etp dtype LAYOUT
//   [cuda]
// LAYOUT: that of the pipeline, empty for one stage. The ranks are threads; on GPUs processes, as
// torchrun starts them.
// REFERENCE: of hf_reference.py --gradients, in the dtype that is run.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>

#include "converter/alignment/reference.h"
#include "distckpt/base/error.h"
#include "models/distributed/world.h"
#include "models/pipeline_forward.h"
#include "tests/support/models/backward.h"
#include "tests/support/models/naive_load.h"

namespace ferry {
namespace {

struct Flags {
  std::string checkpoint{};
  converter::Reference reference{};
  converter::Reference exact{};
  models::ModelOptions options{};
  models::ParallelConfig parallel{};
  int world_size() const {
    return parallel.tensor_model_parallel_size * parallel.context_parallel_size *
           parallel.pipeline_model_parallel_size *
           std::max(1, parallel.expert_model_parallel_size * parallel.expert_tensor_parallel() /
                           (parallel.tensor_model_parallel_size * parallel.context_parallel_size));
  }
};

// sum(logits * cotangent) over this rank's part of the batch has this gradient: [local, vocab/tp].
at::Tensor local_cotangent(const Flags& flags,
                           const models::GPTModel& model,
                           const models::SequencePartition& batch) {
  std::vector<at::Tensor> all;
  for (std::size_t i = 0; i < flags.reference.sequences.size(); ++i)
    all.push_back(flags.reference.others.at(fmt::format("cotangent.{}", i)));
  const auto& mesh = model.mesh();
  const auto local = batch.local(at::cat(all));
  const auto vocab = mesh.shape().parallel().padded_vocab_size(model.config().vocab_size);
  const auto columns = vocab / mesh.shape().tp();
  return at::constant_pad_nd(local, {0, vocab - local.size(1)})
      .narrow(1, mesh.coordinates().tp * columns, columns);
}

void run(const Flags& flags, models::World& world) {
  static std::mutex printing;
  const models::ParallelState mesh(world, flags.parallel, "test");
  const auto config = support::read_config(flags.checkpoint);
  const auto chunks = models::make_stage(config, mesh, flags.options);
  std::vector<models::GPTModel*> pointers;
  for (const auto& chunk : chunks) {
    support::naive_load(*chunk, flags.checkpoint);
    pointers.push_back(chunk.get());
  }
  std::vector<at::Tensor> tokens;
  for (const auto& sequence : flags.reference.sequences) tokens.push_back(sequence.tokens);
  const models::SequencePartition batch(models::pack(tokens), mesh);
  std::vector<at::Tensor> first;  // of the first run, in the order of the parameters
  for (int round = 0; round < 2; ++round) {
    for (auto* const model : pointers) {
      for (const auto& leaf : model->parameters().leaves())
        leaf.value.mutable_grad() = at::Tensor();
    }
    std::vector<at::Tensor> received;
    std::vector<at::Tensor> sent;
    auto result = models::pipeline_forward(chunks, batch, {}, &received, &sent);
    at::Tensor gradient;
    if (result.defined()) {
      const auto& last = *chunks.back();
      const auto logits = last.output(result);
      sent.back() = logits;
      // Data parallel ranks run the same batch: their sum counts it once.
      gradient = local_cotangent(flags, last, batch).to(logits.options()) / mesh.shape().dp();
    }
    models::pipeline_backward(chunks, received, sent, gradient);
    models::finalize_model_grads(pointers);
    std::size_t at = 0;
    for (const auto* const model : pointers) {
      const auto read = [&](const converter::Reference& of) {
        return support::naive_parts(*model, flags.checkpoint, [&](const std::string& name) {
          const auto found = of.others.find("gradient." + name);
          return found == of.others.end() ? at::Tensor() : found->second;
        });
      };
      const auto theirs = read(flags.reference);
      const auto exact = read(flags.exact);
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        const auto on_device = model->parameters().gradient(i);
        if (!on_device.defined()) continue;
        const auto ours = on_device.cpu();
        if (round == 0) {
          first.push_back(ours.clone());
          if (!exact[i].defined()) continue;
          const auto norm = std::max(exact[i].norm().item<double>(), 1e-30);
          const auto error = [&](const at::Tensor& g) {
            return (g.to(at::kDouble) - exact[i]).norm().item<double>() / norm;
          };
          const std::lock_guard lock(printing);
          const auto& spec = model->parameters().all()[i].spec;
          std::printf("%s\n", nlohmann::json{{"key", spec.key},
                                             {"rank", world.rank()},
                                             {"ours", error(ours)},
                                             {"theirs", error(theirs[i])},
                                             {"elements", spec.global_shape.product()},
                                             {"norm", norm}}
                                  .dump()
                                  .c_str());
        } else {
          const auto& before = first.at(at++);
          if (ours.equal(before)) continue;
          const auto differ = ours.ne(before);  // NaN differs from itself
          throw Error(ErrorKind::kBug,
                      fmt::format("rank {}: {}: {} of {} numbers are others in the second run: {} "
                                  "became {}, the first of them; NaN before: {}, after: {}",
                                  world.rank(), model->parameters().all()[i].spec.key,
                                  differ.sum().item<std::int64_t>(), ours.numel(),
                                  before.masked_select(differ)[0].item<double>(),
                                  ours.masked_select(differ)[0].item<double>(),
                                  before.isnan().sum().item<std::int64_t>(),
                                  ours.isnan().sum().item<std::int64_t>()));
        }
      }
    }
  }
}

int run_tool(int argc, char** argv) {
  if (argc != 13 && argc != 14) return 2;
  const auto number = [&](int i) { return std::atoi(argv[i]); };
  try {
    const bool bf16 = std::string(argv[11]) == "bfloat16";
    Flags flags{
        .checkpoint = argv[1],
        .reference = converter::read_reference(argv[2]),
        .exact = converter::read_reference(argv[3]),
        .options = {.alignment = std::string(argv[4]) == "bitwise" ? models::Alignment::kBitwise
                                                                   : models::Alignment::kFast,
                    .dtype = bf16 ? distckpt::DType::kBF16 : distckpt::DType::kF32,
                    .sequence_parallel = number(6) != 0},
        .parallel = {.tensor_model_parallel_size = number(5),
                     .pipeline_model_parallel_size = number(7),
                     .context_parallel_size = number(8),
                     .expert_model_parallel_size = number(9),
                     .expert_tensor_parallel_size = number(10),
                     .pipeline_model_parallel_layout = argv[12],
                     .make_vocab_size_divisible_by = 8}};
    if (argc == 14) {
      auto world = models::World::from_environment({.device = at::Device(argv[13])});
      run(flags, world);
      return 0;
    }
    models::run_ranks(flags.world_size(), {.timeout = std::chrono::minutes(1)},
                      [&](models::World& world) { run(flags, world); });
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return 0;
}

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  return ferry::run_tool(argc, argv);
}
