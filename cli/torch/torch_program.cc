#include "cli/torch/torch_program.h"

#include "cli/program.h"
#include "cli/torch/commands.h"
#include "cli/torch/library_error.h"

namespace ferry::cli {

int run_torch_program(int argc, char** argv) noexcept {
  const auto add_commands = [](CLI::App& app) {
    add_verify_models(app);
    add_bench(app);
    add_generate(app);
    add_serve(app);
    add_train(app);
  };
  return run_program(argc, argv, add_commands, [](const std::function<void()>& body) {
    try {
      body();
    } catch (const c10::Error& error) {
      throw library_error(error);
    }
  });
}

}  // namespace ferry::cli
