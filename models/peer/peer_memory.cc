#include "models/peer/peer_memory.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <optional>
#include <utility>

#include "distckpt/base/cbor.h"
#include "models/kernels/cuda/cuda_call.h"
#include "models/peer/peer_exchange_launch.h"

namespace ferry::models {
namespace {

// For two ranks one way is as long as the other, and sums at once are there earlier.
constexpr std::int64_t kMostBytesOfOneShot = 256 << 10;

// Ranks tell each other this.
struct PeerIdentity {
  std::string boot{};  // of the host
  std::string gpu{};   // its address on the host's bus
  std::int64_t process = 0;
  std::string memory{};  // the bytes of a cudaIpcMemHandle_t; empty: none
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PeerIdentity, boot, gpu, process, memory)

// Device memory of one's own, or of another process.
class MappedMemory {
 public:
  MappedMemory() = default;
  MappedMemory(void* pointer, bool own) : pointer_(pointer), own_(own) {}
  MappedMemory(MappedMemory&& other) noexcept
      : pointer_(std::exchange(other.pointer_, nullptr)), own_(other.own_) {}
  MappedMemory& operator=(MappedMemory&& other) noexcept {
    std::swap(pointer_, other.pointer_);
    std::swap(own_, other.own_);
    return *this;
  }
  ~MappedMemory() {
    if (pointer_ == nullptr) return;
    (void)(own_ ? cudaFree(pointer_) : cudaIpcCloseMemHandle(pointer_));
  }
  void* get() const { return pointer_; }

 private:
  void* pointer_ = nullptr;
  bool own_ = false;
};

// Forgets the last error of a call that may fail.
bool succeeded(cudaError_t status) {
  if (status != cudaSuccess) (void)cudaGetLastError();
  return status == cudaSuccess;
}

bool is_captured() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

MappedMemory allocate(std::int64_t bytes, PeerIdentity& identity) {
  void* pointer = nullptr;
  if (!succeeded(cudaMalloc(&pointer, static_cast<std::size_t>(bytes)))) return {};
  MappedMemory memory(pointer, /*own=*/true);
  cudaIpcMemHandle_t handle{};
  if (succeeded(cudaMemset(pointer, 0, static_cast<std::size_t>(bytes))) &&
      succeeded(cudaDeviceSynchronize()) && succeeded(cudaIpcGetMemHandle(&handle, pointer)))
    identity.memory.assign(handle.reserved, sizeof(handle.reserved));
  return memory;
}

PeerIdentity own_identity(at::Device device) {
  PeerIdentity identity{.process = getpid()};
  std::ifstream boot("/proc/sys/kernel/random/boot_id");
  std::getline(boot, identity.boot);
  std::array<char, 16> gpu{};
  check(cudaDeviceGetPCIBusId(gpu.data(), static_cast<int>(gpu.size()), device.index()));
  identity.gpu = gpu.data();
  return identity;
}

// The memory of another rank; none if this one cannot write to it.
MappedMemory map_memory(const PeerIdentity& mine, const PeerIdentity& other, at::Device device) {
  int its_device = 0;
  int reachable = 0;
  void* pointer = nullptr;
  cudaIpcMemHandle_t handle{};
  if (other.memory.size() != sizeof(handle.reserved)) return {};
  std::ranges::copy(other.memory, handle.reserved);
  const bool mapped =
      mine.boot == other.boot && mine.process != other.process && mine.gpu != other.gpu &&
      succeeded(cudaDeviceGetByPCIBusId(&its_device, other.gpu.c_str())) &&
      succeeded(cudaDeviceCanAccessPeer(&reachable, device.index(), its_device)) &&
      reachable != 0 &&
      succeeded(cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess));
  return mapped ? MappedMemory(pointer, /*own=*/false) : MappedMemory();
}

std::optional<launch::PeerElement> peer_element_of(const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kBFloat16:
      return launch::PeerElement::kBf16;
    case at::kFloat:
      return launch::PeerElement::kFloat;
    case at::kInt:
      return launch::PeerElement::kInt32;
    default:
      return std::nullopt;
  }
}

