// save_ranks FROM TO [tp=2] [pp=2] [vpp=2] [ep=2] [etp=1] [dp=2] [rows=1] [optim=1] [div=128]:
// loads a checkpoint into the memory of ranks, threads of this process, and saves it from there,
// with the state of its run if asked. For tests that look at it with Megatron-Core.
#include <fmt/format.h>

#include <cstdio>
#include <map>
#include <string>
#include <string_view>

#include "converter/bridge/load.h"
#include "converter/bridge/save.h"
#include "distckpt/base/error.h"
#include "distckpt/execute/memory_io.h"
#include "tests/support/models/parallel_model.h"

namespace ferry::support {
namespace {

void run(const std::string& from, const std::string& to, std::map<std::string, int> sizes) {
  MeshOptions options{.dtype = {}};
  auto& parallel = options.parallel;
  const auto take = [&](const char* name, auto& into) {
    if (const auto found = sizes.find(name); found != sizes.end()) into = found->second;
    sizes.erase(name);
  };
  take("tp", parallel.tensor_model_parallel_size);
  take("pp", parallel.pipeline_model_parallel_size);
  take("vpp", parallel.virtual_pipeline_model_parallel_size);
  take("ep", parallel.expert_model_parallel_size);
  take("etp", parallel.expert_tensor_parallel_size);
  take("first", parallel.num_layers_in_first_pipeline_stage);
  take("dp", options.dp);
  take("div", parallel.make_vocab_size_divisible_by);
  int optim = 0;
  take("optim", optim);
  int rows = 0;
  take("rows", rows);
  options.by_rows = rows != 0;
  require(sizes.empty(), ErrorKind::kUsage, "{}: no such size", sizes.begin()->first);

  const auto origin = converter::open(from, {.training_state = optim != 0});
  if (optim != 0) options.optimizer = origin.training->optimizer.kinds;
  const ParallelModel model(origin.map, origin.tensors, options);
  model.run([&](const distckpt::RankGroup& group, const distckpt::MeshLayout& mesh) {
    distckpt::MemorySink into(mesh.layout);
    converter::load(origin, mesh, into, {.keep_padding = optim != 0, .threads = 1});
    distckpt::MemorySource out(mesh.layout);
    converter::save(
        group, mesh, out,
        {.config = origin.map.config,
         .to = to,
         .iteration = optim != 0 ? origin.location.iteration.value() : distckpt::Iteration{},
         .parallel = parallel,
         .origin = &origin,
         .prove = true,
         .threads = 1});
  });
}

}  // namespace
}  // namespace ferry::support

int main(int argc, char** argv) {
  try {
    ferry::require(argc >= 3, ferry::ErrorKind::kUsage, "usage: save_ranks FROM TO [tp=2] ...");
    std::map<std::string, int> sizes;
    for (int i = 3; i < argc; ++i) {
      const std::string_view text = argv[i];
      const auto split = text.find('=');
      sizes.emplace(text.substr(0, split), std::stoi(std::string(text.substr(split + 1))));
    }
    ferry::support::run(argv[1], argv[2], sizes);
    return 0;
  } catch (const ferry::Error& error) {
    fmt::print(stderr, "{}", error.report());
    return 2;
  }
}
