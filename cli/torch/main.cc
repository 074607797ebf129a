// ferry-torch: the subcommands of models. ferry runs it.
#include "cli/program.h"
#include "cli/torch/commands.h"

int main(int argc, char** argv) {
  return ferry::cli::run_program(argc, argv, [](CLI::App& app) {
    ferry::cli::add_verify_models(app);
    ferry::cli::add_bench(app);
    ferry::cli::add_generate(app);
    ferry::cli::add_train(app);
  });
}
