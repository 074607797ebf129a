// optimizer_bench GB [--moments fp32|bf16] [--rounds N]: Adam's update of GB gigabytes of masters
// and moments in pinned memory of the host, streamed through the GPU. Prints a JSON object: the
// seconds to make that memory and to give it back (LibTorch's own beside it, of a power of two),
// and of each round the update, GB/s in each direction, and those of plain copies of the same
// bytes, one way and both ways at once.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <CLI/CLI.hpp>
#include <bit>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>

#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/device/host_memory.h"
#include "trainer/optimizer/streamed_adam.h"

namespace ferry::trainer {
namespace {

using nlohmann::json;

const at::Device kDevice(at::kCUDA, 0);

double seconds_of(const std::function<void()>& body) {
  models::synchronize(kDevice);
  const auto start = std::chrono::steady_clock::now();
  body();
  models::synchronize(kDevice);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The state's bytes in pieces as large as the update's, into and out of memory of the device.
class Copies {
 public:
  explicit Copies(at::Tensor host)
      : host_(std::move(host)),
        up_to_(at::empty({kMaxStagingBytes / kNumStagingSlots},
                         at::TensorOptions(at::kByte).device(kDevice))),
        down_from_(at::empty_like(up_to_)) {}

  void up() const {
    const c10::StreamGuard guard(up_stream_);
    for_stretches(host_.numel(), up_to_.numel(), [&](std::int64_t begin, std::int64_t size) {
      up_to_.narrow(0, 0, size).copy_(host_.narrow(0, begin, size), /*non_blocking=*/true);
    });
  }
  void down() const {
    const c10::StreamGuard guard(down_stream_);
    for_stretches(host_.numel(), up_to_.numel(), [&](std::int64_t begin, std::int64_t size) {
      host_.narrow(0, begin, size).copy_(down_from_.narrow(0, 0, size), /*non_blocking=*/true);
    });
  }

 private:
  at::Tensor host_, up_to_, down_from_;
  c10::impl::VirtualGuardImpl here_{at::kCUDA};
  c10::Stream up_stream_ = here_.getStreamFromGlobalPool(kDevice);
  c10::Stream down_stream_ = here_.getStreamFromGlobalPool(kDevice);
};

json run(double gigabytes, bool bf16_moments, int rounds) {
  const auto moment = bf16_moments ? at::kBFloat16 : at::kFloat;
  const auto of_moment = static_cast<std::int64_t>(at::elementSize(moment));
  const auto of_element = 4 + 2 * of_moment;
  const auto elements =
      static_cast<std::int64_t>(gigabytes * 1e9) / of_element / kStagingElements * kStagingElements;
  const auto bytes = elements * of_element;
  const auto rate = [&](double seconds) { return static_cast<double>(bytes) / 1e9 / seconds; };
  json result{{"gigabytes", static_cast<double>(bytes) / 1e9}, {"elements", elements}};
  at::Tensor memory;
  result["seconds_to_pin"] = seconds_of([&] { memory = models::host_bytes(bytes, kDevice); });
  result["seconds_to_pin_by_libtorch"] =
      seconds_of([&] {
        (void)at::empty(
            {static_cast<std::int64_t>(std::bit_ceil(static_cast<std::uint64_t>(bytes / 8)))},
            at::TensorOptions(at::kByte).pinned_memory(true));
      }) *
      8;
  {
    const auto on_device = at::TensorOptions(at::kBFloat16).device(kDevice);
    const AdamTensors shard{
        .grad = at::ones({elements}, on_device),
        .master = memory.narrow(0, 0, elements * 4).view(at::kFloat),
        .exp_avg = memory.narrow(0, elements * 4, elements * of_moment).view(moment),
        .exp_avg_sq =
            memory.narrow(0, elements * (4 + of_moment), elements * of_moment).view(moment),
        .param = at::empty({elements}, on_device),
        .decays = at::ones({elements / 64}, on_device.dtype(at::kByte))};
    const Copies copies(memory);
    for (int round = 0; round < rounds; ++round) {
      const auto up = seconds_of([&] { copies.up(); });
      const auto down = seconds_of([&] { copies.down(); });
      const auto both = seconds_of([&] {
        copies.up();
        copies.down();
      });
      memory.zero_();
      const auto update =
          seconds_of([&] { streamed_adam_update({shard}, {.lr = 1e-3, .step = round + 1}); });
      result["rounds"].push_back({{"update_seconds", update},
                                  {"update_gb_per_s_each_way", rate(update)},
                                  {"copy_up_gb_per_s", rate(up)},
                                  {"copy_down_gb_per_s", rate(down)},
                                  {"copy_both_gb_per_s_each_way", rate(both)},
                                  {"update_over_copy_both", update / both}});
    }
  }
  result["seconds_to_give_back"] = seconds_of([&] { memory.reset(); });
  return result;
}

}  // namespace
}  // namespace ferry::trainer

int main(int argc, char** argv) {
  CLI::App app("Adam streamed from pinned memory of the host");
  double gigabytes = 0;
  std::string moments = "fp32";
  int rounds = 3;
  app.add_option("GB", gigabytes)->required();
  app.add_option("--moments", moments)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--rounds", rounds);
  CLI11_PARSE(app, argc, argv);
  try {
    ferry::models::set_device(ferry::trainer::kDevice);
    std::printf("%s\n", ferry::trainer::run(gigabytes, moments == "bf16", rounds).dump(2).c_str());
  } catch (const ferry::Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  }
  return 0;
}
