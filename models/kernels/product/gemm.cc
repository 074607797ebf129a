#include "models/kernels/product/gemm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/cuda/CUDAGuard.h>
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "distckpt/base/error.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/kernels/cuda/cuda_launch.h"

namespace ferry::models {
namespace {

// The smallest bucket, the one that the kernel of ordered_rows.cu serves, too.
constexpr std::int64_t kFewestGemmRows = 8;
constexpr std::int64_t kMostRows = 8192;  // of a bucket
constexpr std::int64_t kReferenceRows = 2048;
constexpr int kCandidates = 64;
constexpr std::int64_t kMostOfSmall = std::int64_t{1} << 24;  // elements
constexpr int kRepeats = 9;
constexpr std::int64_t kEvictedBytes = std::int64_t{128} << 20;  // more than the caches have

using models::check;

void check(cublasStatus_t status) {
  require(status == CUBLAS_STATUS_SUCCESS, ErrorKind::kDevice, "cuBLASLt: {}",
          cublasLtGetStatusString(status));
}

// One product, as cuBLASLt sees it: column-major, so the weight comes first.
class LtProduct {
 public:
  LtProduct(std::int64_t m, std::int64_t n, std::int64_t k, bool has_bias) {
    check(cublasLtMatmulDescCreate(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    if (has_bias) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
      set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, CUDA_R_16BF);
    }
    const auto unsigned_of = [](std::int64_t size) { return static_cast<std::uint64_t>(size); };
    check(cublasLtMatrixLayoutCreate(&w, CUDA_R_16BF, unsigned_of(k), unsigned_of(n), k));
    check(cublasLtMatrixLayoutCreate(&x, CUDA_R_16BF, unsigned_of(k), unsigned_of(m), k));
    check(cublasLtMatrixLayoutCreate(&y, CUDA_R_16BF, unsigned_of(n), unsigned_of(m), n));
  }
  ~LtProduct() {
    cublasLtMatrixLayoutDestroy(w);
    cublasLtMatrixLayoutDestroy(x);
    cublasLtMatrixLayoutDestroy(y);
    cublasLtMatmulDescDestroy(operation_);
  }
  LtProduct(const LtProduct&) = delete;
  LtProduct& operator=(const LtProduct&) = delete;

  cublasLtMatmulDesc_t operation() const { return operation_; }

  cublasStatus_t run(cublasLtHandle_t handle,
                     const cublasLtMatmulAlgo_t& algorithm,
                     const at::Tensor& rows,
                     const at::Tensor& weight,
                     const at::Tensor& bias,
                     const at::Tensor& result,
                     cudaStream_t stream) {
    if (bias.defined()) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.const_data_ptr());
    const float one = 1;
    const float zero = 0;
    return cublasLtMatmul(handle, operation_, &one, weight.const_data_ptr(), w,
                          rows.const_data_ptr(), x, &zero, result.mutable_data_ptr(), y,
                          result.mutable_data_ptr(), y, &algorithm, nullptr, 0, stream);
  }

  cublasLtMatrixLayout_t w = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;

 private:
  template <typename T>
  void set(cublasLtMatmulDescAttributes_t attribute, T value) {
    check(cublasLtMatmulDescSetAttribute(operation_, attribute, &value, sizeof value));
  }
  cublasLtMatmulDesc_t operation_ = nullptr;
};

int config_of(const cublasLtMatmulAlgo_t& algorithm, cublasLtMatmulAlgoConfigAttributes_t which) {
  int value = 0;
  std::size_t written = 0;
  check(cublasLtMatmulAlgoConfigGetAttribute(&algorithm, which, &value, sizeof value, &written));
  return value;
}

bool splits_k(const cublasLtMatmulAlgo_t& algorithm) {
  return config_of(algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM) > 1 ||
         config_of(algorithm, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME) !=
             CUBLASLT_REDUCTION_SCHEME_NONE;
}

// The kernels without split-K. They get no workspace, so that none can store the parts of a split
// sum.
std::vector<cublasLtMatmulAlgo_t> unsplit_kernels(cublasLtHandle_t handle,
                                                  const LtProduct& product,
                                                  int& dropped) {
  cublasLtMatmulPreference_t preference = nullptr;
  check(cublasLtMatmulPreferenceCreate(&preference));
  const std::unique_ptr<std::remove_pointer_t<cublasLtMatmulPreference_t>,
                        decltype(&cublasLtMatmulPreferenceDestroy)>
      owner(preference, cublasLtMatmulPreferenceDestroy);
  const std::uint32_t none = CUBLASLT_REDUCTION_SCHEME_NONE;
  const std::uint64_t no_bytes = 0;
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                             &none, sizeof none));
  check(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                             &no_bytes, sizeof no_bytes));
  std::array<cublasLtMatmulHeuristicResult_t, kCandidates> found{};
  int count = 0;
  const auto status =
      cublasLtMatmulAlgoGetHeuristic(handle, product.operation(), product.w, product.x, product.y,
                                     product.y, preference, kCandidates, found.data(), &count);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return {};
  check(status);
  std::vector<cublasLtMatmulAlgo_t> kernels;
  for (int i = 0; i < count; ++i) {
    const auto& result = found[static_cast<std::size_t>(i)];
    if (result.state != CUBLAS_STATUS_SUCCESS || splits_k(result.algo))
      ++dropped;
    else
      kernels.push_back(result.algo);
  }
  return kernels;
}

