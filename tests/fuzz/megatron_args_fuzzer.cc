#include <optional>
#include <string>

#include "converter/families/megatron_args.h"
#include "distckpt/formats/torch_dist.h"
#include "distckpt/formats/torch_save/pickle.h"
#include "tests/fuzz/model_properties.h"
#include "tests/fuzz/property.h"
#include "tests/fuzz/targets.h"

namespace ferry::fuzz {

void megatron_args(std::string_view input) {
  constexpr std::string_view kGlobals[] = {"argparse.Namespace", "torch.", "signal.Signals",
                                           "megatron.core.", "types.SimpleNamespace"};
  std::optional<models::TransformerConfig> config;
  accepts([&] {
    const auto pickle = distckpt::Pickle::parse(std::string(input),
                                                {.source = "fuzz", .allowed_globals = kGlobals});
    config = converter::read_args(distckpt::common_dict(pickle));
  });
  if (!config) return;
  if (config->multi_latent_attention && config->kv_lora_rank == 0) return;  // sizes are not known
  expect_args_alike(*config);
  expect_sound(*config);
}

}  // namespace ferry::fuzz
