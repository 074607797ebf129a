#include "trainer/run/config_agreement.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "distckpt/base/error.h"
#include "distckpt/elements/digest.h"
#include "models/distributed/messages.h"
#include "trainer/plan/memory_advice.h"
#include "trainer/run/all_ranks.h"

namespace ferry::trainer {
namespace {

std::string digest_of(const ConfigValues& values) {
  distckpt::RunningDigest digest;
  for (const auto& [key, value] : values) {
    const auto line = fmt::format("{} = {}\n", key, value);
    digest.add(std::as_bytes(std::span(line)));
  }
  return distckpt::to_string(digest.digest());
}

// "64 on ranks 0-2, 40 on rank 3".
std::string values_of_ranks(const std::vector<ConfigValues>& of_ranks, std::size_t key) {
  std::vector<std::pair<std::string, std::vector<int>>> found;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const auto& value = of_ranks[rank][key].second;
    auto same = std::ranges::find(found, value, &decltype(found)::value_type::first);
    if (same == found.end()) same = found.insert(same, {value, {}});
    same->second.push_back(static_cast<int>(rank));
  }
  std::vector<std::string> words;
  for (const auto& [value, ranks] : found)
    words.push_back(fmt::format("{} on {}", value, in_words(ranks)));
  return fmt::format("{}", fmt::join(words, ", "));
}

}  // namespace

void require_agreement(const ConfigValues& mine, models::World& world) {
  const auto all = all_ranks(world, "configuration");
  const auto digests = models::gather(all, digest_of(mine));
  if (std::ranges::count(digests, digests.front()) == std::ssize(digests)) return;
  const auto of_ranks = models::gather(all, mine);
  const auto& first = of_ranks.front();
  std::size_t key = 0;
  while (std::ranges::all_of(of_ranks,
                             [&](const ConfigValues& values) { return values[key] == first[key]; }))
    ++key;
  throw Error(ErrorKind::kUsage,
              fmt::format("the ranks' configurations differ: {} is {}", first[key].first,
                          values_of_ranks(of_ranks, key)),
              "give all ranks the same file and the same settings on their command lines");
}

}  // namespace ferry::trainer
