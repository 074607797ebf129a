// The weights of a training mesh into those of a rollout mesh, over the same ranks or from the
// first half of them to the second: milliseconds, GB/s of the rank that sends or receives most, and
// their share of what the links between the same ranks give one large message each, measured just
// before. Beside it, on the same weights, every tensor gathered and broadcast whole, one at a time
// and in buckets. Every way's result is compared in every bit. Prints a table, or JSON objects.
//   torchrun --no-python --nproc-per-node 4 reshard_bench CHECKPOINT --device cuda
//     --case tp2pp2:tp4
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "converter/open/checkpoint.h"
#include "distckpt/base/error.h"
#include "models/device/device.h"
#include "models/distributed/messages.h"
#include "models/distributed/world.h"
#include "models/reshard/resharder.h"
#include "tests/bench/reshard/gather_and_broadcast.h"
#include "tests/bench/reshard/mesh_weights.h"

namespace ferry {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;

struct Flags {
  std::string checkpoint;
  std::string device = "cpu";
  std::vector<std::string> cases;
  int rounds = 10;
  int peer_rounds = 3;
  std::int64_t bucket_mib = 512;
  std::int64_t link_mib = 1024;
  bool json = false;
};

// The rollout's mesh, and whether it has ranks of its own.
struct Case {
  std::string text;
  models::ParallelConfig source{}, target{};
  bool disjoint = false;

  static Case parse(const std::string& text) {
    const auto first = text.find(':');
    require(first != std::string::npos, ErrorKind::kUsage,
            "case {}: expected FROM:TO or FROM:TO:disjoint", text);
    const auto second = text.find(':', first + 1);
    const auto placement = second == std::string::npos ? "" : text.substr(second + 1);
    require(placement.empty() || placement == "disjoint", ErrorKind::kUsage, "case {}: what is {}",
            text, placement);
    return {.text = text,
            .source = BenchMesh::parse(text.substr(0, first)),
            .target = BenchMesh::parse(text.substr(first + 1, second - first - 1)),
            .disjoint = !placement.empty()};
  }
};

class Bench {
 public:
  Bench(Flags flags, models::TransformerConfig config, models::World& world)
      : flags_(std::move(flags)), config_(std::move(config)), world_(world) {
    std::vector<int> ranks(static_cast<std::size_t>(world.size()));
    std::iota(ranks.begin(), ranks.end(), 0);
    all_ = world.size() == 1 ? models::ProcessGroup() : models::ProcessGroup(world, "bench", ranks);
  }

