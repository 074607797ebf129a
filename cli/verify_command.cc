#include <memory>

#include "cli/commands.h"
#include "cli/report/json.h"
#include "cli/report/text.h"
#include "converter/verify.h"

namespace ferry::cli {
namespace {

struct VerifyFlags {
  converter::PairOptions pair{};
  bool weights_only = false;
  bool json = false;
  bool quiet = false;
};

}  // namespace

void add_verify(CLI::App& app) {
  auto flags = std::make_shared<VerifyFlags>();
  auto* command = app.add_subcommand(
      "verify", "Compare two checkpoints, bit for bit, in any formats and layouts");
  command->add_option("LEFT", flags->pair.left, "A checkpoint of any format, or its address")
      ->required();
  command->add_option("RIGHT", flags->pair.right, "The one to compare it with")->required();
  add_iteration(*command, "--left-iteration", flags->pair.left_iteration,
                "Which iteration of a Megatron checkpoint LEFT");
  add_iteration(*command, "--right-iteration", flags->pair.right_iteration,
                "Which iteration of a Megatron checkpoint RIGHT");
  add_hf_config(*command, flags->pair.hf_config);
  command->add_flag("--weights-only", flags->weights_only,
                    "Leave config.json, tokenizer and other files alone");
  add_selection(*command, flags->pair.selection, "Compare");
  add_threads(*command, flags->pair.threads);
  add_max_memory(*command, flags->pair.max_memory);
  add_json(*command, flags->json);
  add_quiet(*command, flags->quiet);
  command->footer(
      "ferry verify --logits CHECKPOINT --reference FILE compares what our model of a checkpoint "
      "computes with what transformers does: ferry verify --logits --help.\n"
      "Exit status: 0 identical, 1 something differs, 2 trouble.");
  command->callback([flags] {
    const auto report =
        converter::verify(flags->pair, flags->weights_only, make_progress(flags->quiet));
    if (flags->json) {
      fmt::print("{}\n", json_text(verify_json(report)));
    } else if (!flags->quiet) {
      fmt::print("{}", verify_text(report));
    }
    if (!report.identical()) throw CLI::RuntimeError(kNo);
  });
}

}  // namespace ferry::cli
