#include "models/distributed/world.h"

#include <charconv>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/execute/rendezvous.h"
#include "models/device/device.h"
#include "models/device/memory_error.h"
#include "models/distributed/failure_board.h"

namespace ferry::models {
namespace {

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::optional<int> number(const char* name) {
  const auto text = variable(name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

// "gpu[07-09,12],login" -> "gpu07": where rank 0 of a step runs.
std::string first_host(std::string_view list) {
  const auto bracket = list.find_first_of("[,");
  std::string host(list.substr(0, bracket));
  if (bracket == std::string_view::npos || list[bracket] == ',') return host;
  const auto rest = list.substr(bracket + 1);
  return host.append(rest.substr(0, rest.find_first_of("-,]")));
}

// Programs of one job agree on a port without talking.
int port_of_job(std::string_view job) {
  return 20000 + static_cast<int>(std::hash<std::string_view>()(job) % 30000);
}

struct Address {
  std::string host{};
  int port = 0;
};

Address find_address() {
  Address address{.host = variable("MASTER_ADDR"), .port = number("MASTER_PORT").value_or(0)};
  const auto slurm = variable("SLURM_STEP_NODELIST");
  const auto local = number("OMPI_COMM_WORLD_LOCAL_SIZE");
  if (address.host.empty() && !slurm.empty()) address.host = first_host(slurm);
  if (address.host.empty() && local && local == number("OMPI_COMM_WORLD_SIZE"))
    address.host = "127.0.0.1";
  const auto job =
      variable("SLURM_JOB_ID") + variable("SLURM_STEP_ID") + variable("PMIX_NAMESPACE");
  if (address.port == 0 && !job.empty()) address.port = port_of_job(job);
  if (address.host.empty() || address.port == 0) {
    throw Error(ErrorKind::kUsage, "nobody says where rank 0 listens",
                "set MASTER_ADDR and MASTER_PORT, the same on every rank");
  }
  return address;
}

int local_rank() {
  for (const char* name : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"}) {
    if (const auto rank = number(name)) return *rank;
  }
  return 0;
}

// Slurm lists machines, "4(x2),3": the first has as many ranks as any.
int count_local(int all, bool all_are_local) {
  for (const char* name : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    if (const auto size = number(name)) return *size;
  }
  const auto slurm = variable("SLURM_STEP_TASKS_PER_NODE");
  int size = 0;
  std::from_chars(slurm.data(), slurm.data() + slurm.size(), size);
  if (size > 0) return size;
  return all_are_local ? all : 1;
}

bool is_loopback(std::string_view host) {
  return host == "localhost" || host.starts_with("127.") || host == "::1";
}

}  // namespace

World::World(Options options) : options_(options) {}

World::World(Options options, int rank, int size, c10::intrusive_ptr<c10d::Store> store)
    : options_(options), rank_(rank), size_(size), local_size_(size), store_(std::move(store)) {}

World::~World() = default;
World::World(World&&) noexcept = default;
World& World::operator=(World&&) noexcept = default;

World World::from_environment(Options options) {
  const auto job = distckpt::rank_from_environment();
  if (options.device.is_cuda())
    options.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(local_rank()));
  if (job.size == 1) {
    set_device(options.device);
    return World(options);
  }
  const auto address = find_address();
  c10d::TCPStoreOptions tcp;
  tcp.port = static_cast<std::uint16_t>(address.port);
  tcp.isServer = job.rank == 0 && variable("TORCHELASTIC_USE_AGENT_STORE") != "True";
  tcp.numWorkers = static_cast<std::size_t>(job.size);
  tcp.timeout = options.timeout;
  c10::intrusive_ptr<c10d::Store> store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(address.host, tcp);
  } catch (const std::exception& error) {
    if (is_out_of_memory(error)) throw error_of(error, "joining the other ranks", "");
    throw Error(ErrorKind::kIo,
                fmt::format("rank {} of {} does not reach the others at {}:{}: {}", job.rank,
                            job.size, address.host, address.port, text_of(error)));
  }
  const auto restarts = variable("TORCHELASTIC_RESTART_COUNT");
  World world(options, job.rank, job.size,
              c10::make_intrusive<c10d::PrefixStore>(
                  fmt::format("ferry/{}", restarts.empty() ? "0" : restarts), std::move(store)));
  world.local_ = is_loopback(address.host);
  world.local_size_ = count_local(job.size, world.local_);
  const auto tell_others = [&](const Error& error) {
    announce_failure(world, error);
    wait_for_failures(world);
  };
  try {
    world.presence_ = stay_present(world.store_, world.rank_);
    set_device(options.device);  // may find no memory for a context, which the others have to hear
  } catch (const Error& error) {
    tell_others(error);
    throw;
  } catch (const std::exception& error) {
    const auto failure = error_of(error, "joining the other ranks", "");
    tell_others(failure);
    throw failure;
  }
  return world;
}

void run_ranks(int size, const World::Options& options, const std::function<void(World&)>& body) {
  // LibTorch has one flight recorder for the process, whose maps are not safe for several ranks:
  // unless it is off, runs crash now and then.
  setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);
  auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::exception_ptr first;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          World world(options, rank, size, store);
          body(world);
        } catch (...) {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
      });
    }
  }
  if (first) std::rethrow_exception(first);
}

}  // namespace ferry::models