  void run(const Case& one) {
    const int half = world_.size() / 2;
    const auto mesh = [&](const models::ParallelConfig& parallel, int first, int size) {
      std::vector<int> ranks(static_cast<std::size_t>(size));
      std::iota(ranks.begin(), ranks.end(), first);
      return BenchMesh{.shape = models::MeshShape(parallel, size), .ranks = std::move(ranks)};
    };
    const auto source_mesh = mesh(one.source, 0, one.disjoint ? half : world_.size());
    const auto target_mesh = one.disjoint ? mesh(one.target, half, world_.size() - half)
                                          : mesh(one.target, 0, world_.size());
    models::check_fits(config_, source_mesh.shape);
    models::check_fits(config_, target_mesh.shape);

    result_ = {{"case", one.text}, {"ranks", world_.size()}};
    const double link = measure_link(source_mesh, target_mesh);
    const MeshWeights source(config_, source_mesh, world_.rank(), world_.device());
    const MeshWeights target(config_, target_mesh, world_.rank(), world_.device());
    source.fill();
    const auto padded_vocab = one.source.padded_vocab_size(config_.vocab_size);
    result_["link_gb_per_second"] = link;
    result_["weight_gb"] = agree([&] { return gigabytes(source) + gigabytes(target); });

    const auto before = Clock::now();
    models::Resharder resharder(world_, "reshard " + one.text, source.sharded_state_dict(),
                                target.sharded_state_dict(),
                                {.bucket_bytes = flags_.bucket_mib << 20});
    result_["planning_ms"] = agree([&] { return milliseconds_since(before); });
    result_["copies"] = resharder.plan().copies.size();

    models::ReshardReport report;
    const auto check = [&] {
      return agree([&] { return static_cast<double>(target.count_unequal(padded_vocab)); });
    };
    target.clear();
    resharder.run_and_verify();  // throws where digests differ
    result_["digests_equal"] = true;
    double host = 1e30;
    double memory = 1e30;
    auto timing = measure(flags_.rounds, [&] {
      const auto start = Clock::now();
      resharder.set_memory(source.addresses(), target.addresses());
      memory = std::min(memory, milliseconds_since(start));
      const auto called = Clock::now();
      report = resharder.run();
      host = std::min(host, milliseconds_since(called));
    });
    result_["set_memory_ms"] = agree([&] { return memory; });
    result_["run_host_ms"] = agree([&] { return host; });
    result_["rounds"] = report.rounds;
    result_["staging_mib"] =
        agree([&] { return static_cast<double>(report.staging_bytes) / (1 << 20); });
    const double largest = agree(
        [&] { return static_cast<double>(std::max(report.bytes_sent, report.bytes_received)); });
    result_["largest_rank_gb"] = largest / 1e9;
    result_["moved_on_rank_gb"] =
        agree([&] { return static_cast<double>(report.bytes_local) / 1e9; });
    const auto add = [&](const std::string& way, const Timing& of) {
      Json row{{"ms", of.median}, {"fastest_ms", of.fastest}, {"extra_peak_mib", of.extra_mib}};
      const double rate = largest / of.median / 1e6;
      row["gb_per_second"] = rate;
      row["of_link"] = link > 0 ? rate / link : 0;
      row["unequal"] = check();
      result_[way] = row;
      require(row["unequal"] == 0, ErrorKind::kCorrupt, "{}, {}: {} elements are wrong", one.text,
              way, row["unequal"].dump());
      target.clear();
    };
    add("reshard", timing);

    GatherAndBroadcast peer(world_, "peer " + one.text, config_, source_mesh, source, target_mesh,
                            target);
    add("per_tensor", measure(flags_.peer_rounds, [&] { peer.run(0); }));
    add("buckets", measure(flags_.peer_rounds, [&] { peer.run(flags_.bucket_mib << 20); }));
    all_.barrier();
    print();
  }

 private:
  struct Timing {
    double median = 0;  // milliseconds of the slowest rank
    double fastest = 0;
    double extra_mib = 0;
  };

  static double milliseconds_since(Clock::time_point start) {
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  }

  static double gigabytes(const MeshWeights& weights) {
    double bytes = 0;
    for (const auto& parameter : weights.all())
      bytes += static_cast<double>(parameter.value.nbytes());
    return bytes / 1e9;
  }

  // The largest of all ranks.
  double agree(const std::function<double()>& mine) const {
    return std::ranges::max(models::gather(all_, mine()));
  }

  Timing measure(int rounds, const std::function<void()>& body) const {
    std::vector<double> times;
    Timing timing;
    for (int round = -2; round < rounds; ++round) {  // two to warm up
      all_.barrier();
      models::synchronize(world_.device());
      models::reset_peak_memory(world_.device());
      const auto in_use = models::peak_memory(world_.device());
      const auto start = Clock::now();
      body();
      models::synchronize(world_.device());
      const auto mine = milliseconds_since(start);
      if (round >= 0) times.push_back(agree([&] { return mine; }));
      timing.extra_mib = agree([&] {
        return static_cast<double>(models::peak_memory(world_.device()) - in_use) / (1 << 20);
      });
    }
    std::ranges::sort(times);
    timing.median = times[times.size() / 2];
    timing.fastest = times.front();
    return timing;
  }

