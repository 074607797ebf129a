#include "trainer/plan/host_misfits.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "trainer/plan/memory_advice.h"

namespace ferry::trainer {
namespace {

struct Host {
  std::string name{};
  std::vector<int> ranks{};
  std::int64_t pinned = 0;
  std::int64_t available = std::numeric_limits<std::int64_t>::max();
};

}  // namespace

std::vector<std::string> host_misfits(std::span<const HostShare> of_ranks) {
  std::vector<Host> hosts;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto& share = of_ranks[rank];
    auto host = std::ranges::find(hosts, share.host, &Host::name);
    if (host == hosts.end()) host = hosts.insert(host, {.name = share.host});
    host->ranks.push_back(static_cast<int>(rank));
    host->pinned += share.pinned;
    host->available = std::min(host->available, share.available);
  }
  std::vector<std::string> misfits;
  for (const auto& host : hosts)
    if (host.pinned > host.available)
      misfits.push_back(fmt::format("{} on {} would pin {} of the host's memory, where {} are free",
                                    in_words(host.ranks), host.name, in_words(host.pinned),
                                    in_words(host.available)));
  return misfits;
}

std::vector<std::string> host_misfits(const RunPlan& plan, std::span<const HostShare> of_ranks) {
  std::vector<HostShare> shares(of_ranks.begin(), of_ranks.end());
  for (std::size_t rank = 0; rank < shares.size(); ++rank)
    shares[rank].pinned = plan.most_bytes(static_cast<int>(rank), &PhaseBytes::host);
  return host_misfits(shares);
}

}  // namespace ferry::trainer
