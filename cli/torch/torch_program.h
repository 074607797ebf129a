// ferry-torch behind its main(): the subcommands of models.
#pragma once

namespace ferry::cli {

// Its exit status is ferry's (program.h). Errors of LibTorch are told as ours.
int run_torch_program(int argc, char** argv) noexcept;

}  // namespace ferry::cli
