#include "models/device/no_cuda.h"
#include "models/kernels/product/few_rows.h"
#include "models/kernels/product/gemm.h"

namespace ferry::models {
at::Tensor gemm_nt(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
at::Tensor gemm_nt_in_fp32(const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
bool adds_in_order(const at::Tensor&) {
  return false;
}
std::vector<GemmChoice> gemm_choices() {
  return {};
}
std::vector<std::pair<std::string, std::string>> gemm_environment() {
  return {};
}
bool few_rows_product_supported(const at::Tensor&, const at::Tensor&) {
  return false;
}
at::Tensor few_rows_product(const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  no_cuda();
}
at::Tensor few_rows_product_in_fp32(const at::Tensor&, const at::Tensor&) {
  no_cuda();
}

}  // namespace ferry::models