std::int64_t bytes_of(const at::Tensor& x) {
  return x.numel() * static_cast<std::int64_t>(x.element_size());
}

class MappedPeers : public PeerMemory {
 public:
  MappedPeers(int rank, at::Device device, std::vector<MappedMemory> mapped)
      : rank_(rank), device_(device), mapped_(std::move(mapped)) {
    for (const auto& one : mapped_) memory_.push_back(one.get());
    check(cudaEventCreateWithFlags(&moved_, cudaEventDisableTiming));
  }
  ~MappedPeers() override { (void)cudaEventDestroy(moved_); }
  MappedPeers(const MappedPeers&) = delete;
  MappedPeers& operator=(const MappedPeers&) = delete;

  bool takes(PeerOperation operation, const at::Tensor& mine) const override {
    if (mine.device() != device_ || mine.numel() == 0) return false;
    const auto plan = plan_of(operation, mine);
    if (plan.bytes <= 0 || plan.bytes % launch::kUnitBytes != 0) return false;
    if (plan.kind == launch::PeerKind::kGather)
      return plan.run % launch::kUnitBytes == 0 && plan.bytes * size() <= launch::kMostGatherBytes;
    return plan.bytes <= launch::PeerLayout{.size = size()}.bulk_bytes() &&
           peer_element_of(mine).has_value();
  }

  at::Tensor exchange(PeerOperation operation, const at::Tensor& mine) override {
    const c10::cuda::CUDAGuard guard(device_);
    auto plan = plan_of(operation, mine);
    const auto input = aligned(mine);
    auto shape = mine.sizes().vec();
    if (operation == PeerOperation::kReduceScatter) shape[0] /= size();
    if (operation == PeerOperation::kAllGather) shape[0] *= size();
    if (operation == PeerOperation::kAllGatherChannels) shape[1] *= size();
    auto result = at::empty(shape, mine.options());
    plan.mine = input.const_data_ptr();
    plan.result = result.mutable_data_ptr();
    follow();
    check(launch::peer_exchange(plan, stream()));
    return result;
  }

  bool takes_rows(const at::Tensor& mine, const at::Tensor& places) const override {
    if (mine.device() != device_ || mine.numel() == 0 || places.size(0) == 0) return false;
    const launch::PeerRows plan{.size = size(), .row_bytes = bytes_of(mine) / mine.size(0)};
    return plan.row_bytes % launch::kUnitBytes == 0 && plan.most_rows() > 0;
  }

  at::Tensor exchange_rows(const at::Tensor& mine,
                           const at::Tensor& places,
                           const at::Tensor& end) override {
    const c10::cuda::CUDAGuard guard(device_);
    const auto input = aligned(mine);
    const auto of_all = places.contiguous();
    auto shape = mine.sizes().vec();
    shape[0] = places.size(0) / size();
    auto result = at::empty(shape, mine.options());
    launch::PeerRows plan{.size = size(),
                          .rank = rank_,
                          .mine = input.const_data_ptr(),
                          .places = of_all.const_data_ptr<std::int64_t>(),
                          .end = end.const_data_ptr<std::int32_t>(),
                          .result = result.mutable_data_ptr(),
                          .rows = shape[0],
                          .row_bytes = bytes_of(mine) / mine.size(0)};
    copy_memory(plan.memory);
    follow();
    for (; plan.first < plan.rows; plan.first += plan.count) {
      plan.count = std::min(plan.rows - plan.first, plan.most_rows());
      check(launch::peer_rows(plan, stream()));
    }
    return result;
  }

