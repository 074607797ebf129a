#include <memory>
#include <string>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/inspect.h"

namespace ferry::cli {
namespace {

struct InspectFlags {
  std::string path{};
  std::string filter = "*";
  std::optional<distckpt::Iteration> iteration{};
  std::filesystem::path hf_config{};
  bool json = false;
};

}  // namespace

void add_inspect(CLI::App& app) {
  auto flags = std::make_shared<InspectFlags>();
  auto* command =
      app.add_subcommand("inspect", "Show what a checkpoint holds, from its headers alone");
  command->add_option("PATH", flags->path, "A checkpoint of any format, or its address")
      ->required();
  command->add_option("--filter", flags->filter,
                      "Only tensors whose name matches: '*.linear_fc1.weight'");
  add_iteration(*command, "--iteration", flags->iteration,
                "Which iteration of a Megatron checkpoint");
  add_hf_config(*command, flags->hf_config);
  add_json(*command, flags->json);
  command->footer("Exit status: 0 shown, 2 trouble.");
  command->callback([flags] {
    const auto report = converter::inspect(flags->path, flags->iteration, flags->hf_config);
    if (flags->json) {
      fmt::print("{}\n", json_text(inspect_json(report, flags->filter)));
    } else {
      fmt::print("{}", inspect_text(report, flags->filter));
    }
  });
}

}  // namespace ferry::cli
