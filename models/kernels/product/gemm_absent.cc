#include "models/device/no_cuda.h"
#include "models/kernels/product/gemm.h"

namespace ferry::models {
at::Tensor gemm_nt(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
std::int64_t gemm_bucket(std::int64_t rows) {
  return rows;
}
std::vector<GemmChoice> gemm_choices() {
  return {};
}
std::vector<std::pair<std::string, std::string>> gemm_environment() {
  return {};
}

}  // namespace ferry::models