  std::function<bool()> done() const override {
    if (is_captured()) return {};
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    const std::shared_ptr<CUevent_st> shared(event,
                                             [](cudaEvent_t one) { (void)cudaEventDestroy(one); });
    check(cudaEventRecord(event, stream()));
    return [shared] {
      const auto status = cudaEventQuery(shared.get());
      if (status != cudaErrorNotReady) check(status);
      return status == cudaSuccess;
    };
  }

  const std::vector<void*>& memory() const override { return memory_; }

 private:
  int size() const { return static_cast<int>(memory_.size()); }

  void copy_memory(unsigned char** to) const {
    std::ranges::transform(memory_, to, [](void* one) { return static_cast<unsigned char*>(one); });
  }

  static at::Tensor aligned(const at::Tensor& mine) {
    constexpr auto kAlignment = static_cast<std::uintptr_t>(launch::kUnitBytes);
    const auto input = mine.contiguous();
    const auto address = reinterpret_cast<std::uintptr_t>(input.const_data_ptr());
    return address % kAlignment == 0 ? input : input.clone();
  }

  // All but the pointers of the messages.
  launch::PeerExchange plan_of(PeerOperation operation, const at::Tensor& mine) const {
    const auto all = bytes_of(mine);
    const auto part = all / size();
    launch::PeerExchange plan{.size = size(), .rank = rank_, .bytes = all};
    copy_memory(plan.memory);
    switch (operation) {
      case PeerOperation::kAllReduce: {
        const auto once =
            size() == 2 ? launch::PeerLayout{.size = 2}.bulk_bytes() : kMostBytesOfOneShot;
        plan.kind = all <= once ? launch::PeerKind::kSum : launch::PeerKind::kSumAndGather;
        if (all > once) plan.bytes = all % size() == 0 ? part : 0;
        break;
      }
      case PeerOperation::kReduceScatter:
        plan.kind = launch::PeerKind::kScatterSum;
        plan.bytes = part;
        break;
      case PeerOperation::kAllGather:
        plan.run = all;
        break;
      case PeerOperation::kAllGatherChannels:
        plan.run = all / mine.size(0);
        break;
    }
    plan.element = peer_element_of(mine).value_or(launch::PeerElement::kBf16);
    return plan;
  }

  // Exchanges on another stream than the last one come behind it. A graph is launched on a stream
  // that waits for what came before.
  void follow() {
    if (is_captured()) return;
    const auto now = stream();
    if (last_ && *last_ != now) {
      check(cudaEventRecord(moved_, *last_));
      check(cudaStreamWaitEvent(now, moved_));
    }
    last_ = now;
  }

  int rank_;
  at::Device device_;
  std::vector<MappedMemory> mapped_;  // of each rank
  std::vector<void*> memory_;
  cudaEvent_t moved_ = nullptr;
  std::optional<cudaStream_t> last_;
};

}  // namespace

std::unique_ptr<PeerMemory> PeerMemory::make(int rank,
                                             int size,
                                             at::Device device,
                                             const Gather& gather) {
  if (!device.is_cuda() || size < 2 || size > launch::kMostPeers) return nullptr;
  const c10::cuda::CUDAGuard guard(device);
  auto mine = own_identity(device);
  auto own = allocate(launch::PeerLayout{.size = size}.bytes(), mine);
  std::vector<MappedMemory> mapped;
  for (const auto& bytes : gather(to_cbor(mine))) {
    const bool is_mine = static_cast<int>(mapped.size()) == rank;
    mapped.push_back(is_mine ? MappedMemory()
                             : map_memory(mine, from_cbor<PeerIdentity>(bytes), device));
  }
  mapped[static_cast<std::size_t>(rank)] = std::move(own);
  const bool all_mapped =
      std::ranges::all_of(mapped, [](const MappedMemory& one) { return one.get() != nullptr; });
  for (const auto& answer : gather(all_mapped ? "mapped" : ""))
    if (answer.empty()) return nullptr;
  return std::make_unique<MappedPeers>(rank, device, std::move(mapped));
}

}  // namespace ferry::models
