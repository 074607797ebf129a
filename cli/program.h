// Parsing for the programs of this folder, and exit statuses from outcomes as cmp(1) has them: 0
// yes, 1 no, 2 trouble.
#pragma once

#include <functional>

namespace CLI {  // NOLINT(readability-identifier-naming): of CLI11
class App;
}

namespace ferry::cli {

// Runs the subcommand that the arguments name, of those that `add_commands` adds. `guard`, if there
// is one, calls what it is given, and turns exceptions of libraries into Error.
int run_program(int argc,
                char** argv,
                const std::function<void(CLI::App&)>& add_commands,
                const std::function<void(const std::function<void()>&)>& guard = {}) noexcept;

// Adds the subcommands of ferry; of those that ferry-torch has, the names.
void add_file_commands(CLI::App& app);

}  // namespace ferry::cli