// True if the kernel of ordered_rows.cu can read it.
bool can_be_read_at_once(const at::Tensor& values) {
  constexpr std::uintptr_t kBytesAtOnce = 16;
  return reinterpret_cast<std::uintptr_t>(values.const_data_ptr()) % kBytesAtOnce == 0;
}

struct Key {
  int device = 0;
  std::int64_t n = 0;
  std::int64_t k = 0;
  std::int64_t bucket = 0;
  bool has_bias = false;
  auto operator<=>(const Key&) const = default;  // NOLINT(modernize-use-nullptr)
};

// One of cuBLASLt's, or that of ordered_rows.cu.
using GemmKernel = std::optional<cublasLtMatmulAlgo_t>;

// GemmKernels of one class, the fastest first: some that serve a whole bucket refuse a smaller M.
struct Chosen {
  std::vector<GemmKernel> kernels{};
  GemmChoice report{};
};

// The largest number of rows of the bucket whose kernel serves `rows`.
std::int64_t gemm_bucket(std::int64_t rows) {
  const auto power = static_cast<std::int64_t>(
      std::bit_ceil(static_cast<std::uint64_t>(std::max(rows, kFewestGemmRows))));
  return std::min(power, kMostRows);
}

class GemmKernels {
 public:
  static GemmKernels& of_process() {  // handles and measurements outlive every model
    static GemmKernels kernels;
    return kernels;
  }

  at::Tensor multiply(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    const Key key{.device = x.device().index(),
                  .n = weight.size(0),
                  .k = weight.size(1),
                  .bucket = gemm_bucket(x.size(0)),
                  .has_bias = bias.defined()};
    auto result = at::empty({x.size(0), key.n}, x.options());
    run_first(key, choose(key, weight, bias), x, weight, bias, result);
    return result;
  }

  bool has_ordered_kernel(const at::Tensor& weight) {
    const Key key{.device = weight.device().index(),
                  .n = weight.size(0),
                  .k = weight.size(1),
                  .bucket = kFewestGemmRows};
    return std::ranges::any_of(choose(key, weight, {}), [](const auto& one) { return !one; });
  }

  std::vector<GemmChoice> choices() {
    const std::lock_guard lock(mutex_);
    std::vector<GemmChoice> reports;
    for (const auto& [key, chosen] : chosen_) reports.push_back(chosen.report);
    return reports;
  }

 private:
  cublasLtHandle_t handle(int device) {
    const std::lock_guard lock(mutex_);
    auto& handle = handles_[device];
    if (handle == nullptr) check(cublasLtCreate(&handle));
    return handle;
  }

