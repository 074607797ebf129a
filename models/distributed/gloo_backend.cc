#include "models/distributed/gloo_backend.h"

#include <gloo/transport/device.h>

#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

#include "models/distributed/world.h"

namespace ferry::models {
namespace {

std::shared_ptr<::gloo::transport::Device> gloo_device(const World& world) {
  if (const char* const interface = std::getenv("GLOO_SOCKET_IFNAME"))
    return c10d::ProcessGroupGloo::createDeviceForInterface(interface);
  if (world.is_local()) return c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1");
  return c10d::ProcessGroupGloo::createDefaultDevice();
}

// Starts `count` threads for a moment, and throws if the host cannot: a ProcessGroupGloo that
// cannot start its threads ends the process instead.
void require_threads(int count) {
  std::vector<std::jthread> threads;
  std::promise<void> all;
  const auto started = all.get_future().share();
  for (int i = 0; i < count; ++i) threads.emplace_back([started] { started.wait(); });
  all.set_value();
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                            int rank,
                                            int size,
                                            const World& world) {
  auto options = c10d::ProcessGroupGloo::Options::create(world.timeout());
  options->devices.push_back(gloo_device(world));
  require_threads(options->threads);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(
      c10::make_intrusive<c10d::PrefixStore>("gloo", store), rank, size, options);
}

}  // namespace ferry::models