  // One message between each two ranks that the meshes have something to move between, all at once:
  // GB/s out of a rank that sends, or into one that receives.
  double measure_link(const BenchMesh& source, const BenchMesh& target) const {
    const auto peers = [&](const BenchMesh& from, const BenchMesh& to) {
      std::vector<int> ranks;
      if (from.index_of(world_.rank()) < 0) return ranks;
      for (const int rank : to.ranks) {
        if (rank != world_.rank()) ranks.push_back(rank);
      }
      return ranks;
    };
    const auto receivers = peers(source, target);
    const auto senders = peers(target, source);
    const auto most_peers = static_cast<std::int64_t>(
        agree([&] { return static_cast<double>(std::max(receivers.size(), senders.size())); }));
    if (most_peers == 0) return 0;
    const auto each = (flags_.link_mib << 20) / most_peers;
    std::vector<models::P2POp> messages;
    const auto add = [&](bool sends, const std::vector<int>& ranks) {
      const auto options = at::TensorOptions().dtype(at::kByte).device(world_.device());
      for (const int rank : ranks)
        messages.push_back({.sends = sends, .tensor = at::zeros({each}, options), .peer = rank});
    };
    add(true, receivers);
    add(false, senders);
    const auto timing = measure(flags_.rounds, [&] {
      if (!messages.empty()) all_.batch_isend_irecv(messages).wait();
    });
    return static_cast<double>(each * most_peers) / timing.median / 1e6;
  }

  void print() {
    if (world_.rank() != 0) return;
    if (flags_.json) {
      fmt::print("{}\n", result_.dump());
    } else {
      if (!std::exchange(has_header_, true))
        fmt::print(
            "| case | way | ms | fastest | GB/s | of link | extra MiB |\n| --- | --- | ---: | ---: "
            "| ---: | ---: | ---: |\n");
      for (const auto& [way, name] : {std::pair("reshard", "ferry"),
                                      std::pair("per_tensor", "gather + broadcast, per tensor"),
                                      std::pair("buckets", "the same in buckets")}) {
        const auto& row = result_[way];
        fmt::print("| {} | {} | {:.2f} | {:.2f} | {:.1f} | {:.2f} | {:.0f} |\n",
                   result_["case"].get<std::string>(), name, row["ms"].get<double>(),
                   row["fastest_ms"].get<double>(), row["gb_per_second"].get<double>(),
                   row["of_link"].get<double>(), row["extra_peak_mib"].get<double>());
      }
      const auto number = [&](const char* key) { return result_[key].get<double>(); };
      fmt::print(
          "| | {:.2f} GB at most per rank, link {:.1f} GB/s, {} copies planned in {:.1f} ms, then "
          "{:.2f} + {:.2f} ms on the host, {} rounds | | | | | |\n",
          number("largest_rank_gb"), number("link_gb_per_second"), result_["copies"].dump(),
          number("planning_ms"), number("set_memory_ms"), number("run_host_ms"),
          result_["rounds"].dump());
    }
    std::fflush(stdout);
  }

  Flags flags_;
  models::TransformerConfig config_;
  models::World& world_;
  models::ProcessGroup all_;
  Json result_;
  bool has_header_ = false;
};

}  // namespace
}  // namespace ferry

int main(int argc, char** argv) {
  using namespace ferry;
  Flags flags;
  CLI::App app("Measures resharding");
  app.add_option("checkpoint", flags.checkpoint,
                 "A checkpoint, of which only the shape is looked at")
      ->required();
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--case", flags.cases,
                 "FROM:TO, or FROM:TO:disjoint from the first half of the ranks to the second; a "
                 "mesh is tp2pp2vpp2 or the like")
      ->required();
  app.add_option("--rounds", flags.rounds, "Of which the median counts");
  app.add_option("--peer-rounds", flags.peer_rounds, "The same of what stands beside it");
  app.add_option("--bucket-mib", flags.bucket_mib, "MiB of a bucket");
  app.add_option("--link-mib", flags.link_mib, "MiB that a rank sends to measure its links");
  app.add_flag("--json", flags.json, "Print a JSON object for each case");
  CLI11_PARSE(app, argc, argv);
  try {
    std::vector<Case> cases;
    for (const auto& text : flags.cases) cases.push_back(Case::parse(text));
    const auto checkpoint = converter::open(flags.checkpoint);
    auto world = models::World::from_environment({.device = at::Device(flags.device)});
    Bench bench(flags, checkpoint.map.config, world);
    for (const auto& one : cases) {
      bench.run(one);
      models::release_cached_memory(world.device());
    }
  } catch (const Error& error) {
    std::fputs(error.report().c_str(), stderr);
    return 2;
  } catch (const std::exception& error) {
    std::fputs(error.what(), stderr);
    return 2;
  }
}
