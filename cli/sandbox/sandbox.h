// Runs a program that is not trusted, such as a tool that computes what a model writes: it changes
// no file, has no network, sees no other process, and has bounds.
//
// Linux namespaces (user, mount, pid, network, IPC, UTS; namespaces(7)) and a seccomp filter hold
// it; nobody has to be root for it. The program has an environment of its own, without keys.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace ferry::cli {

struct SandboxOptions {
  std::vector<std::string> command{};             // with its arguments
  std::vector<std::filesystem::path> writable{};  // folders that stay writable
  std::int64_t memory = std::int64_t{2} << 30;    // bytes: address space of a process, pages of all
  std::int64_t cpu_seconds = 0;                   // of each process; 0: no bound
  int processes = 64;                             // and threads
  bool network = false;
  std::vector<std::filesystem::path> hidden{};  // files and folders that are empty for it
  // Variables beside those for paths and languages: NAME, or NAME=VALUE.
  std::vector<std::string> environment{};
};

// Returns the program's exit status, 128 + the signal that ended it. Throws Error(kUsage) if the
// system does not allow a sandbox, Error(kIo) if one cannot be made.
int run_in_sandbox(const SandboxOptions& options);

}  // namespace ferry::cli
