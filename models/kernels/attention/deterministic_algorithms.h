// ATen's choice of kernels, which is an option of the whole process.
#pragma once

#include <ATen/Context.h>

#include <mutex>

namespace ferry::models {

// RAII: makes ATen's algorithms deterministic if that is wanted, while no other one does.
class DeterministicAlgorithms {
 public:
  explicit DeterministicAlgorithms(bool wanted) : lock_(mutex()), wanted_(wanted) {
    auto& context = at::globalContext();
    before_ = context.deterministicAlgorithms();
    warn_only_ = context.deterministicAlgorithmsWarnOnly();
    fill_ = context.deterministicFillUninitializedMemory();
    if (!wanted_) return;
    context.setDeterministicAlgorithms(true, /*warn_only=*/false);
    context.setDeterministicFillUninitializedMemory(false);
  }
  ~DeterministicAlgorithms() {
    if (!wanted_) return;
    at::globalContext().setDeterministicAlgorithms(before_, warn_only_);
    at::globalContext().setDeterministicFillUninitializedMemory(fill_);
  }
  DeterministicAlgorithms(const DeterministicAlgorithms&) = delete;
  DeterministicAlgorithms& operator=(const DeterministicAlgorithms&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  std::lock_guard<std::mutex> lock_;
  bool wanted_;
  bool before_ = false;
  bool warn_only_ = false;
  bool fill_ = false;
};

}  // namespace ferry::models