  // Runs the first kernel that takes this many rows.
  void run_first(const Key& key,
                 const std::vector<GemmKernel>& kernels,
                 const at::Tensor& x,
                 const at::Tensor& weight,
                 const at::Tensor& bias,
                 const at::Tensor& result) {
    LtProduct product(x.size(0), key.n, key.k, key.has_bias);
    const auto stream = models::stream();
    auto status = CUBLAS_STATUS_NOT_SUPPORTED;
    for (const auto& kernel : kernels) {
      status = run(key, product, kernel, x, weight, bias, result, stream);
      if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE) break;
    }
    check(status);
  }

  cublasStatus_t run(const Key& key,
                     LtProduct& product,
                     const GemmKernel& kernel,
                     const at::Tensor& x,
                     const at::Tensor& weight,
                     const at::Tensor& bias,
                     const at::Tensor& result,
                     cudaStream_t stream) {
    if (kernel) return product.run(handle(key.device), *kernel, x, weight, bias, result, stream);
    if (!can_be_read_at_once(x) || !can_be_read_at_once(weight)) return CUBLAS_STATUS_NOT_SUPPORTED;
    check(launch::ordered_rows_product(x.const_data_ptr(), weight.const_data_ptr(),
                                       bias.defined() ? bias.const_data_ptr() : nullptr,
                                       result.mutable_data_ptr(), x.size(0), key.n, key.k, stream));
    return CUBLAS_STATUS_SUCCESS;
  }

  std::vector<GemmKernel> kernels_for(const Key& key, const LtProduct& product, int& dropped) {
    std::vector<GemmKernel> kernels;
    for (const auto& one : unsplit_kernels(handle(key.device), product, dropped))
      kernels.emplace_back(one);
    if (launch::ordered_rows_supported(key.bucket, key.k)) kernels.emplace_back();
    return kernels;
  }

  // The reference stays valid: no entry leaves the map.
  const std::vector<GemmKernel>& choose(const Key& key,
                                        const at::Tensor& weight,
                                        const at::Tensor& bias) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = chosen_.find(key); found != chosen_.end())
        return found->second.kernels;
    }
    auto chosen = measure(key, weight, bias);
    const std::lock_guard lock(mutex_);
    return chosen_.try_emplace(key, std::move(chosen)).first->second.kernels;
  }

  // The fastest kernel of those that agree, bit for bit, with the reference bucket's. Small weights
  // have too few results for a rare difference to show: others of their size do, whose sums cancel,
  // so that results are made of roundings.
  Chosen measure(const Key& key, const at::Tensor& weight_of_model, const at::Tensor& bias) {
    auto rows = at::randn({key.bucket, key.k}, weight_of_model.options());
    auto weight = weight_of_model;
    if (key.n * key.k <= kMostOfSmall) {
      weight = at::randn(weight.sizes(), weight.options());
      const auto half = key.k / 2;
      weight.narrow(1, half, half).copy_(-weight.narrow(1, 0, half));
      rows.narrow(1, half, half).copy_(rows.narrow(1, 0, half));
    }
    at::Tensor expected;
    if (key.bucket != kReferenceRows) {
      auto of_reference = key;
      of_reference.bucket = kReferenceRows;
      expected = at::empty({key.bucket, key.n}, weight.options());
      run_first(key, choose(of_reference, weight_of_model, bias), rows, weight, bias, expected);
    }
    LtProduct product(key.bucket, key.n, key.k, key.has_bias);
    Chosen chosen;
    chosen.report = {.n = key.n, .k = key.k, .bucket = key.bucket, .has_bias = key.has_bias};
    auto result = at::empty({key.bucket, key.n}, weight.options());
    std::vector<std::pair<float, GemmKernel>> timed;
    for (const auto& kernel : kernels_for(key, product, chosen.report.dropped)) {
      const auto elapsed = time(key, product, kernel, rows, weight, bias, result);
      if (!elapsed || (expected.defined() && !at::equal(result, expected))) {
        ++chosen.report.dropped;
        continue;
      }
      if (!expected.defined()) expected = result.clone();  // the heuristic's first of the reference
      timed.emplace_back(*elapsed, kernel);
    }
    require(!timed.empty(), ErrorKind::kDevice,
            "weight [{}, {}]: cuBLASLt offers no kernel without split-K for {} rows that agrees "
            "with that for {} rows",
            key.n, key.k, key.bucket, kReferenceRows);
    std::ranges::stable_sort(timed, {}, [](const auto& one) { return one.first; });
    for (const auto& one : timed) chosen.kernels.push_back(one.second);
    chosen.report.candidates = static_cast<int>(timed.size());
    chosen.report.microseconds = static_cast<double>(timed.front().first) * 1e3;
    if (const auto& best = chosen.kernels.front()) {
      chosen.report.algorithm = config_of(*best, CUBLASLT_ALGO_CONFIG_ID);
      chosen.report.tile = config_of(*best, CUBLASLT_ALGO_CONFIG_TILE_ID);
      chosen.report.stages = config_of(*best, CUBLASLT_ALGO_CONFIG_STAGES_ID);
    }
    return chosen;
  }

  // Milliseconds of one product whose weight is not in the cache, as in a model, the median of
  // several, or nothing if this kernel cannot run.
  std::optional<float> time(const Key& key,
                            LtProduct& product,
                            const GemmKernel& kernel,
                            const at::Tensor& rows,
                            const at::Tensor& weight,
                            const at::Tensor& bias,
                            const at::Tensor& result) {
    const auto stream = models::stream();
    const auto run_once = [&] {
      return run(key, product, kernel, rows, weight, bias, result, stream);
    };
    if (run_once() != CUBLAS_STATUS_SUCCESS) return std::nullopt;
    const auto evicting = at::empty({kEvictedBytes}, rows.options().dtype(at::kByte));
    std::array<cudaEvent_t, 2> events{};
    for (auto& event : events) check(cudaEventCreate(&event));
    std::array<float, kRepeats> elapsed{};
    for (auto& one : elapsed) {
      check(cudaMemsetAsync(evicting.mutable_data_ptr(), 0, kEvictedBytes, stream));
      check(cudaEventRecord(events[0], stream));
      check(run_once());
      check(cudaEventRecord(events[1], stream));
      check(cudaEventSynchronize(events[1]));
      check(cudaEventElapsedTime(&one, events[0], events[1]));
    }
    for (auto& event : events) check(cudaEventDestroy(event));
    std::ranges::nth_element(elapsed, elapsed.begin() + kRepeats / 2);
    return elapsed[kRepeats / 2];
  }

  std::mutex mutex_;
  std::map<int, cublasLtHandle_t> handles_;
  std::map<Key, Chosen> chosen_;
};

