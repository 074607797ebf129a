#include "models/device/no_cuda.h"
#include "models/kernels/product/few_rows.h"
#include "models/kernels/product/gemm.h"

namespace ferry::models {

// clang-format off
using Input = const at::Tensor&;

at::Tensor gemm_nt(Input, Input, Input) { no_cuda(); }
at::Tensor gemm_nt_in_fp32(Input, Input) { no_cuda(); }
bool adds_in_order(Input) { return false; }
std::vector<GemmChoice> gemm_choices() { return {}; }
std::vector<std::pair<std::string, std::string>> gemm_environment() { return {}; }
bool few_rows_product_supported(Input, Input) { return false; }
at::Tensor few_rows_product(Input, Input, Input) { no_cuda(); }
at::Tensor few_rows_product_in_fp32(Input, Input) { no_cuda(); }
// clang-format on

}  // namespace ferry::models
