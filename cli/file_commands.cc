#include "cli/commands.h"
#include "cli/program.h"

namespace ferry::cli {

void add_file_commands(CLI::App& app) {
  add_convert(app);
  add_inspect(app);
  add_verify(app);
  add_diff(app);
  add_digest(app);
  add_delta(app);
  add_merge(app);
  add_plan(app);
  add_report(app);
  add_sandbox(app);
  add_score(app);
  add_split(app);
  add_watch(app);
  // Listed here; what is called is ferry-torch.
  const auto add = [&](const char* name, const char* what) {
    app.add_subcommand(name, what)
        ->footer(
            "Its options are those of ferry-torch, which is not beside this program (pip install "
            "ferry-torch); docs/cli.md lists them.");
  };
  add("bench", "Measure");
  add("generate", "Generate text with a checkpoint's model");
  add("serve", "Answer OpenAI's API over HTTP with a checkpoint's model");
  add("train", "Train a model");
}

}  // namespace ferry::cli