at::Tensor multiply_float(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  const bool is_float = x.scalar_type() == at::kFloat;
  require(is_float || x.scalar_type() == at::kBFloat16, ErrorKind::kBug, "a product in fp32 of {}",
          c10::toString(x.scalar_type()));
  auto result = at::empty({x.size(0), weight.size(0)}, x.options().dtype(at::kFloat));
  if (x.size(0) == 0) return result;
  check(launch::serial_gemm(x.const_data_ptr(), weight.const_data_ptr(),
                            bias.defined() ? bias.const_data_ptr<float>() : nullptr,
                            result.mutable_data_ptr<float>(), x.size(0), weight.size(0), x.size(1),
                            is_float ? launch::Element::kFloat : launch::Element::kBf16, stream()));
  return result;
}

void require_alike(const at::Tensor& x, const at::Tensor& weight) {
  require(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1) && x.is_cuda() &&
              weight.device() == x.device() && x.scalar_type() == weight.scalar_type(),
          ErrorKind::kBug, "product of unlike operands: [{}, {}] by [{}, {}]", x.size(0),
          x.size(-1), weight.size(0), weight.size(-1));
}

// Narrow weights get kernels of other classes, unless their rows of results are aligned.
constexpr std::int64_t kFewestGemmColumns = 16;
constexpr std::int64_t kAlignedColumns = 8;

at::Tensor with_more_columns(const at::Tensor& x,
                             const at::Tensor& weight,
                             const at::Tensor& bias) {
  const auto more = kFewestGemmColumns - weight.size(0);
  const auto wider = at::constant_pad_nd(weight, {0, 0, 0, more});
  const auto wider_bias = bias.defined() ? at::constant_pad_nd(bias, {0, more}) : bias;
  return gemm_nt(x, wider, wider_bias).narrow(1, 0, weight.size(0)).contiguous();
}

}  // namespace

at::Tensor gemm_nt(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  require_alike(x, weight);
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard device(x.device());
  if (x.size(0) == 0) return at::empty({0, weight.size(0)}, x.options());
  const auto rows = x.contiguous();
  const auto columns = weight.contiguous();
  if (x.scalar_type() == at::kFloat) return multiply_float(rows, columns, bias);
  require(x.scalar_type() == at::kBFloat16, ErrorKind::kLayout, "products are of bf16 or fp32");
  if (weight.size(0) < kFewestGemmColumns && weight.size(0) % kAlignedColumns != 0)
    return with_more_columns(rows, columns, bias);
  return GemmKernels::of_process().multiply(rows, columns, bias);
}

at::Tensor gemm_nt_in_fp32(const at::Tensor& x, const at::Tensor& weight) {
  require_alike(x, weight);
  const at::NoGradGuard no_grad;
  const c10::cuda::CUDAGuard device(x.device());
  return multiply_float(x.contiguous(), weight.contiguous(), {});
}

bool adds_in_order(const at::Tensor& weight) {
  return GemmKernels::of_process().has_ordered_kernel(weight);
}

std::vector<GemmChoice> gemm_choices() {
  return GemmKernels::of_process().choices();
}

std::vector<std::pair<std::string, std::string>> gemm_environment() {
  int runtime = 0;
  int driver = 0;
  int device = 0;
  cudaDeviceProp properties{};
  check(cudaRuntimeGetVersion(&runtime));
  check(cudaDriverGetVersion(&driver));
  check(cudaGetDevice(&device));
  check(cudaGetDeviceProperties(&properties, device));
  return {{"device", properties.name},
          {"multiprocessors", fmt::format("{}", properties.multiProcessorCount)},
          {"compute capability", fmt::format("{}.{}", properties.major, properties.minor)},
          {"CUDA runtime", fmt::format("{}", runtime)},
          {"CUDA driver", fmt::format("{}", driver)},
          {"cuBLASLt", fmt::format("{}", cublasLtGetVersion())}};
}

}  // namespace ferry::models
