// ferry-torch: the subcommands of models. ferry runs it.
#include "cli/program.h"
#include "cli/torch/commands.h"
#include "cli/torch/library_error.h"

int main(int argc, char** argv) {
  const auto add_commands = [](CLI::App& app) {
    ferry::cli::add_verify_models(app);
    ferry::cli::add_bench(app);
    ferry::cli::add_generate(app);
    ferry::cli::add_train(app);
  };
  return ferry::cli::run_program(argc, argv, add_commands, [](const std::function<void()>& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      throw ferry::cli::library_error(error);
    }
  });
}
